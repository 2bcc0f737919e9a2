"""Bad bytes, short files, missing files: found; healed where another tier has a copy, else named."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

import stepwell
from stepwell.errors import CorruptData, NoGoodCheckpoint, TierUnavailable
from stepwell.format.names import Attempt
from stepwell.tiers.base import Tier
from stepwell.tiers.file import FileTier
from tests.store.helpers import eventually

Damage = Callable[[Path], None]


def state(value: int = 1) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "model": {"first": torch.full((700_000,), float(value)), "second": torch.arange(900_000) + value},
        "optimizer": {"m": torch.full((500_000,), float(-value))},
    }


def blank() -> dict[str, dict[str, torch.Tensor]]:
    return {part: {k: torch.zeros_like(t) for k, t in tensors.items()} for part, tensors in state().items()}


def equal(a: dict[str, dict[str, torch.Tensor]], b: dict[str, dict[str, torch.Tensor]]) -> bool:
    return all(torch.equal(a[part][key], b[part][key]) for part in a for key in a[part])


def flip(offset: float) -> Damage:
    """Flips one bit at a fraction of the file's length."""

    def damage(path: Path) -> None:
        with open(path, "r+b") as file:
            position = int(offset * (path.stat().st_size - 1))
            file.seek(position)
            byte = file.read(1)[0]
            file.seek(position)
            file.write(bytes([byte ^ 0x10]))

    return damage


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def remove(path: Path) -> None:
    path.unlink()


FILES = ["model.safetensors", "optimizer.safetensors", "rank-00000.json", "manifest.json"]
DAMAGES: dict[str, Damage] = {
    "first byte": flip(0),
    "header": flip(0.00005),
    "middle": flip(0.5),
    "last byte": flip(1),
    "truncated": cut,
    "missing": remove,
}


def only(folder: Path, name: str) -> Path:
    [path] = folder.glob(f"run/step-*/{name}")
    return path


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
@pytest.mark.parametrize("name", FILES)
def test_damage_on_the_only_tier_is_named_and_an_older_step_is_taken(tmp_path: Path, name: str, damage: str) -> None:
    with stepwell.open(tmp_path / "run") as store:
        store.save(1, state(1)).wait()
    older = next((tmp_path / "run").glob("step-*"))
    with stepwell.open(tmp_path / "run") as store:
        store.restore(blank())
        store.save(2, state(2)).wait()
    newer = next(p for p in (tmp_path / "run").glob("step-*") if p != older)
    DAMAGES[damage](newer / name)
    with stepwell.open(tmp_path / "run", mode="r") as store:
        target = blank()
        found = store.restore(target)
        assert found is not None and found.step == 1
        assert equal(target, state(1))
        if name == "manifest.json" and damage == "missing":
            assert found.skipped == {} and len(store.debris()) == 1
            return
        assert list(found.skipped) == [2]
        with pytest.raises((CorruptData, NoGoodCheckpoint)) as caught:
            store.restore(blank(), 2)
        text = str(caught.value)
        assert name.removesuffix(".safetensors") in text or "tensors" in text
        assert "2" in text


