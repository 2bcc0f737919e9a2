"""Who waits for which chunk, and what is put aside, against a model that looks at each byte."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.cover import FIXED, UNCOVERED, Cover, Layout, Leaves
from stepwell.gpus import use_kernels
from stepwell.native import DeviceEngine, Gathering, Job, Latch, Op, PieceMap, probe_device
from stepwell.stash import KEPT_BYTES_MAX, STASH_BYTES, STASH_BYTES_MAX, Aside, Stash
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


def make(gatherings: Mapping[int, Gathering]) -> None:
    """As a mark does."""
    for each in gatherings.values():
        to = each.to
        for address, size in zip(each.addresses.tolist(), each.sizes.tolist(), strict=True):
            ctypes.memmove(to, address, size)
            to += size


def _on_gpus(gpus: Standing, lengths: list[int], where: list[int]) -> Snapshot:
    tensors = [gpus.put(torch.zeros(n, dtype=torch.uint8), gpu) for n, gpu in zip(lengths, where, strict=True)]
    return capture({"model": {f"w{number}": tensor for number, tensor in enumerate(tensors)}})


@given(lengths=st.lists(st.integers(1, 200), min_size=1, max_size=12), data=st.data())
@settings(max_examples=60)
def test_what_is_put_aside_on_gpus_is_theirs(lengths: list[int], data: st.DataObject) -> None:
    """Whatever is under way: as many saves as are not given back have memory of their own."""
    where = [data.draw(st.integers(HOST, 1)) for _ in lengths]
    with standing() as gpus:
        snapshot = _on_gpus(gpus, lengths, where)
        stash = Stash(snapshot, np.ones(len(lengths), np.bool_), snapshot.plan.structure.gpus)
        under_way: list[tuple[Snapshot, Aside | None, list[bytes]]] = []
        for value in range(6):
            for number, tensor in enumerate(snapshot.tensors):
                tensor.fill_(16 * value + number)
            saved, aside = stash.put_aside(snapshot)
            gatherings = {} if aside is None else aside.gatherings
            assert set(gatherings) == {gpu for gpu in where if gpu != HOST}
            make(gatherings)
            under_way.append((saved, aside, [_bytes(snapshot, leaf) for leaf in range(len(lengths))]))
            if data.draw(st.booleans()):
                _, old, _ = under_way.pop(data.draw(st.integers(0, len(under_way) - 1)))
                if old is not None:
                    old.give_back()
            for each, _, expected in under_way:
                assert [_bytes(each, leaf) for leaf in range(len(lengths))] == expected
                assert not set(each.addresses.tolist()) & set(snapshot.addresses.tolist())


@pytest.mark.parametrize(("length", "kept"), [(KEPT_BYTES_MAX // 2, True), (KEPT_BYTES_MAX // 2 + 1, False)])
def test_memory_for_little_is_kept(length: int, kept: bool) -> None:
    with standing() as gpus:
        snapshot = _on_gpus(gpus, [length, length], [0, 1])
        stash = Stash(snapshot, np.ones(2, np.bool_), snapshot.plan.structure.gpus)
        taken = [stash.put_aside(snapshot)[1] for _ in range(4)]
        for each in taken:
            assert each is not None
            each.give_back()
        again = [stash.put_aside(snapshot)[1] for _ in range(4)]
    assert len(set(map(id, taken)) & set(map(id, again))) == (2 if kept else 0)


def test_addresses_that_were_seen_before_are_moved_once() -> None:
    with standing() as gpus:
        snapshot = _on_gpus(gpus, [10] * 5, [0] * 5)
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
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "copies"])
def test_an_optimizer_s_numbers_on_a_gpu_are_gathered_by_the_mark(kernels: bool) -> None:
    """In the order of the current stream, among tensors of all sizes that are put aside."""
    parameters = [torch.nn.Parameter(torch.rand(200 * n, device="cuda")) for n in range(1, 251)]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    engine = DeviceEngine("marks", 0)
    kept = use_kernels(engine, 0) if kernels else None
    assert kept is not None or not kernels

    def step() -> list[float]:
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return [float(state["step"]) for state in optimizer.state.values()]

    step()
    for _ in range(4):
        snapshot = capture({"optimizer": optimizer})
        tiny = [leaf for leaf, tensor in enumerate(snapshot.tensors) if tensor.numel() == 1]
        stash = Stash(snapshot, np.ones(len(snapshot.tensors), np.bool_), snapshot.plan.structure.gpus)
        assert len(tiny) == 250 and len(stash.leaves) == 750
        for _ in range(3):
            before = step()
            saved, aside = stash.put_aside(snapshot)
            assert aside is not None
            mark = engine.mark(torch.cuda.current_stream().cuda_stream, aside.gatherings[0])
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
