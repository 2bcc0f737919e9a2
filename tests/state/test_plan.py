"""Which files a state becomes, what they are called, and who can read them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from stepwell.format.safetensors import TensorEntry, encode_header
from stepwell.state import PlanCache, Replicated, build, capture, foreign, tensors
from tests.state.memory import Saved, assert_same, entries_of, fill

BIG = (600, 600)  # above the size at which a part gets a file of its own


def test_small_parts_share_a_shard() -> None:
    saved = Saved(
        {"model": {"w": torch.ones(1)}, "big": torch.ones(BIG), "a": {"x": torch.ones(1)}, "b": torch.ones(2), "c": 5}
    )
    assert saved.snapshot.parts == {
        "model": ["model.safetensors"],
        "big": ["big.safetensors"],
        "a": ["extra.safetensors"],
        "b": ["extra.safetensors"],
        "c": [],
    }
    assert set(saved.labels()) == {"w", "big", "a.x", "b"}


def test_no_tensors_no_shards() -> None:
    saved = Saved({"model": {}, "step": 3})
    assert saved.files == {} and saved.snapshot.nbytes == 0
    assert saved.load() == {"model": {}, "step": 3}
    assert Saved({}).load() == {}


def test_tensors_are_ordered_by_item_size_and_aligned() -> None:
    dtypes = (torch.int8, torch.float64, torch.bfloat16, torch.float32, torch.complex128, torch.bool, torch.int64)
    state = {f"t{index}": torch.ones(3, dtype=dtype) for index, dtype in enumerate(dtypes)}
    saved = Saved({"model": state})
    entries = sorted((entry for _, entry in saved.labels().values()), key=lambda entry: entry.begin)
    assert [entry.label for entry in entries] == ["t4", "t1", "t6", "t3", "t2", "t0", "t5"]
    assert len(saved.snapshot.shards[0].header) % 4096 == 0
    for entry in entries:
        assert entry.begin % state[entry.label].itemsize == 0
    assert saved.snapshot.shards[0].size == entries[-1].end == len(saved.files["model.safetensors"])


def test_labels_are_unique_and_keys_stay_true() -> None:
    state: dict[str, Any] = {
        "model": {
            25: torch.full((1,), 1.0),
            "25": torch.full((1,), 2.0),
            "a": {"b.c": torch.full((1,), 3.0)},
            "a.b": {"c": torch.full((1,), 4.0)},
            "a.b.c": torch.full((1,), 5.0),
            "25#2": torch.full((1,), 6.0),
            "__metadata__": torch.full((1,), 7.0),
            "other.x": torch.full((1,), 8.0),
            "": torch.full((1,), 9.0),
            "\ud800": torch.full((1,), 10.0),
            "n" * 1000: torch.full((1,), 11.0),
            "new\nline/../": torch.full((1,), 12.0),
        },
        "other": {"x": torch.full((1,), 13.0)},
    }
    saved = Saved(state)
    assert len(saved.labels()) == 13 and "__metadata__" not in saved.labels()
    assert_same(saved.load(), state)
    listed = tensors(saved.skeleton)
    assert set(listed) == set(saved.labels())
    assert [leaf.key for leaf in listed.values()][:2] == ["25", "25"]
    assert listed["a.b.c"].key == "a.b.c" and {leaf.part for leaf in listed.values()} == {"model", "other"}


PARTS = [
    "extra",
    "x" * 300,
    "../up",
    "a/b",
    "new\nline",
    "ünï",
    "",
    "model-00001-of-00002",
    "Big",
    "big",
    "\ud800",
    ".",
]


def test_part_names_of_any_kind_get_safe_files() -> None:
    state: dict[Any, Any] = {name: {"w": torch.full(BIG, float(index))} for index, name in enumerate(PARTS)}
    state |= {7: torch.full(BIG, -1.0), "7": torch.full(BIG, -2.0), "small": torch.ones(1)}
    saved = Saved(state)
    assert len({name.lower() for name in saved.files}) == len(saved.files) == len(PARTS) + 3
    for name in saved.files:
        stem = name.removesuffix(".safetensors")
        assert 0 < len(stem) <= 64 and stem.replace("-", "").replace("_", "").isalnum() and stem.isascii()
    assert_same(saved.load(), state)
    assert "extra.safetensors" in saved.snapshot.parts["small"]
    assert "extra.safetensors" not in saved.snapshot.parts["extra"]
    json.dumps(saved.snapshot.parts).encode()


def test_a_part_with_many_tensors_is_split_as_hugging_face_does() -> None:
    state = {f"layer.{index}.weight": torch.full((3,), float(index)) for index in range(100)}
    saved = Saved({"model": state, "ema": {"w": torch.ones(BIG)}}, header_split_bytes=5000)
    names = saved.snapshot.parts["model"]
    count = len(names)
    assert count > 3 and names == [f"model-{index:05d}-of-{count:05d}.safetensors" for index in range(1, count + 1)]
    index = json.loads(saved.snapshot.sidecars["model.safetensors.index.json"])
    assert index["metadata"]["total_size"] == 1200
    assert index["weight_map"] == {label: file for label, (file, _) in saved.labels().items() if label in state}
    assert all(len(plan.header) <= 8192 for plan in saved.snapshot.shards)
    assert_same(saved.load(part="model"), state)
    assert saved.snapshot.sidecars.keys() == {"model.safetensors.index.json"}


def test_ranks_have_files_and_labels_of_their_own() -> None:
    state = {
        "model": {"w": torch.ones(1)},
        "optimizer": {"m": torch.ones(BIG)},
        "loader": {"x": torch.ones(1), "y": Replicated(torch.ones(1))},
    }
    saved = Saved(state, rank=3, world=4)
    assert set(saved.files) == {f"{part}.rank00003-of-00004.safetensors" for part in ("model", "optimizer", "extra")}
    assert set(saved.labels()) == {"w", "optimizer.rank00003.m", "loader.rank00003.x", "loader.y"}
    assert saved.skeleton["rank"] == 3 and saved.skeleton["world"] == 4
    assert_same(saved.load()["loader"]["x"], torch.ones(1))


def write(folder: Path, saved: Saved) -> None:
    for name, data in saved.files.items():
        (folder / name).write_bytes(data)


@pytest.mark.filterwarnings("ignore")
def test_safetensors_opens_every_shard(tmp_path: Path) -> None:
    base = torch.randn(4, 6)
    state = {
        "w": base,
        "turned": torch.randn(4, 6).t(),
        "half": torch.randn(3).bfloat16(),
        "f8": torch.randn(3).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 3),
        "c": torch.randn(2, dtype=torch.complex64),
        "u": torch.tensor([1, 2], dtype=torch.uint16),
        "scalar": torch.tensor(True),
        "tied": base,
    }
    saved = Saved({"model": state, "big": {"x": torch.randn(BIG)}})
    write(tmp_path, saved)
    read = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert set(read) == set(state) - {"tied"}
    for name, tensor in read.items():
        assert_same(tensor.view(torch.uint8) if name == "f8" else tensor, _plain(name, state[name]))
    with safetensors.safe_open(tmp_path / "big.safetensors", framework="pt") as file:
        metadata = file.metadata()
        assert metadata["format"] == "pt" and metadata["stepwell"] == "1" and metadata["part"] == "big"
        assert set(json.loads(metadata["DCP_SHARDING_INFO"])) == set(file.keys()) == {"big.x"}


def _plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if name == "f8" else tensor.contiguous()


@pytest.mark.filterwarnings("ignore")
def test_torch_distributed_checkpoint_reads_a_model_part(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    saved = Saved({"model": model, "optimizer": optimizer}, header_split_bytes=1000)
    assert len(saved.snapshot.parts["model"]) > 1
    write(tmp_path, saved)
    target = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    state_dict_loader.load(target, storage_reader=HuggingFaceStorageReader(str(tmp_path)))
    assert_same(target, {name: tensor.detach() for name, tensor in model.state_dict().items()})


def test_foreign_files_load_without_a_record(tmp_path: Path) -> None:
    state = {"a.b": torch.randn(3, 4), "c": torch.arange(3), "d": torch.empty(0)}
    safetensors.torch.save_file(state, tmp_path / "x.safetensors")
    files = {"x": (tmp_path / "x.safetensors").read_bytes()}
    skeleton = foreign({label: entry for label, (_, entry) in entries_of(files).items()})
    assert_same(dict(sorted(fill(build(skeleton, part="model"), files).items())), state)
    odd = {"four": ("F4", (2, 6), 6), "six": ("F6_E2M3", (4,), 3), "three": ("F4", (2, 1), 1)}
    data = encode_header([(label, *rest) for label, rest in odd.items()], {}) + bytes(range(10))
    loaded = fill(
        build(foreign({label: entry for label, (_, entry) in entries_of({"y": data}).items()}), part="model"),
        {"y": data},
    )
    assert str(loaded["four"].dtype) == "torch.float4_e2m1fn_x2" and loaded["four"].shape == (2, 3)
    assert loaded["six"].dtype == torch.uint8 and loaded["six"].tolist() == [6, 7, 8]
    again = Saved({"model": {"four": loaded["four"]}})
    _, entry = again.labels()["four"]
    assert (entry.dtype, entry.shape) == ("F4", (2, 6))
    assert TensorEntry("x", "U8", (1,), 0, 1).dtype == "U8"


def test_plans_are_kept_by_structure_and_not_by_pointer() -> None:
    plans = PlanCache()

    def state(*, shape: tuple[int, ...] = (2,), grad: bool = False, tie: bool = False, step: int = 0) -> dict[str, Any]:
        weight = torch.randn(shape, requires_grad=grad)
        return {"model": {"a": weight, "b": weight if tie else torch.randn(shape)}, "step": step}

    first = capture(state(), plans=plans)
    second = capture(state(step=9), plans=plans)
    assert second.plan is first.plan and second.skeleton["tree"] != first.skeleton["tree"]
    others = [capture(state(**change), plans=plans) for change in ({"shape": (1, 2)}, {"grad": True}, {"tie": True})]
    assert len({id(first.plan), *(id(other.plan) for other in others)}) == 4
    assert capture(state(), plans=plans, rank=1, world=2).plan is not first.plan
    for index in range(20):
        capture(state(shape=(index + 3,)), plans=plans)
    assert capture(state(), plans=plans).plan is not first.plan  # the oldest ones are forgotten


def test_importing_costs_little() -> None:
    code = (
        "import torch, numpy, msgspec, sys, time; start = time.process_time(); import stepwell.state; "
        "print(time.process_time() - start, 'torch.distributed.checkpoint' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, checkpoint = run.stdout.split()
    assert checkpoint == "False" and float(seconds) < 1.0