def two_tiers(tmp_path: Path) -> list[Tier]:
    for name in ("near", "far"):
        (tmp_path / name).mkdir(exist_ok=True)
    return [
        FileTier(tmp_path / "near", name="near"),
        FileTier(tmp_path / "far", name="far", scope="shared", survives="node-loss"),
    ]


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
@pytest.mark.parametrize("name", FILES)
def test_damage_on_the_near_tier_is_healed_from_the_far_one(
    tmp_path: Path, name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    with stepwell.open(run="run", tiers=two_tiers(tmp_path)) as store:
        store.save(1, state(1)).wait("far")
    whole = only(tmp_path / "near", name).read_bytes()
    DAMAGES[damage](only(tmp_path / "near", name))
    with caplog.at_level(logging.WARNING), stepwell.open(run="run", tiers=two_tiers(tmp_path)) as store:
        target = blank()
        found = store.restore(target)
        assert found is not None and found.step == 1 and not found.skipped
        assert equal(target, state(1))
        assert found.sources.get("far", 0) > 0 or name.endswith(".json")
        shard = name.endswith(".safetensors")
        assert any(name in healed for healed in found.healed) == shard
        store.save(2, state(2)).wait()  # the first save takes the run over: only its writer repairs
    if shard:
        mended = next((tmp_path / "near" / "run").glob(f"step-000000001.*/{name}"))
        assert mended.read_bytes() == whole
        assert "written again" in caplog.text
        with stepwell.open(run="run", tiers=two_tiers(tmp_path), mode="r") as store:
            again = store.restore(blank(), 1)
            assert again is not None and again.healed == () and set(again.sources) == {"near"}


def damaged(tmp_path: Path) -> tuple[Path, bytes]:
    """A checkpoint on both tiers, whose near copy has a bad shard: its path, and what is in it."""
    with stepwell.open(run="run", tiers=two_tiers(tmp_path)) as store:
        store.save(1, state(1)).wait("far")
    path = only(tmp_path / "near", "model.safetensors")
    flip(0.5)(path)
    return path, path.read_bytes()


def test_a_store_that_only_restores_repairs_nothing(tmp_path: Path) -> None:
    """The run may belong to another writer: without its epoch nothing is written."""
    path, bad = damaged(tmp_path)
    with stepwell.open(run="run", tiers=two_tiers(tmp_path)) as store:
        found = store.restore(blank())
        assert found is not None and found.healed
    assert path.read_bytes() == bad


def test_a_reader_heals_what_it_reads_and_repairs_nothing(tmp_path: Path) -> None:
    path, bad = damaged(tmp_path)
    tiers = [FileTier(tmp_path / name, name=name, read_only=True) for name in ("near", "far")]
    with stepwell.open(run="run", tiers=tiers, mode="r") as store:
        target = blank()
        found = store.restore(target)
        assert found is not None and equal(target, state(1)) and found.healed
    assert path.read_bytes() == bad


def test_different_blocks_bad_on_both_tiers_still_heal(tmp_path: Path) -> None:
    with stepwell.open(run="run", tiers=two_tiers(tmp_path)) as store:
        store.save(1, state(1)).wait("far")
    flip(0.2)(only(tmp_path / "near", "model.safetensors"))
    flip(0.9)(only(tmp_path / "far", "model.safetensors"))
    with stepwell.open(run="run", tiers=two_tiers(tmp_path), mode="r") as store:
        target = blank()
        assert store.restore(target) is not None
        assert equal(target, state(1))


def test_the_same_block_bad_on_both_tiers_is_an_error_with_file_key_and_step(tmp_path: Path) -> None:
    with stepwell.open(run="run", tiers=two_tiers(tmp_path)) as store:
        store.save(41, state(1)).wait("far")
    for name in ("near", "far"):
        flip(0.99)(only(tmp_path / name, "model.safetensors"))
    with stepwell.open(run="run", tiers=two_tiers(tmp_path), mode="r") as store:
        with pytest.raises(CorruptData) as caught:
            store.restore(blank(), 41)
        text = str(caught.value)
        assert "model.safetensors" in text and "step 41" in text and "key " in text
        assert "first" in text or "second" in text
        assert any("mix" in note for note in caught.value.__notes__)
        with pytest.raises(NoGoodCheckpoint) as nothing:
            store.restore(blank())
        assert list(nothing.value.reasons) == [41]


def test_the_near_tier_can_be_lost_whole(tmp_path: Path) -> None:

    with stepwell.open(run="run", tiers=two_tiers(tmp_path)) as store:
        store.save(1, state(1)).wait("far")
    shutil.rmtree(tmp_path / "near" / "run")
    with stepwell.open(run="run", tiers=two_tiers(tmp_path)) as store:
        target = blank()
        found = store.restore(target)
        assert found is not None and set(found.sources) == {"far"} and equal(target, state(1))


def test_a_copy_is_not_repaired_from_one_that_lacks_other_parts(tmp_path: Path) -> None:
    """The repair ends the commit of the only copy of those parts: a crash in the middle would lose them."""
    (tmp_path / "near").mkdir()
    (tmp_path / "far").mkdir()

    def tiers() -> list[Tier]:
        return [FileTier(tmp_path / "near", name="near"), FileTier(tmp_path / "far", name="far")]

    with stepwell.open(run="run", tiers=tiers(), policies=[]) as store:
        store.save(1, state()).wait()
        store.flush(1, "far", parts=["model"])
    bad = tmp_path / "near" / "run" / "step-000000001.1-1" / "model.safetensors"
    flip(0.9)(bad)
    damaged = bad.read_bytes()
    with stepwell.open(run="run", tiers=tiers(), policies=[]) as store:
        target = blank()
        found = store.restore(target)
        assert found is not None and equal(target, state())
        store.save(2, state(2)).wait()
    assert bad.read_bytes() == damaged and (bad.parent / "manifest.json").exists()
    with stepwell.open(run="run", tiers=tiers(), policies=[]) as store:
        with pytest.raises(CorruptData, match="near"):  # nor is the partial copy removed to make way for a whole one
            store.flush(1, "far")
        target = blank()
        assert store.restore(target, 1) is not None and equal(target, state())


class Away(FileTier):
    """A disk that does not always answer."""

    away = False

    def scan(self, run: str):  # type: ignore[no-untyped-def]
        if self.away:
            raise TierUnavailable("no answer", tier=self.info.name)
        return super().scan(run)


def test_a_tier_that_does_not_answer_a_scan_during_its_repair_is_repaired(tmp_path: Path) -> None:
    """The catalog then knows of no copy there."""
    for name in ("near", "far"):
        (tmp_path / name).mkdir()
    near = Away(tmp_path / "near", name="near")
    with stepwell.open(run="run", tiers=[near, FileTier(tmp_path / "far", name="far")]) as store:
        store.save(1, state()).wait("far")
        [shard] = (tmp_path / "near").glob("run/step-*/model.safetensors")
        good = shard.read_bytes()
        flip(0.5)(shard)
        mender = store._writer._mender
        look = mender._is_whole_elsewhere

        async def looked(attempt: Attempt, sources: Sequence[Tier]) -> bool:
            whole = await look(attempt, sources)
            near.away = True
            await store.catalog.refresh()
            near.away = False
            return whole

        mender._is_whole_elsewhere = looked  # type: ignore[method-assign]
        into = blank()
        assert store.restore(into) is not None and equal(into, state())
        eventually(lambda: shard.exists() and shard.read_bytes() == good)
