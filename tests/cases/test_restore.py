"""Cases D3 to D17: strictness, prefixes, half-applied restores, memory, safety, and going down the tiers."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import stepwell
from stepwell.errors import ConfigError, CorruptData, KeyMismatch, NoGoodCheckpoint, StepwellError
from stepwell.tiers.base import ChunkIO, Tier
from stepwell.tiers.file import FileTier
from tests.cases.helpers import only_step, saved, script
from tests.state.memory import assert_same


def zeros(state: dict[str, Any]) -> dict[str, Any]:
    return {part: {key: torch.zeros_like(tensor) for key, tensor in tensors.items()} for part, tensors in state.items()}


def chain(folder: Path) -> list[Tier]:
    return [FileTier(folder / name, name=name) for name in ("near", "far")]


SAVED = {
    "model": {"a": torch.ones(50), "b": torch.ones(60), "old": torch.ones(3)},
    "optimizer": {"m": torch.ones(50), "old": torch.ones(4)},
}


def live() -> dict[str, Any]:
    return {
        "model": {"a": torch.zeros(50), "b": torch.zeros(60), "new": torch.zeros(3)},
        "optimizer": {"m": torch.zeros(50), "new": torch.zeros(4)},
    }


def test_D3_strict_gives_both_lists_in_one_error_and_leaves_the_target_alone(tmp_path: Path) -> None:
    saved(tmp_path / "run", SAVED)
    target = live()
    with stepwell.open(tmp_path / "run", mode="r") as store:
        with pytest.raises(KeyMismatch) as caught:
            store.restore(target)
        assert caught.value.missing == ["model.new", "optimizer.new"]
        assert caught.value.unexpected == ["model.old", "optimizer.old"]
        assert all(key in str(caught.value) for key in ("model.new", "optimizer.old"))
        assert_same(target, live())


def test_D3_lenient_returns_both_lists(tmp_path: Path) -> None:
    saved(tmp_path / "run", SAVED)
    target = live()
    with stepwell.open(tmp_path / "run", mode="r") as store:
        found = store.restore(target, strict=False)
    assert found is not None
    assert found.missing == ("model.new", "optimizer.new")
    assert found.unexpected == ("model.old", "optimizer.old")
    assert target["model"]["a"].all() and target["optimizer"]["m"].all() and not target["model"]["new"].any()


@pytest.mark.parametrize("lenient", ["model", "optimizer"])
def test_D3_the_choice_is_per_part(tmp_path: Path, lenient: str) -> None:
    saved(tmp_path / "run", SAVED)
    [other] = {"model", "optimizer"} - {lenient}
    target = live()
    with stepwell.open(tmp_path / "run", mode="r") as store:
        with pytest.raises(KeyMismatch) as caught:
            store.restore(target, strict={lenient: False})
        assert (caught.value.missing, caught.value.unexpected) == ([f"{other}.new"], [f"{other}.old"])
        assert_same(target, live())
        target[other] = {key: torch.zeros_like(tensor) for key, tensor in SAVED[other].items()}
        found = store.restore(target, strict={lenient: False})
        with pytest.raises(ConfigError, match="modle"):
            store.restore(target, strict={"modle": False})
    assert found is not None and found.missing == (f"{lenient}.new",)
    assert target[other]["old"].all()


@pytest.mark.parametrize("prefix", ["module.", "model.", "_orig_mod."])
def test_D4_a_prefix_is_hinted_at_and_can_be_renamed(tmp_path: Path, prefix: str) -> None:
    run = saved(tmp_path / "run", {"model": {f"{prefix}{name}": torch.ones(5) for name in ("a", "b.w", "c")}})
    target = {"model": {name: torch.zeros(5) for name in ("a", "b.w", "c")}}
    with stepwell.open(run, mode="r") as store:
        for strict in (True, False):
            with pytest.raises(KeyMismatch, match=f"'{prefix}'.*rename"):
                store.restore(target, strict=strict)
        assert not any(tensor.any() for tensor in target["model"].values())
        store.restore(target, rename={prefix: ""})
    assert all(bool(tensor.all()) for tensor in target["model"].values())
    assert sorted(stepwell.load(run, part="model", rename={f"{prefix}*": "x.*"})) == ["x.a", "x.b.w", "x.c"]


def test_D4_few_matches_warn(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", {"model": {"same": torch.ones(5), **{f"module.{n}": torch.ones(5) for n in "abc"}}})
    target = {"model": {name: torch.zeros(5) for name in ("same", "a", "b", "c")}}
    with stepwell.open(run, mode="r") as store, pytest.warns(UserWarning, match="only 1 of 4.*module"):
        store.restore(target, strict=False)


@pytest.mark.parametrize("part", [None, "model"])
@pytest.mark.parametrize("keys", ["nope", "*.nope", ["a", "nope"], ["a", "b.*", "nope"]])
def test_D4_keys_that_match_nothing_are_refused(tmp_path: Path, keys: Any, part: str | None) -> None:
    run = saved(tmp_path / "run", {"model": {"a": torch.ones(2), "b": {"c": torch.ones(3)}}, "step": 4})
    with pytest.raises(KeyMismatch, match="nope.*There are") as caught:
        stepwell.load(run, part=part, keys=keys)
    assert caught.value.missing == [keys if isinstance(keys, str) else keys[-1]]


@pytest.mark.parametrize("keys", ["a", "model.a", "b.c", "*.c", ["model.b", "a"], "step", ["b.c", "b"], "model"])
def test_D4_keys_that_match_something_are_taken(tmp_path: Path, keys: Any) -> None:
    run = saved(tmp_path / "run", {"model": {"a": torch.ones(2), "b": {"c": torch.ones(3)}}, "step": 4})
    assert stepwell.load(run, keys=keys)


def damage_key(run: Path, key: str) -> None:
    """Flips a byte of one tensor on the disk."""
    path = only_step(run) / "model.safetensors"
    data = bytearray(path.read_bytes())
    value = float(key.removeprefix("t"))
    at = data.find(torch.full((100,), value).numpy().tobytes())
    data[at + 5] ^= 0x40
    path.write_bytes(data)


def test_D6_a_restore_that_fails_half_way_says_so_and_can_be_repeated(tmp_path: Path) -> None:
    state = {"model": {f"t{n}": torch.full((700_000,), float(n)) for n in range(10)}}
    with stepwell.open(tiers=chain(tmp_path), run="run") as store:
        store.save(1, state).wait("far")
    damage_key(tmp_path / "near" / "run", "t6")
    target = zeros(state)
    with stepwell.open(tmp_path / "near" / "run", mode="r") as store:
        with pytest.raises(NoGoodCheckpoint) as caught:
            store.restore(target)
        assert "t6" in str(caught.value), "the tensor"
        assert any("mix of old and restored" in note for note in caught.value.__notes__)
        with pytest.raises(CorruptData, match="t6") as named:
            store.restore(target, 1)
        assert any("mix of old and restored" in note for note in named.value.__notes__)
    with stepwell.open(tiers=chain(tmp_path), run="run", mode="r") as store:
        found = store.restore(target)  # again, with the other tier
    assert found is not None and found.healed == ("model.safetensors on near",)
    assert_same(target, state)


MEMORY = """
import resource, sys, torch, stepwell
weight = torch.zeros(40_000_000)                          # 160 MB, resident: zeros() of torch touches its pages
weight.fill_(1)
warm = {"w": torch.zeros(10)}
with stepwell.open(sys.argv[2], mode="r") as store:
    store.restore(warm)                                   # threads and staging memory are made now
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with stepwell.open(sys.argv[1], mode="r") as store:
    store.restore({"model": {"w": weight}})
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert bool((weight == 3).all())
print((after - before) << 10)
"""


def test_D9_memory_beside_the_target_does_not_grow_with_the_model(tmp_path: Path) -> None:
    saved(tmp_path / "run", {"model": {"w": torch.full((40_000_000,), 3.0)}})
    saved(tmp_path / "small", {"w": torch.zeros(10)})
    done = script(MEMORY, tmp_path / "run", tmp_path / "small")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 80e6, "the model has 160 MB"


def test_D13_a_pickle_in_the_place_of_any_file_is_never_run(tmp_path: Path) -> None:
    touched = tmp_path / "touched"

    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return (os.mkdir, (str(touched),))

    run = tmp_path / "run"
    with stepwell.open(run) as store:
        (tmp_path / "tokenizer.json").write_text("{}")
        store.save(1, {"model": {"w": torch.ones(400_000)}, "step": 1}, files=[tmp_path / "tokenizer.json"]).wait()
    paths = [path for path in run.rglob("*") if path.is_file()]
    assert {"run.json", "manifest.json", "rank-00000.json", "model.safetensors", "0000001.json"} <= {
        path.name for path in paths
    }
    for path in paths:
        kept = path.read_bytes()
        path.write_bytes(pickle.dumps(Bomb()))
        for read in (lambda: stepwell.load(run), lambda: stepwell.open(run, mode="r").restore({"step": 0})):
            try:
                read()
            except StepwellError as error:
                assert path.name in str(error), "refused by name"
            else:
                assert path.name not in ("manifest.json", "rank-00000.json")
        path.write_bytes(kept)
    assert not touched.exists()


class Opaque:
    """Only a pickle can hold it."""


def test_D13_an_object_that_needs_a_pickle_is_refused_by_key_and_class(tmp_path: Path) -> None:
    saved(tmp_path / "run", {"model": {"w": torch.ones(3)}, "extra": {"thing": Opaque()}})
    target: dict[str, Any] = {"model": {"w": torch.zeros(3)}, "extra": {"thing": None}}
    with stepwell.open(tmp_path / "run", mode="r") as store:
        with pytest.raises(stepwell.PickleRefused, match="Opaque.*extra.thing"):
            store.restore(target)
        assert not target["model"]["w"].any() and target["extra"]["thing"] is None
        store.restore(target, allow_pickle=True)
    assert isinstance(target["extra"]["thing"], Opaque)


@pytest.mark.parametrize("lost", ["root", "run", "shard", "record"])
def test_D16_a_lost_near_tier_is_passed_over_and_the_source_is_named(tmp_path: Path, lost: str) -> None:
    state = {"model": {"w": torch.randn(500_000)}, "optimizer": {"m": torch.randn(600_000)}}
    with stepwell.open(tiers=chain(tmp_path), run="run") as store:
        store.save(1, state).wait("far")
    near = tmp_path / "near" / "run"
    match lost:
        case "root":
            shutil.rmtree(tmp_path / "near")
        case "run":
            shutil.rmtree(near)
        case "shard":
            (only_step(near) / "model.safetensors").unlink()
        case "record":
            (only_step(near) / "rank-00000.json").unlink()
    target = zeros(state)
    with stepwell.open(tiers=chain(tmp_path), run="run") as store:
        found = store.restore(target)
        assert found is not None
        assert_same(target, state)
        assert sum(found.sources.values()) >= 4_400_000
        assert (found.sources.get("far", 0) > 0) == (lost != "record")
        store.save(2, state).wait("far")  # a new node goes on


def test_D16_a_first_tier_whose_reads_fail_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"model": {"w": torch.randn(500_000)}}
    with stepwell.open(tiers=chain(tmp_path), run="run") as store:
        store.save(1, state).wait("far")
    read = FileTier.read

    async def broken(tier: FileTier, chunks: Sequence[ChunkIO]) -> Any:
        if tier.info.name == "near":
            tier._medium.reader.engine.inject_faults(every=1, error=5)
        return await read(tier, chunks)

    monkeypatch.setattr(FileTier, "read", broken)
    target = zeros(state)
    with stepwell.open(tiers=chain(tmp_path), run="run", mode="r") as store:
        found = store.restore(target)
    assert found is not None and list(found.sources) == ["far"]
    assert_same(target, state)


def test_D17_a_restore_right_after_a_save_in_the_same_process_sees_it(tmp_path: Path) -> None:
    state = {"model": {"w": torch.randn(500_000)}}
    with stepwell.open(tiers=chain(tmp_path), run="run") as store:
        for step in (1, 2, 3):
            state["model"]["w"].fill_(step)
            store.save(step, state)  # not waited for
            target = zeros(state)
            found = store.restore(target)
            assert found is not None and found.step == step and bool((target["model"]["w"] == step).all())
