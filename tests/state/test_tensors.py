"""Tensors of every kind, saved and brought back bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from stepwell.errors import StateError
from stepwell.state import build, capture
from tests.state.memory import Saved, assert_same, fill, raw, through

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of any dtype whose bytes are random: with NaNs, infinities and what else there is."""
    generator = torch.Generator().manual_seed(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # experimental and deprecated dtypes
        count = torch.Size(shape).numel() * dtype.itemsize
        data = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
        flat = data.view(dtype)
        return flat.as_strided(shape, torch.empty(shape, dtype=torch.uint8).stride())


def blank(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros of the same dtype and shape."""
    return torch.zeros(tensor.nbytes, dtype=torch.uint8).view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_that_torch_has_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    state = {"model": {"w": random_bits(dtype, 3, 4), "empty": random_bits(dtype, 0, 2), "one": random_bits(dtype)}}
    saved = Saved(state)
    loaded = saved.load()["model"]
    for name, tensor in state["model"].items():
        assert loaded[name].dtype == dtype and loaded[name].shape == tensor.shape
        assert raw(loaded[name]) == raw(tensor)
    live = {"model": {name: blank(tensor) for name, tensor in state["model"].items()}}
    pointers = [tensor.data_ptr() for tensor in live["model"].values()]
    saved.restore(live)
    assert [raw(tensor) for tensor in live["model"].values()] == [raw(tensor) for tensor in state["model"].values()]
    assert [tensor.data_ptr() for tensor in live["model"].values()] == pointers


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_tensors_of_every_dtype(dtype: torch.dtype) -> None:
    tensor = random_bits(dtype, 6, 5).t()[1:]
    assert raw(through(tensor)) == raw(tensor)


QUANTISED: dict[str, Callable[[], torch.Tensor]] = {
    "tensor": lambda: torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 3, torch.qint8),
    "channel": lambda: torch.quantize_per_channel(
        torch.randn(3, 4), torch.tensor([0.1, 0.2, 0.4]), torch.tensor([0, 1, 2]), 0, torch.quint8
    ),
    "wide": lambda: torch.quantize_per_tensor(torch.randn(5), 0.5, 0, torch.qint32),
    "packed": lambda: torch.quantize_per_channel(
        torch.randn(4, 5), torch.rand(4) + 0.1, torch.rand(4), 0, torch.quint4x2
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_tensors_keep_scale_and_zero_point(kind: str) -> None:
    tensor = QUANTISED[kind]()
    new = through(tensor)
    assert new.is_quantized and new.dtype == tensor.dtype and new.qscheme() == tensor.qscheme()
    assert torch.equal(new.dequantize(), tensor.dequantize())


def test_layouts_give_the_right_values_to_every_reader() -> None:
    base = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
    state = {
        "transposed": base[0, 0].t().clone(memory_format=torch.preserve_format),
        "channels_last": base.to(memory_format=torch.channels_last),
        "every_second": base.clone()[..., ::2],
        "flipped": base[0].flip(0),
        "expanded": torch.arange(4.0)[:, None].expand(4, 6),
        "narrow": base.clone().narrow(2, 1, 2),
        "one_row": base.clone()[1:, :, 2:3],
    }
    saved = Saved({"model": state})
    files = saved.labels()
    loaded = saved.load()["model"]
    for name, tensor in state.items():
        file, entry = files[name]
        assert saved.files[file][entry.begin : entry.end] == raw(tensor), name
        assert torch.equal(loaded[name], tensor), name
    for name in ("transposed", "channels_last"):  # dense layouts come back, gaps are closed
        assert loaded[name].stride() == state[name].stride()
    assert loaded["expanded"].is_contiguous() and loaded["every_second"].is_contiguous()


def test_conj_and_neg_bits() -> None:
    base = torch.randn(3, 4, dtype=torch.complex64)
    state = {"conj": base.conj(), "neg": base.conj().imag, "one": torch.randn(1, dtype=torch.complex128).conj().imag}
    for name, tensor in Saved({"model": state}).load()["model"].items():
        assert torch.equal(tensor, state[name]) and not tensor.is_conj() and not tensor.is_neg()


def test_empty_and_zero_dimensional_tensors() -> None:
    state = {
        "a": torch.tensor(1.5),
        "b": torch.tensor(3),
        "c": torch.empty(0),
        "d": torch.empty(2, 0),
        "e": torch.empty(0, 3),
    }
    assert_same(Saved({"model": state}).load()["model"], state)
    only_empty = Saved({"model": {"x": torch.empty(0, 3)}})
    assert_same(only_empty.load()["model"], {"x": torch.empty(0, 3)})


def test_a_view_of_a_large_storage_is_stored_alone() -> None:
    big = torch.zeros(5_000_000)
    saved = Saved({"model": {"slice": big[:10], "row": big.view(5, -1)[2, 5:9]}})
    assert saved.snapshot.nbytes < 10_000
    loaded = saved.load()["model"]
    assert loaded["slice"].untyped_storage().nbytes() == 40


def test_disjoint_views_of_a_flat_buffer_are_independent() -> None:
    flat = torch.arange(1000.0)
    state = {f"p{index}": flat[index * 20 : index * 20 + 20].view(4, 5) for index in range(50)}
    saved = Saved({"model": state})
    assert saved.snapshot.nbytes - len(saved.snapshot.shards[0].header) == 4000
    loaded = saved.load()["model"]
    assert_same(loaded, state)
    assert loaded["p0"].untyped_storage().nbytes() == 80
    assert_same(saved.load(part="model", keys="p7"), {"p7": state["p7"]})


def test_tied_tensors_are_stored_once_and_tied_again() -> None:
    weight = torch.nn.Parameter(torch.randn(6, 4))
    saved = Saved({"model": {"embed": weight, "head": weight, "turned": weight.detach().t()}})
    assert list(saved.labels()) == ["embed"]
    loaded = saved.load()["model"]
    assert loaded["embed"] is loaded["head"]
    assert torch.equal(loaded["turned"], weight.t())
    with torch.no_grad():
        loaded["embed"][2, 3] = 42
    assert loaded["turned"][3, 2] == 42


def test_a_tie_with_a_transposed_first_tensor() -> None:
    base = torch.randn(4, 6)
    loaded = Saved({"model": {"turned": base.t(), "plain": base}}).load()["model"]
    assert torch.equal(loaded["plain"], base) and torch.equal(loaded["turned"], base.t())
    assert loaded["plain"].data_ptr() == loaded["turned"].data_ptr()


def test_ties_between_parts() -> None:
    weight = torch.randn(600, 600)
    saved = Saved({"model": {"w": weight}, "ema": {"w": weight}})
    assert saved.snapshot.parts == {"model": ["model.safetensors"], "ema": ["model.safetensors"]}
    assert torch.equal(saved.load(part="ema")["w"], weight)


@pytest.mark.parametrize("turn", [False, True])
def test_a_tie_fills_both_targets_where_it_is_broken(turn: bool) -> None:
    weight = torch.randn(6, 4)
    saved = Saved({"model": {"a": weight, "b": weight.t() if turn else weight}})
    live = {"model": {"a": torch.zeros(6, 4), "b": torch.zeros(4, 6) if turn else torch.zeros(6, 4)}}
    saved.restore(live)
    assert torch.equal(live["model"]["a"], weight)
    assert torch.equal(live["model"]["b"], weight.t() if turn else weight)
    alone = {"model": {"b": torch.zeros_like(live["model"]["b"])}}
    saved.restore(alone, strict=False)
    assert torch.equal(alone["model"]["b"], live["model"]["b"])


def test_half_a_tie_in_the_checkpoint_fills_both_names() -> None:
    weight = torch.randn(3, 3)
    shared = torch.zeros(3, 3)
    saved = Saved({"model": {"embed": weight}})
    live = {"model": {"embed": shared, "head": shared}}
    assert saved.restore(live).missing == []
    assert torch.equal(live["model"]["head"], weight)


def test_overlapping_views_keep_their_values_and_share_memory_again() -> None:
    base = torch.arange(20.0)
    state = {
        "left": base[:12],
        "right": base[8:],
        "matrix": base[:16].view(4, 4).t(),
        "bits": base[2:4].view(torch.int32),
    }
    loaded = Saved({"model": state}).load()["model"]
    for name, tensor in state.items():
        assert torch.equal(loaded[name], tensor), name
        assert loaded[name].stride() == tensor.stride()
    loaded["left"][10] = -1.0
    assert loaded["right"][2] == -1 and loaded["matrix"][2, 2] == -1
    loaded["left"][3] = 0.0
    assert loaded["bits"][1] == 0


def test_views_far_apart_in_a_huge_storage_do_not_bring_it_back() -> None:
    big = torch.zeros(2_000_000)
    state = {"a": big[::100_000], "b": big[100_000::100_000]}
    loaded = Saved({"model": state}).load()["model"]
    assert loaded["a"].untyped_storage().nbytes() < 1000
    assert torch.equal(loaded["b"], state["b"])


def test_parameters_and_requires_grad() -> None:
    state = {
        "param": torch.nn.Parameter(torch.randn(2)),
        "frozen": torch.nn.Parameter(torch.randn(2), requires_grad=False),
        "tensor": torch.randn(2, requires_grad=True),
        "plain": torch.randn(2),
    }
    loaded = Saved({"model": state}).load()["model"]
    assert_same(loaded, state)


def test_a_tensor_on_a_graph_is_saved_without_it() -> None:
    weight = torch.randn(3, requires_grad=True)
    snapshot = capture({"model": {"y": weight * 2}})
    assert all(tensor.grad_fn is None for tensor in snapshot.tensors)
    assert torch.equal(through(weight * 2), weight * 2)


def test_tensors_are_not_copied_by_a_capture() -> None:
    tensor = torch.zeros(1000)
    snapshot = capture({"model": {"w": tensor}})
    tensor.fill_(7)
    assert torch.equal(fill(build(snapshot.skeleton), Saved({"model": {"w": tensor}}).files)["model"]["w"], tensor)
    assert int(snapshot.addresses[0]) == tensor.data_ptr()


class Tagged(torch.Tensor):
    """A subclass that only adds methods."""


class Wrapper(torch.Tensor):
    """A subclass that keeps its data elsewhere."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        raise AssertionError("nothing of the wrapper may run")


def test_a_plain_subclass_comes_back_as_such() -> None:
    tensor = torch.randn(3).as_subclass(Tagged)
    new = through(tensor)
    assert type(new) is Tagged and torch.equal(new.as_subclass(torch.Tensor), tensor.as_subclass(torch.Tensor))


REFUSED: dict[str, Callable[[], Any]] = {
    "meta": lambda: torch.empty(2, device="meta"),
    "meta empty": lambda: torch.empty(0, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "wrapper": lambda: Wrapper(torch.zeros(2)),
    "lazy": lambda: torch.nn.LazyLinear(3).weight,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REFUSED)
def test_tensors_without_plain_data_are_refused_by_name(kind: str) -> None:
    with pytest.raises(StateError) as caught:
        capture({"model": {"fine": torch.zeros(2), "deep": [{"bad": REFUSED[kind]()}]}})
    assert caught.value.where["key"] == "model.deep.0.bad"
    assert "model.deep.0.bad" in str(caught.value)


def test_large_strided_tensors_are_brought_in_bounded_blocks() -> None:
    tensor = torch.arange(3 * 400 * 1000, dtype=torch.float32).reshape(3, 400, 1000).transpose(1, 2)
    snapshot = capture({"model": {"a": torch.zeros(10), "w": tensor, "z": torch.ones(10)}})
    source = snapshot.source(0)
    begin = int(snapshot.shards[0].offsets[2])
    pieces = source.pieces(begin + 4000, begin + 8000)
    kept: Any = pieces.keep
    held = sum(block.nbytes for block in kept if isinstance(block, torch.Tensor))
    assert held < 100_000
    assert source.pieces(0, 4096) is source.pieces(100, 200)  # contiguous memory: the map of the whole shard
    with pytest.raises(ValueError, match="not inside"):
        source.pieces(0, snapshot.shards[0].size + 1)
