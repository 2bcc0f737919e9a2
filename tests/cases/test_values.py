"""Cases A14 to A25: keys, containers, names, arrays, wrong input; B1 and B15: what a save takes and keeps."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import pickle
import time
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import stepwell
from stepwell.errors import CheckpointNotFound, ConfigError, FormatError, StateError
from stepwell.tiers.file import FileTier
from stepwell.tiers.wrap import Fault, Throttled
from tests.cases.helpers import saved, shards, through
from tests.resources import still_alive
from tests.state.memory import assert_same
from tests.store.helpers import ALWAYS, disk, release


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Schedule:
    milestones: dict[Any, Any]
    warmup: int = 5


def test_A14_keys_keep_their_type_through_two_saves(tmp_path: Path) -> None:
    state: dict[Any, Any] = {
        "scheduler": {"milestones": {25: 1, 50: 1}, "last": collections.Counter({25: 1})},
        "optimizer": {"state": {n: {"m": torch.full((3,), float(n))} for n in range(12)}},
        "odd keys": {True: "yes", 2: "int", "2": "str", None: 0, (1, "a"): 1.5, 0.5: "float", b"x": 1, "": 2},
        7: [1, 2],
    }
    once = through(tmp_path / "one", state)
    assert_same(once, state)
    assert_same(through(tmp_path / "two", once), state)
    with stepwell.open(tmp_path / "one") as store:  # restored in place and saved again: no key twice
        target = through(tmp_path / "blank", {**state, "scheduler": {"milestones": {25: 0}, "last": {}}})
        store.restore(target)
        store.save(2, target).wait()
    assert_same(stepwell.load(tmp_path / "one@2"), state)


def test_A14_a_key_that_cannot_be_kept_is_refused_by_name(tmp_path: Path) -> None:
    with stepwell.open(tmp_path / "run") as store, pytest.raises(StateError, match="table"):
        store.save(1, {"model": {"table": {torch.ones(2): 1}}})


def test_A16_keys_of_any_length(tmp_path: Path) -> None:
    long, wide = "k" * 400, "模" * 200
    state = {
        "model": {long: torch.ones(3), wide: torch.zeros(4), f"{long}.{wide}": torch.arange(5)},
        long: {"w": torch.ones(400_000)},  # parts with a file of their own
        wide: {"w": torch.ones(400_000), "n": 3},
    }
    assert_same(through(tmp_path / "run", state), state)


@pytest.mark.parametrize("name", ["r" * 300, "模" * 60])
def test_A16_a_run_name_that_is_too_long_is_refused_with_the_limit(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="143"):
        stepwell.open(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_A17_containers_and_empties_come_back_as_they_were(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "nested": {
            "list": [1, [], (), {}, None, (torch.ones(2), [torch.zeros(1)])],
            "tuple": (1, (), [], {}, None),
            "ordered": collections.OrderedDict(b=1, a=collections.OrderedDict()),
            "pair": Pair(torch.arange(3), Pair(None, ())),
            "dataclass": Schedule({3: torch.ones(1)}, 7),
            "empty": {},
            "none": None,
        },
        "empty part": {},
        "none part": None,
        "tuple part": (),
        "pairs": [Pair(1, 2), Pair((), {})],
    }
    assert_same(through(tmp_path / "run", state), state)
    target = dict(state, nested=dict(state["nested"], ordered=collections.OrderedDict(b=5), empty={}))
    with stepwell.open(tmp_path / "run", mode="r") as store:
        store.restore(target)
    assert_same(target, state)


def test_A17_a_container_that_cannot_be_kept_is_refused_by_name(tmp_path: Path) -> None:
    class Local(NamedTuple):
        x: int

    values: list[Any] = [Local(1), collections.defaultdict(lambda: 3)]
    for value in values:
        with stepwell.open(tmp_path / "run") as store, pytest.raises(StateError, match="model.part"):
            store.save(1, {"model": {"part": value}})


def wrong(folder: Path) -> dict[str, tuple[Path, type[Exception], str]]:
    """What is loaded -> path, error, and what the message must say."""
    (folder / "pickle.pt").write_bytes(pickle.dumps({"a": 1}))
    torch.save({"a": torch.ones(2)}, folder / "zip.pt")
    (folder / "empty").touch()
    (folder / "text").write_text("step: 3\n")
    (folder / "short text").write_text("hi")
    (folder / "link").symlink_to(folder / "gone")
    (folder / "folder").mkdir()
    (folder / "a folder of pickles").mkdir()
    (folder / "a folder of pickles" / "model.safetensors").write_bytes(pickle.dumps(list(range(1000))))
    (folder / "a step" / "step-000000001.1-1").mkdir(parents=True)
    return {
        "pickle": (folder / "pickle.pt", FormatError, "pickle"),
        "torch.save": (folder / "zip.pt", FormatError, "zip|torch.save"),
        "empty": (folder / "empty", FormatError, "empty"),
        "text": (folder / "text", FormatError, "text|header|bytes"),
        "short text": (folder / "short text", FormatError, "text|short|bytes"),
        "link": (folder / "link", CheckpointNotFound, "link to nothing"),
        "nothing": (folder / "nowhere", CheckpointNotFound, "no such file"),
        "folder": (folder / "folder", CheckpointNotFound, "it holds nothing"),
        "pickles": (folder / "a folder of pickles", FormatError, "pickle"),
        "device": (Path("/dev/null"), FormatError, "neither a file nor a folder"),
        "unfinished": (folder / "a step", CheckpointNotFound, "no checkpoint"),
        "unfinished step": (folder / "a step" / "step-000000001.1-1", FormatError, "never committed"),
        "empty text": (Path(), CheckpointNotFound, "names no path"),
        "below a file": (folder / "text" / "run", CheckpointNotFound, "no such file"),
    }


def test_A23_wrong_input_is_named_with_its_path_and_the_real_reason(tmp_path: Path) -> None:
    for name, (path, kind, reason) in wrong(tmp_path).items():
        with pytest.raises(kind, match=f"(?i){reason}") as caught:
            stepwell.load(path if path != Path() else "")
        assert path == Path() or str(path) in str(caught.value), name


def test_A25_arrays_take_the_path_of_raw_data(tmp_path: Path) -> None:
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "large": np.arange(3_000_000, dtype=np.float64).reshape(1000, 3000),
        "small": np.arange(5, dtype=np.int16),
        "columns first": np.asfortranarray(np.arange(60_000, dtype=np.float32).reshape(200, 300)),
        "big-endian": np.arange(1000, dtype=">i4"),
        "strided": np.arange(10_000)[::3],
        "complex": np.ones((3, 4), np.complex64) * 2j,
        "none": np.zeros((0, 4)),
        "scalar": np.array(2.5),
    }
    run = saved(tmp_path / "run", {"part": {**arrays, "tensor": torch.ones(5)}})
    loaded = stepwell.load(run, part="part")
    for name, array in arrays.items():
        assert (loaded[name].dtype, loaded[name].shape) == (array.dtype, array.shape)
        assert np.array_equal(loaded[name], array), name
    assert loaded["columns first"].flags.f_contiguous
    assert sum(path.stat().st_size for path in shards(run)) >= sum(array.nbytes for array in arrays.values())
    [record] = run.glob("step-*/rank-00000.json")
    assert record.stat().st_size < 20_000  # no array hides in the record


@pytest.mark.parametrize("speed", ["fast", "slow"])
def test_B1_every_leaf_has_the_value_of_the_call(tmp_path: Path, speed: str) -> None:
    disk = FileTier(tmp_path / "disk", name="disk")
    tier = disk if speed == "fast" else Throttled(disk, 40e6, time.monotonic, asyncio.sleep)
    shared = torch.full((300_000,), 3.0).share_memory_()  # type: ignore[no-untyped-call]  # torch's
    state: dict[str, Any] = {
        "model": {
            "weight": torch.full((2_000_000,), 1.0),
            "strided": torch.full((500, 500), 2.0).t(),
            "shared": shared,
        },
        "optimizer": {"step": torch.tensor(4.0), "moment": torch.full((1000,), 5.0)},
        "array": np.full(400_000, 6.0),
        "lists": {"numbers": [[7, 7], [7]], "count": 7, "raw": bytearray(b"7" * 10_000)},
    }
    with stepwell.open(tiers=[tier], run="run") as store:
        save = store.save(1, state)
        for tensor in (*state["model"].values(), *state["optimizer"].values()):
            tensor.fill_(-1)
        state["array"][:] = -1
        state["lists"]["numbers"][0][0] = state["lists"]["count"] = -1
        state["lists"]["raw"][:] = b"-" * 10_000
        save.wait()
    loaded = stepwell.load(tmp_path / "disk" / "run")
    assert [bool((t == v).all()) for t, v in zip(loaded["model"].values(), (1, 2, 3), strict=True)] == [True] * 3
    assert loaded["optimizer"]["step"] == 4 and bool((loaded["optimizer"]["moment"] == 5).all())
    assert bool((loaded["array"] == 6).all())
    assert loaded["lists"] == {"numbers": [[7, 7], [7]], "count": 7, "raw": bytearray(b"7" * 10_000)}


def test_B15_nothing_keeps_the_state_after_a_save(tmp_path: Path) -> None:
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    moment = optimizer.state[model.weight]["exp_avg"]
    array = np.ones(100_000)
    strided = torch.randn(500, 400).t()
    alive = [weakref.ref(x) for x in (model, model.weight, optimizer, moment, array, strided, strided._base)]
    with stepwell.open(tmp_path / "run") as store:
        state = {"model": model, "optimizer": optimizer, "array": array, "w": {"strided": strided}}
        saves = [store.save(1, state), store.save(2, state)]
        failed = pytest.raises(StateError, store.save, 3, {**state, "bad": torch.ones(1, device="meta")})
        for save in saves:
            save.wait()
        store.restore(state)
        report = saves[0].report()
        del state, model, optimizer, moment, array, strided, failed
        assert [type(thing) for thing in still_alive(alive)] == []
        assert report.error is None


def test_B15_a_failed_save_keeps_nothing_either(tmp_path: Path) -> None:
    disk = FileTier(tmp_path / "disk", name="disk", capacity_bytes=1_000_000)
    weight = torch.ones(1_000_000)
    alive = weakref.ref(weight)
    with pytest.raises(stepwell.SaveFailed) as caught, stepwell.open(tiers=[disk], run="run") as store:
        save = store.save(1, {"w": weight})
        del weight
        save.wait()
    caught.value.__traceback__ = None
    assert still_alive([alive]) == []


def test_B22_a_save_says_how_long_it_blocked_and_how_long_it_took(tmp_path: Path) -> None:
    """The training thread is held up only while it is inside save(): the rest needs neither it nor the GIL."""
    tier = disk(tmp_path, [Fault("write", 1, "stall", times=ALWAYS)])
    with stepwell.open(tiers=[tier], run="run") as store:
        save = store.save(1, {"w": torch.ones(4_000_000)})
        for _ in range(1000):
            torch.ones(100, 100) @ torch.ones(100, 100)
        assert not save.done()
        release(tier)
        report = save.wait().report()
    assert 0 < report.blocked_seconds < report.tier_seconds["disk"]
    [manifest] = (tmp_path / "disk").glob("run/step-*/manifest.json")
    assert json.loads(manifest.read_bytes())["seconds"]
