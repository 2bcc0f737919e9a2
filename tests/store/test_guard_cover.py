"""Who waits for which chunk, and what is put aside, against a model that looks at each byte."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell import stash as stashing
from stepwell.cover import FIXED, UNCOVERED, Cover, Layout, Leaves
from stepwell.native import Copies, DeviceEngine, Job, Latch, Op, PieceMap, probe_device
from stepwell.stash import STASH_BYTES, STASH_BYTES_MAX, STRETCHES_BYTES_MAX, STRETCHES_MAX, Aside, Stash, segments_of
from stepwell.state import Snapshot, capture
from stepwell.state.whereabouts import HOST
from tests.state.standing import Standing, standing

CHUNK = 4096
sizes = st.lists(st.integers(0, 5000), min_size=1, max_size=12)


def _captured(lengths: list[int]) -> Snapshot:
    return capture({"model": {f"w{i}": torch.arange(n, dtype=torch.uint8) for i, n in enumerate(lengths)}})


@given(lengths=sizes, data=st.data())
@settings(max_examples=60)
def test_each_chunk_waits_for_the_owners_of_its_bytes(lengths: list[int], data: st.DataObject) -> None:
    snapshot = _captured(lengths)
    count = len(snapshot.plan.structure.names)
    owners = np.array([data.draw(st.sampled_from([UNCOVERED, FIXED, 0, 1])) for _ in range(count)], np.intp)
    places = np.array([data.draw(st.sampled_from([HOST, 0, 1])) for _ in range(count)], np.intp)
    layout = Layout.of(snapshot.plan.shards, owners, places, CHUNK)
    counts: dict[tuple[int, int], int] = {}
    for shard, chunks in zip(snapshot.plan.shards, layout.chunks, strict=True):
        whose = [(FIXED, HOST)] * len(shard.header)
        for leaf, begin, end in zip(shard.leaves, shard.offsets[1:], shard.offsets[2:], strict=False):
            whose += [(int(owners[leaf]), int(places[leaf]))] * int(end - begin)
        assert len(whose) == shard.size and len(chunks) == -(-shard.size // CHUNK)
        for number, (urgent, found) in enumerate(chunks):
            mine = set(whose[number * CHUNK : (number + 1) * CHUNK])
            assert urgent == any(owner == UNCOVERED for owner, _ in mine)
            assert found == {each for each in mine if each[0] >= 0}
            for each in found:
                counts[each] = counts.get(each, 0) + 1
    assert dict(layout.counts) == counts
    assert layout.urgent == any(urgent for chunks in layout.chunks for urgent, _ in chunks)


def _bytes(snapshot: Snapshot, leaf: int) -> bytes:
    size = int(snapshot.plan.structure.sizes[leaf])
    return ctypes.string_at(int(snapshot.addresses[leaf]), size) if size else b""


@given(lengths=sizes, data=st.data())
@settings(max_examples=60)
def test_what_is_put_aside_does_not_change_any_more(lengths: list[int], data: st.DataObject) -> None:
    snapshot = _captured(lengths)
    count = len(snapshot.plan.structure.names)
    owners = np.array([data.draw(st.sampled_from([UNCOVERED, FIXED, 0])) for _ in range(count)], np.intp)
    stash = Stash(snapshot, owners == UNCOVERED, snapshot.plan.structure.gpus)
    assert stash.leaves.tolist() == [leaf for leaf in range(count) if owners[leaf] == UNCOVERED and lengths[leaf]]
    before = [_bytes(snapshot, leaf) for leaf in range(count)]
    aside, _ = stash.put_aside(snapshot)
    for tensor in snapshot.tensors:
        tensor.add_(1)
    for leaf in range(count):
        changed = bytes((each + 1) % 256 for each in before[leaf])
        assert _bytes(aside, leaf) == (before[leaf] if leaf in stash.leaves else changed)


@given(lengths=st.lists(st.integers(1, 200), min_size=1, max_size=12), data=st.data())
@settings(max_examples=60)
def test_what_is_put_aside_on_gpus_is_theirs(lengths: list[int], data: st.DataObject) -> None:
    with standing() as gpus:
        tensors = [torch.arange(number, number + n, dtype=torch.uint8) for number, n in enumerate(lengths)]
        for tensor in tensors:
            gpus.put(tensor, data.draw(st.integers(0, 1)))
        snapshot = capture({"model": {f"w{number}": tensor for number, tensor in enumerate(tensors)}})
        stash = Stash(snapshot, np.ones(len(lengths), np.bool_), snapshot.plan.structure.gpus)
        for _ in range(2):
            before = [_bytes(snapshot, leaf) for leaf in range(len(lengths))]
            aside, _ = stash.put_aside(snapshot)
            for tensor in tensors:
                tensor.add_(1)
            assert [_bytes(aside, leaf) for leaf in range(len(lengths))] == before
            assert not set(aside.addresses.tolist()) & set(snapshot.addresses.tolist())


class Memory:
    """A piece of memory with gaps, in which tiny tensors stand for an optimizer's on a GPU."""

    def __init__(self, gaps: list[int]) -> None:
        self.room = np.zeros(sum(gaps) + 4 * len(gaps), np.uint8)
        self.begin = self.room.ctypes.data
        ends = np.cumsum([gap + 4 for gap in gaps]).tolist()
        self.tensors = [torch.frombuffer(self.room, dtype=torch.uint8, offset=end - 4, count=4) for end in ends]

    def fill(self, value: int) -> None:
        for number, tensor in enumerate(self.tensors):
            tensor.fill_((value + number) % 256)

    def captured(self, gpus: Standing) -> Snapshot:
        for tensor in self.tensors:
            gpus.put(tensor)
        return capture({"model": {f"w{number}": tensor for number, tensor in enumerate(self.tensors)}})


