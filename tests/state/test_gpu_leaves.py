"""Tensors on GPUs, for which tensors in host memory stand: their own pieces, never copied by way of the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepwell.state import PlanCache, Snapshot, capture
from stepwell.state.alias import NO_ALIASES, find_aliases
from stepwell.state.whereabouts import gpu_of
from tests.state.memory import Saved, assert_same, files_of, raw
from tests.state.standing import Standing, standing
from tests.state.test_properties import QUICK, any_tensor


@pytest.fixture
def gpus() -> Iterator[Standing]:
    with standing() as found:
        yield found


def _addresses(snapshot: Snapshot, shard: int = 0) -> dict[int | None, set[int]]:
    source, size = snapshot.source(shard), snapshot.shards[shard].size
    maps = [(None, source.pieces(0, size)), *source.gpu_pieces(0, size)]
    return {gpu: set(pieces._addresses.tolist()) - {0} for gpu, pieces in maps}


def test_each_gpu_has_a_map_of_its_own(gpus: Standing) -> None:
    host, first, second = (torch.full((3, 4), float(value)) for value in range(3))
    gpus.put(first, 0)
    gpus.put(second, 1)
    snapshot = capture({"model": {"a": first, "b": host, "c": second, "empty": gpus.put(torch.empty(0), 1)}})
    found = _addresses(snapshot)
    assert found[0] == {first.data_ptr()} and found[1] == {second.data_ptr()}
    assert host.data_ptr() in (found[None] or set()) and len(found[None]) == 2  # and the header
    assert snapshot.plan.structure.gpus.tolist() == [0, -1, 1, 1]
    assert snapshot.shards[0].gpus.tolist() == [0, 1] and not snapshot.shards[0].lazy.size


def test_a_range_names_only_what_is_in_it(gpus: Standing) -> None:
    state = {"model": {"a": torch.ones(1000), "b": gpus.put(torch.ones(1000)), "c": gpus.put(torch.ones(1000), 3)}}
    snapshot = capture(state)
    source, header = snapshot.source(0), len(snapshot.shards[0].header)
    for start, stop, on, host in [
        (0, header + 4000, [], True),
        (header + 3999, header + 4001, [0], True),
        (header + 4000, header + 8000, [0], False),
        (header + 7999, header + 8001, [0, 3], False),
        (header + 8000, header + 12000, [3], False),
        (header + 5000, header + 5000, [], False),
        (0, header + 12000, [0, 3], True),
    ]:
        assert [gpu for gpu, _ in source.gpu_pieces(start, stop)] == on
        assert source.has_host_pieces(start, stop) is host
    assert source.gpu_pieces(header + 4000, header + 5000)[0][1] is source.gpu_pieces(0, header + 6000)[0][1]
    assert not source.pieces(header + 4000, header + 4100)._addresses[2:].any()
    with pytest.raises(ValueError, match="not inside"):
        source.gpu_pieces(0, header + 12001)


def test_leaves_in_a_range() -> None:
    plan = capture({"model": {"a": torch.ones(10), "none": torch.ones(0), "b": torch.ones(10)}}).shards[0]
    header = len(plan.header)
    assert plan.leaves_in(0, header).tolist() == [] and plan.pieces_in(0, header) == slice(0, 1)
    assert plan.leaves_in(0, header + 1).tolist() == [0]
    assert plan.leaves_in(header + 39, header + 41).tolist() == [0, 2]
    assert plan.leaves_in(header + 40, plan.size).tolist() == [2] and plan.pieces_in(5, 5) == slice(0, 0)


def test_what_is_not_contiguous_is_cloned_on_its_gpu(gpus: Standing) -> None:
    turned = gpus.put(torch.arange(12, dtype=torch.bfloat16).reshape(3, 4).t())
    sliced = gpus.put(torch.arange(20.0).reshape(4, 5)[:, 1:3])
    conjugate = gpus.put(torch.arange(4).to(torch.complex64) * 1j).conj()
    negative = torch._neg_view(gpus.put(torch.arange(3.0)))
    state = {"model": {"t": turned, "s": sliced, "c": conjugate, "n": negative, "tied": turned}}
    saved = Saved(state)
    snapshot = saved.snapshot
    assert sorted(snapshot.plan.clones) == [0, 1, 2, 3]
    assert snapshot.tensors[4] is turned
    for leaf in snapshot.plan.clones:
        assert snapshot.tensors[leaf].is_contiguous()
        assert snapshot.addresses[leaf] == snapshot.tensors[leaf].data_ptr()
    loaded = saved.load()["model"]
    assert_same(loaded, state["model"])
    assert loaded["t"].stride() == turned.stride() and loaded["tied"] is loaded["t"]


def test_a_clone_is_what_was_there_when_it_was_captured(gpus: Standing) -> None:
    turned = gpus.put(torch.arange(6.0).reshape(2, 3)).t()
    plans = PlanCache()
    for _ in range(4):
        before = raw(turned)
        snapshot = capture({"model": turned}, plans=plans)
        turned += 1
        assert before in files_of(snapshot)["model.safetensors"]


def test_another_gpu_is_another_structure(gpus: Standing) -> None:
    plans = PlanCache()
    state = {"model": {f"w{index}": torch.ones(4) for index in range(3)}}
    made: dict[int | None, Any] = {}
    for gpu in (None, 0, 1, None, 0, 1):
        if gpu is not None:
            gpus.put(state["model"]["w1"], gpu)
        else:
            gpus._gpus.clear()
        plan = capture(state, plans=plans).plan
        assert made.setdefault(gpu, plan) is plan
        assert plan.shards[0].gpus.tolist() == ([] if gpu is None else [gpu])
    assert len({id(plan) for plan in made.values()}) == 3


def test_equal_addresses_on_two_devices_are_not_the_same_memory() -> None:
    tensors = [torch.ones(4), torch.ones(4), torch.ones(2)]
    begins, extents = np.array([4096, 4096, 4104], np.uint64), np.array([16, 16, 8], np.uint64)
    assert find_aliases(tensors, begins, extents, [0, 1, -1]) == NO_ALIASES
    assert dict(find_aliases(tensors, begins, extents, [0, 0, 1]).ties).keys() == {1}
    both = find_aliases(tensors, begins, extents, [0, 1, 1])
    assert not both.ties and [leaf for leaf, _ in both.places] == [1, 2]


@given(data=st.data(), tensors=st.lists(any_tensor(), min_size=1, max_size=6), chunk=st.integers(1, 9000))
@QUICK
def test_what_goes_in_comes_back_from_anywhere(data: st.DataObject, tensors: list[torch.Tensor], chunk: int) -> None:
    with standing() as gpus:
        own = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        for address in sorted(own, key=list(own).index):
            gpu = data.draw(st.sampled_from([None, 0, 1]))
            if gpu is not None:
                gpus.put(next(t for t in tensors if t.untyped_storage().data_ptr() == address), gpu)
        state: dict[str, Any] = {"model": dict(zip("abcdef", tensors, strict=False)), "n": 1}
        plans = PlanCache()
        saved, again = Saved(state), [capture(state, plans=plans) for _ in range(3)]
        assert [gpu_of(t) for t in tensors] == [None if g < 0 else g for g in again[0].plan.structure.gpus.tolist()]
    assert_same(saved.load(), state)
    sizes = max(chunk, saved.snapshot.nbytes // 50 + 1)
    assert all(files_of(snapshot, sizes) == saved.files for snapshot in again)
