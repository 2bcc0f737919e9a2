"""Cases A1 to A13: what tensors are: views, ties, layouts, dtypes, identity. Through real files."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open
from torch import nn

import stepwell
from stepwell.errors import ConfigError, StateError
from stepwell.format.safetensors import encode_header, parse_header
from stepwell.tiers.base import ChunkIO
from stepwell.tiers.file import FileTier
from tests.cases.helpers import only_step, saved, shards, stored_bytes, through
from tests.resources import still_alive
from tests.state.memory import assert_same, raw


@pytest.mark.parametrize("view", ["slice", "narrow", "chunk", "row"])
def test_A1_a_view_of_a_large_storage_is_saved_alone(tmp_path: Path, view: str) -> None:
    big = torch.empty(2_500_000, 10)  # 100 MB
    part = {
        "slice": lambda: big.view(-1)[:10],
        "narrow": lambda: big.narrow(0, 7, 2),
        "chunk": lambda: big.view(-1).chunk(1000)[5][:10],
        "row": lambda: big[1_000_000],
    }[view]()
    part.fill_(1.5)
    tiers = [FileTier(tmp_path / name, name=name) for name in ("near", "far")]
    with stepwell.open(tiers=tiers, run="run") as store:
        store.save(1, {"model": {"w": part}}).wait("far")
    for name in ("near", "far"):
        assert stored_bytes(tmp_path / name) < 32_000
        loaded = stepwell.load(tmp_path / name / "run", part="model")["w"]
        assert torch.equal(loaded, part) and loaded.untyped_storage().nbytes() < 1000


def tied() -> tuple[dict[str, Any], nn.Parameter]:
    shared = nn.Parameter(torch.randn(300, 40))
    return {"model": {"embed.weight": shared, "body": torch.randn(40), "head.weight": shared}}, shared


def test_A2_tied_tensors_are_stored_once_and_the_file_notes_the_other_name(tmp_path: Path) -> None:
    state, shared = tied()
    run = saved(tmp_path / "run", state)
    [shard] = shards(run)
    with safe_open(shard, "pt") as file:
        assert sorted(file.keys()) == ["body", "embed.weight"]
        assert torch.equal(file.get_tensor("embed.weight"), shared)
        assert msgspec.json.decode(file.metadata()["ties"]) == {"head.weight": "embed.weight"}
    loaded = stepwell.load(run, part="model")
    assert torch.equal(loaded["embed.weight"], shared) and torch.equal(loaded["head.weight"], shared)


def test_A3_names_that_shared_memory_share_it_after_a_load(tmp_path: Path) -> None:
    state, shared = tied()
    loaded = stepwell.load(saved(tmp_path / "run", state), part="model")
    assert loaded["head.weight"] is loaded["embed.weight"]
    with torch.no_grad():
        loaded["embed.weight"].zero_()
    assert not loaded["head.weight"].any()


def test_A3_half_a_tie_fills_both_names_or_raises(tmp_path: Path) -> None:
    shared = torch.randn(300, 40)
    saved(tmp_path / "run", {"model": {"embed.weight": shared}})
    live = torch.zeros(300, 40)
    with stepwell.open(tmp_path / "run", mode="r") as store:
        store.restore({"model": {"embed.weight": live, "head.weight": live}})
        assert torch.equal(live, shared)
        apart = {"model": {"embed.weight": torch.zeros(300, 40), "head.weight": torch.zeros(300, 40)}}
        with pytest.raises(stepwell.KeyMismatch, match="head.weight") as caught:
            store.restore(apart)
    assert caught.value.missing == ["model.head.weight"]
    assert not apart["model"]["embed.weight"].any()


def test_A3_each_name_of_a_tie_can_be_loaded_alone_or_in_slices(tmp_path: Path) -> None:
    shared = torch.randn(300, 40)
    views = {"embed": shared, "head": shared, "flat": shared.view(-1), "turned": shared.t()}
    run = saved(tmp_path / "run", {"model": views, "ema": {"embed": shared, "own": torch.ones(3)}})
    for name, view in views.items():
        assert torch.equal(stepwell.load(run, part="model", keys=name)[name], view)
    assert torch.equal(stepwell.load(run, part="ema")["embed"], shared)
    got = stepwell.load(run, keys={"model.head": slice(3, 5), "ema.embed": slice(7, 9), "model.flat": slice(50, 99)})
    assert torch.equal(got["model.head"], shared[3:5]) and torch.equal(got["ema.embed"], shared[7:9])
    assert torch.equal(got["model.flat"], shared.view(-1)[50:99])
    with pytest.raises(ConfigError, match="model.turned.*whole"):
        stepwell.load(run, keys={"model.turned": slice(3, 5)})


def test_A5_disjoint_views_of_one_buffer_are_stored_and_read_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = torch.randint(0, 1 << 30, (16 << 20,), dtype=torch.int32)  # 64 MiB
    rows = len(flat) // 50 // 100
    views = {f"layer{n}": flat[n * rows * 100 : (n + 1) * rows * 100].view(rows, 100) for n in range(50)}
    run = saved(tmp_path / "run", {"model": views})
    total = sum(view.nbytes for view in views.values())
    assert total <= stored_bytes(run) < total + 100_000
    loaded = stepwell.load(run, part="model")
    assert all(torch.equal(loaded[name], view) for name, view in views.items())

    read_bytes = 0
    read = FileTier.read

    async def counted(tier: FileTier, chunks: Sequence[ChunkIO]) -> Any:
        nonlocal read_bytes
        read_bytes += sum(chunk.length for chunk in chunks)
        return await read(tier, chunks)

    monkeypatch.setattr(FileTier, "read", counted)
    assert torch.equal(stepwell.load(run, part="model", keys="layer31")["layer31"], views["layer31"])
    assert 0 < read_bytes < views["layer31"].nbytes + (4 << 20)


def test_A6_tensors_that_are_not_contiguous(tmp_path: Path) -> None:
    base = torch.arange(24_000, dtype=torch.float32)
    layouts = {
        "transposed": base.view(100, 240).t(),
        "channels last": base.view(10, 4, 20, 30).to(memory_format=torch.channels_last),
        "every second": base[::2],
        "flipped": base.flip(0),
        "expanded": base[:50].view(50, 1).expand(50, 30),
        "inner": base.view(20, 30, 40)[3:11, 5:9, ::3],
    }
    live = {name: torch.zeros_like(t, memory_format=torch.contiguous_format) for name, t in layouts.items()}
    run = saved(tmp_path / "run", {"model": layouts})
    loaded = stepwell.load(run, part="model")
    for name, tensor in layouts.items():
        assert torch.equal(loaded[name], tensor), name
    for name in ("transposed", "channels last"):  # dense: strides are kept
        assert loaded[name].stride() == layouts[name].stride()
    strided = {**live, "transposed": torch.zeros(100, 240).t()}
    with stepwell.open(run, mode="r") as store:
        for target in (live, strided):
            store.restore({"model": target})
            assert all(torch.equal(target[name], tensor) for name, tensor in layouts.items())
    with safe_open(shards(run)[0], "pt") as file:
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in layouts.items())


def test_A7_tensors_without_elements_or_dimensions(tmp_path: Path) -> None:
    state = {
        "model": {
            "scalar": torch.tensor(2.5),
            "count": torch.tensor(7),
            "empty": torch.empty(0),
            "other": torch.empty(0),
            "rows": torch.empty(2, 0, dtype=torch.bfloat16),
            "columns": torch.empty(0, 3, dtype=torch.int64),
            "last": torch.empty(0, dtype=torch.uint8),  # the smallest item size: at the very end of the file
        },
        "nothing else": {"empty": torch.empty(0, 5)},
    }
    loaded = through(tmp_path / "run", state)
    assert_same(loaded, state)
    target = {part: {name: torch.zeros_like(t) for name, t in tensors.items()} for part, tensors in state.items()}
    with stepwell.open(tmp_path / "run", mode="r") as store:
        store.restore(target)
    assert_same(target, state)


def test_A8_a_tensor_without_data_is_refused_before_any_file_is_made(tmp_path: Path) -> None:
    with stepwell.open(tmp_path / "run") as store:
        with pytest.raises(StateError, match="model.layers.1"):
            store.save(1, {"model": {"layers": [torch.ones(2), torch.ones(2, device="meta")]}})
        assert not list(tmp_path.iterdir())
        store.save(1, {"model": torch.ones(2)}).wait()


def test_A8_a_model_on_the_meta_device_becomes_real(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30))
    model[0].bias.requires_grad_(False)
    saved(tmp_path / "run", {"model": model})
    with torch.device("meta"):
        target = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30))
    with stepwell.open(tmp_path / "run", mode="r") as store:
        store.restore({"model": target})
    assert_same(target.state_dict(), model.state_dict())
    assert target(torch.ones(4, 20)).shape == (4, 30)


ODD = [getattr(torch, name) for name in sorted(vars(torch)) if isinstance(getattr(torch, name), torch.dtype)]
DTYPES = sorted({dtype for dtype in ODD if not str(dtype).startswith(("torch.qint", "torch.quint"))}, key=str)


def test_A9_every_dtype_comes_back_bit_for_bit(tmp_path: Path) -> None:
    """Random bytes, so that NaNs with odd bits are among them. Quantised dtypes: tests/state."""
    torch.manual_seed(9)
    state = {}
    for dtype in DTYPES:
        bits = torch.randint(0, 2 if dtype is torch.bool else 256, (6, 4, dtype.itemsize), dtype=torch.uint8)
        state[str(dtype)] = bits.view(dtype).view(6, 4)
    assert {torch.bfloat16, torch.float8_e4m3fn, torch.uint64, torch.complex64} <= {t.dtype for t in state.values()}
    loaded = through(tmp_path / "run", {"model": state})["model"]
    for name, tensor in state.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        assert raw(loaded[name]) == raw(tensor), name


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no packed float4")
def test_A11_packed_float4_keeps_its_shape_both_ways(tmp_path: Path) -> None:
    data = bytes(range(96))
    header = encode_header([("w", "F4", (4, 6, 8), 96)], {"format": "pt"})
    (tmp_path / "model.safetensors").write_bytes(header + data)
    loaded = stepwell.load(tmp_path / "model.safetensors")
    assert (loaded["w"].dtype, loaded["w"].shape) == (torch.float4_e2m1fn_x2, (4, 6, 4))
    [shard] = shards(saved(tmp_path / "run", {"model": loaded}))
    written = shard.read_bytes()
    entry = parse_header(written, len(written), "shard").entries["w"]
    assert (entry.dtype, entry.shape) == ("F4", (4, 6, 8))
    assert written[entry.begin : entry.end] == data


def test_A13_a_restore_keeps_identity_pointer_and_flag(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50))
    model[0].weight.requires_grad_(False)
    run = saved(tmp_path / "run", {"model": model})
    target = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50))
    target[1].weight.requires_grad_(False)  # frozen here, not there
    before = {name: (id(p), p.data_ptr(), p.requires_grad) for name, p in target.named_parameters()}
    with stepwell.open(run, mode="r") as store:
        store.restore({"model": target})
    assert {name: (id(p), p.data_ptr(), p.requires_grad) for name, p in target.named_parameters()} == before
    for name, parameter in model.named_parameters():
        assert torch.equal(target.get_parameter(name), parameter)


def test_A13_a_save_keeps_no_graph_alive(tmp_path: Path) -> None:
    leaf = torch.randn(1000, requires_grad=True)
    middle = leaf * 2
    alive = weakref.ref(middle)
    result = middle.exp()
    with stepwell.open(tmp_path / "run") as store:
        store.save(1, {"model": {"y": result}}).wait()
        expected = result.detach().clone()
        del middle, result
        assert still_alive([alive]) == []
    loaded = stepwell.load(tmp_path / "run", part="model")["y"]
    assert loaded.grad_fn is None and torch.equal(loaded.detach(), expected)


def test_A20_state_of_parameters_that_were_frozen_later_comes_back(tmp_path: Path) -> None:
    def make() -> tuple[nn.Sequential, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = make()
    model(torch.ones(3, 8)).sum().backward()
    optimizer.step()
    model[0].requires_grad_(False)
    run = saved(tmp_path / "run", {"model": model, "optimizer": optimizer})
    other, fresh = make()
    other[0].requires_grad_(False)
    with stepwell.open(run, mode="r") as store:
        store.restore({"model": other, "optimizer": fresh})
    assert len(fresh.state_dict()["state"]) == 4
    assert_same(fresh.state_dict(), optimizer.state_dict())


def test_A24_transfers_that_the_system_cuts_short_are_finished(tmp_path: Path) -> None:
    """The kernel cuts a call at 2 GiB; here each call is cut at 1 MB, in both directions. Whole: tests/campaign."""
    weight = torch.randint(0, 255, (20_000_003,), dtype=torch.uint8)
    tier = FileTier(tmp_path, name="disk")
    with stepwell.open(tiers=[tier], run="run") as store:
        for engine in (tier._medium.writer.engine, tier._medium.reader.engine):
            engine.inject_faults(bytes_max=1_000_003)
        store.save(1, {"model": {"w": weight}}).wait()
        target = {"model": {"w": torch.zeros_like(weight)}}
        store.restore(target)
    assert torch.equal(target["model"]["w"], weight)
    assert only_step(tmp_path / "run").is_dir()