def make(copies: Mapping[int, Copies]) -> None:
    """As a mark does."""
    for gpu in copies:
        words = list(copies[gpu].words)
        for at in range(0, len(words), 3):
            to, begin, size = words[at : at + 3]
            ctypes.memmove(to, begin, size)


@given(gaps=st.lists(st.integers(0, 700), min_size=1, max_size=30), cuts=st.sets(st.integers(1, 29), max_size=3))
@settings(max_examples=60)
def test_tiny_ones_near_each_other_are_copied_with_what_lies_between(gaps: list[int], cuts: set[int]) -> None:
    memory = Memory(gaps)
    ends = [0, *(sum(gaps[:cut]) + 4 * cut for cut in sorted(cuts) if cut < len(gaps)), memory.room.size]
    segments = [(memory.begin + begin, memory.begin + end) for begin, end in pairwise(ends)]
    with standing() as gpus, pytest.MonkeyPatch.context() as patch:
        patch.setattr(stashing, "segments_of", lambda gpu: segments[::-1])
        snapshot = memory.captured(gpus)
        stash = Stash(snapshot, np.ones(len(gaps), np.bool_), snapshot.plan.structure.gpus)
        taken: list[Aside] = []
        for value in range(5):
            memory.fill(value)
            saved, aside = stash.put_aside(snapshot)
            assert aside is not None and set(aside.copies) == {0} and aside.copies[0].count == len(segments)
            make(aside.copies)
            memory.fill(100)
            found = [_bytes(saved, leaf)[0] for leaf in range(len(gaps))]
            assert found == [(value + number) % 256 for number in range(len(gaps))]
            assert {id(each) for each in aside.memory} <= {id(each) for each in saved.storages}
            taken.append(aside)
            for each in taken if value == 1 else ():
                each.give_back()
        first, second, third, fourth, fifth = map(id, taken)
        assert first != second and {third, fourth} == {first, second} and fifth not in (first, second)


@pytest.mark.parametrize("what", ["none is told", "one is outside", "too far", "too many"])
def test_tiny_ones_that_are_not_near_each_other_are_taken_one_by_one(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory([STRETCHES_BYTES_MAX if what == "too far" else 30] * (STRETCHES_MAX + 2))
    begin, end = memory.begin, memory.begin + memory.room.size
    segments = {
        "none is told": [],
        "one is outside": [(begin, end - 1)],
        "too far": [(begin, end)],
        "too many": [(begin + at, begin + at + 34) for at in range(0, memory.room.size, 34)],
    }[what]
    monkeypatch.setattr(stashing, "segments_of", lambda gpu: segments)
    with standing() as gpus:
        snapshot = memory.captured(gpus)
        stash = Stash(snapshot, np.ones(len(memory.tensors), np.bool_), snapshot.plan.structure.gpus)
        memory.fill(1)
        saved, aside = stash.put_aside(snapshot)
        memory.fill(50)
    assert aside is None and [_bytes(saved, leaf)[0] for leaf in range(len(memory.tensors))] == [1, 2, 3, 4, 5, 6]


def test_addresses_that_were_seen_before_are_moved_once() -> None:
    memory = Memory([10] * 5)
    with standing() as gpus, pytest.MonkeyPatch.context() as patch:
        patch.setattr(stashing, "segments_of", lambda gpu: [(memory.begin, memory.begin + memory.room.size)])
        snapshot = memory.captured(gpus)
        stash = Stash(snapshot, np.ones(5, np.bool_), snapshot.plan.structure.gpus)
        _, aside = stash.put_aside(snapshot)
    assert aside is not None
    here = aside.within(snapshot.addresses)
    assert aside.within(snapshot.addresses) is here
    others = snapshot.addresses + np.uint64(0)
    assert aside.within(others) is not here and np.array_equal(aside.within(others), here)


def test_what_is_put_aside_lives_until_it_is_let_go() -> None:
    snapshot = _captured([10, 5000])
    stash = Stash(snapshot, np.array([True, False]), snapshot.plan.structure.gpus)
    snapshot.hold([snapshot.tensors[1]])
    aside, _ = stash.put_aside(snapshot)
    [_, memory] = aside.storages
    assert memory.data_ptr() == int(aside.addresses[0])
    aside.let_go()
    assert aside.storages == aside.tensors == []


def test_latches_that_were_made_before_are_those_of_one_save_each() -> None:
    snapshot = _captured([5000, 5000])
    owners = np.array([0, 1], np.intp)
    layout = Layout.of(snapshot.plan.shards, owners, snapshot.plan.structure.gpus, CHUNK)
    leaves = [Leaves([0]), Leaves([1])]
    seen: list[Latch] = []
    for _ in range(4):
        covers = [Cover(layout, snapshot, leaves, [(), ()]) for _ in range(3)]
        latches = [latch for cover in covers for latch in cover.latches.values()]
        assert [cover.latches.keys() for cover in covers] == [layout.counts.keys()] * 3
        assert len(set(map(id, latches))) == 3 * len(layout.counts)
        assert not {id(latch) for latch in latches} & {id(latch) for latch in seen}
        for cover in covers:
            assert {place: latch.left for place, latch in cover.latches.items()} == layout.counts
            cover.end()
            assert all(latch.wait(0) for latch in cover.latches.values())
        seen += latches


def test_a_change_of_any_covered_tensor_is_told_by_name() -> None:
    snapshot = _captured([5000] * 5)
    owners = np.array([0, 1, 0, UNCOVERED, 1], np.intp)
    layout = Layout.of(snapshot.plan.shards, owners, snapshot.plan.structure.gpus, CHUNK)
    for leaf, told in enumerate([True, True, True, False, True]):
        cover = Cover(layout, snapshot, [Leaves([0, 2]), Leaves([1, 4])], [(), ()])
        snapshot.tensors[leaf].add_(1)
        error = cover.copied()
        assert (error is not None) == told
        assert error is None or error.where["key"] == f"model.w{leaf}"


def test_tensors_at_hand_are_watched_as_others_are() -> None:
    snapshot, mine = _captured([5000] * 3), Leaves([0, 2])
    layout = Layout.of(
        snapshot.plan.shards, np.array([0, 1, 0], np.intp), snapshot.plan.structure.gpus, CHUNK
    )  # fmt: skip
    for leaf in range(3):
        cover = Cover(layout, snapshot, [mine, Leaves([1])], [(), ()], (mine, mine.of(snapshot.tensors)))
        snapshot.tensors[leaf].add_(1)
        error = cover.copied()
        assert error is not None and error.where["key"] == f"model.w{leaf}"


def test_inference_tensors_count_no_changes() -> None:
    with torch.inference_mode():
        fixed = torch.ones(5000)
    snapshot = capture({"model": {"fixed": fixed, "other": torch.ones(5000)}})
    layout = Layout.of(snapshot.plan.shards, np.zeros(2, np.intp), snapshot.plan.structure.gpus, CHUNK)
    cover = Cover(layout, snapshot, [Leaves([0, 1])], [()])
    with torch.inference_mode():
        fixed.add_(1)
    assert cover.copied() is None
    cover = Cover(layout, snapshot, [Leaves([0, 1])], [()])
    snapshot.tensors[1].add_(1)
    error = cover.copied()
    assert error is not None and error.where["key"] == "model.other"


def test_large_tensors_and_too_many_are_not_put_aside() -> None:
    snapshot = _captured([STASH_BYTES, STASH_BYTES - 1])
    assert Stash(snapshot, np.ones(2, np.bool_), snapshot.plan.structure.gpus).leaves.tolist() == [1]
    many = _captured([STASH_BYTES - 1] * (STASH_BYTES_MAX // STASH_BYTES + 1))
    every = np.ones(len(many.plan.structure.names), np.bool_)
    assert not len(Stash(many, every, many.plan.structure.gpus).leaves)


@pytest.mark.gpu
@pytest.mark.skipif(not probe_device()[0], reason="no GPU")
def test_an_optimizer_s_numbers_on_a_gpu_are_copied_by_the_mark() -> None:
    """By the segments of torch's own memory, in the order of the current stream."""
    parameters = [torch.nn.Parameter(torch.rand(2000, device="cuda")) for _ in range(50)]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    engine = DeviceEngine("marks", 0)

    def step() -> list[float]:
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return [float(state["step"]) for state in optimizer.state.values()]

    step()
    for _ in range(4):
        snapshot = capture({"optimizer": optimizer})
        tiny = [leaf for leaf, tensor in enumerate(snapshot.tensors) if tensor.numel() == 1]
        uncovered = np.isin(np.arange(len(snapshot.tensors)), tiny)
        stash = Stash(snapshot, uncovered, snapshot.plan.structure.gpus)
        assert len(tiny) == 50 and len(stash._near) == 1, segments_of(0)
        for _ in range(3):
            before = step()
            saved, aside = stash.put_aside(snapshot)
            assert aside is not None
            mark = engine.mark(torch.cuda.current_stream().cuda_stream, aside.copies[0])
            step()
            found = np.zeros(len(tiny), np.float32)
            offsets = np.arange(0, 4 * len(tiny) + 1, 4, dtype=np.uint64)
            pieces = PieceMap(offsets, saved.addresses[tiny], saved)
            job = Job(Op.D2H, address=found.ctypes.data, length=found.nbytes, pieces=pieces, mark=mark)
            engine.submit([job])
            while not (done := engine.reap()):
                time.sleep(0.001)
            assert done[0].result == found.nbytes and found.tolist() == before
            aside.give_back()
    engine.close()
