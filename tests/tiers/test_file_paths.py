"""Roots of every spelling, links, missing and read-only places, and what is never touched."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepwell.errors import CheckpointGone, ConfigError, TierError, TierUnavailable
from stepwell.tiers.base import CheckpointKey, ChunkIO, RecordKey, Refused, Reservation, ShardKey
from stepwell.tiers.file import FileTier
from tests.contract.suite import CHECKPOINT, MANIFEST, NEW, SHARD, Memory, data_of, found, get, put, save
from tests.mounts import tmpfs
from tests.tiers.helpers import disk, on, tree

SHARD_PATH = "run/step-000000001.1-1/model.safetensors"


def save_and_load(root: object) -> None:
    async def scenario(tier: FileTier) -> None:
        await save(tier, SHARD, data_of(5000))
        assert await get(tier, SHARD, 5000) == data_of(5000)
        assert (CHECKPOINT.attempt, SHARD.name, 5000) in await found(tier)

    on(disk(root), scenario)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["a b", "a[1]", "lr=1e-3", "ünïcode-模型", "*", "~", "%20", "new\nline", "-rf", "a?b"])
def test_odd_names_are_only_names(tmp_path: Path, name: str) -> None:
    save_and_load(tmp_path / name)
    assert (tmp_path / name / SHARD_PATH).read_bytes() == data_of(5000)
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_odd_names_of_runs_and_shards(tmp_path: Path) -> None:
    odd = ShardKey(CheckpointKey("team/lr=1e-3 [a]", "step 1"), "*.safetensors")

    async def scenario(tier: FileTier) -> None:
        await save(tier, odd, data_of(10))
        assert await found(tier, odd.checkpoint.run) == {
            ("step 1", "*.safetensors", 10),
            ("step 1", "manifest.json", 2),
        }

    on(disk(tmp_path), scenario)
    assert (tmp_path / "team" / "lr=1e-3 [a]" / "step 1" / "*.safetensors").read_bytes() == data_of(10)


@pytest.mark.parametrize("spelling", ["~/place", "place", "place/", "./place//", "../{name}/place", "path"])
def test_one_place_in_many_spellings(tmp_path: Path, spelling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    root = Path("place") if spelling == "path" else spelling.format(name=tmp_path.name)
    save_and_load(root)
    assert (tmp_path / "place" / SHARD_PATH).read_bytes() == data_of(5000)


def test_the_current_folder_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    tier = disk("root")
    monkeypatch.chdir(tmp_path / "elsewhere")
    on(tier, lambda tier: save(tier, SHARD, data_of(10)))
    assert (tmp_path / "root" / SHARD_PATH).exists() and tree(tmp_path / "elsewhere") == set()


def test_an_empty_path_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty"):
        FileTier("")


def test_the_root_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")

    async def scenario(tier: FileTier) -> None:
        await save(tier, SHARD, data_of(5000))
        await save(tier, NEW, data_of(10))
        assert await get(tier, SHARD, 5000) == data_of(5000)
        await tier.drop([CHECKPOINT])

    on(disk(tmp_path / "link"), scenario)
    assert tree(tmp_path / "real") == {"run", f"run/{NEW.checkpoint.attempt}"} | {
        f"run/{NEW.checkpoint.attempt}/{name}" for name in ("model.safetensors", "manifest.json")
    }


def test_a_drop_follows_no_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "step-9").mkdir(parents=True)
    (outside / "step-9" / "precious").write_bytes(b"1")

    async def scenario(tier: FileTier) -> None:
        await save(tier, SHARD, data_of(10))
        run = tmp_path / "root" / "run"
        (run / CHECKPOINT.attempt / "link").symlink_to(outside / "step-9" / "precious")
        (run / "step-8").symlink_to(outside / "step-9")
        (tmp_path / "root" / "away").symlink_to(outside)
        await tier.drop([CHECKPOINT])
        assert not (run / CHECKPOINT.attempt).exists()
        for what in (CheckpointKey("run", "step-8"), CheckpointKey("away", "step-9")):
            with pytest.raises(TierError):
                await tier.drop([what])
        with pytest.raises(TierError, match="link"):
            await tier.drop([RecordKey("away", "step-9/precious")])

    on(disk(tmp_path / "root"), scenario)
    assert (outside / "step-9" / "precious").read_bytes() == b"1"


def test_folders_inside_a_checkpoint_are_not_ours(tmp_path: Path) -> None:
    async def scenario(tier: FileTier) -> None:
        await save(tier, SHARD, data_of(10))
        (tmp_path / "run" / CHECKPOINT.attempt / "mine").mkdir()
        await tier.drop([CHECKPOINT])

    on(disk(tmp_path), scenario)
    assert tree(tmp_path) == {"run", f"run/{CHECKPOINT.attempt}", f"run/{CHECKPOINT.attempt}/mine"}


def test_a_node_root_needs_its_parent(tmp_path: Path) -> None:
    with pytest.raises(TierUnavailable, match="parent") as caught:
        save_and_load(tmp_path / "no" / "root")
    assert str(tmp_path / "no" / "root") in str(caught.value)
    assert tree(tmp_path) == set()


def test_a_shared_root_is_never_made(tmp_path: Path) -> None:
    with pytest.raises(TierUnavailable, match="never made") as caught:
        on(disk(tmp_path / "pfs", scope="shared"), lambda tier: tier.fetch(MANIFEST))
    assert str(tmp_path / "pfs") in str(caught.value) and caught.value.retry
    assert tree(tmp_path) == set()


def test_a_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "root").write_bytes(b"")
    with pytest.raises(TierUnavailable):
        save_and_load(tmp_path / "root")


def test_a_root_that_vanishes_is_not_an_empty_one(tmp_path: Path) -> None:
    async def scenario(tier: FileTier) -> None:
        (tmp_path / "root").rename(tmp_path / "gone")
        with pytest.raises(TierError):
            await tier.fetch(MANIFEST)
        with pytest.raises(TierError):
            await found(tier)
        with pytest.raises(TierUnavailable):
            await tier.lease([SHARD])
        with pytest.raises(TierError):
            await tier.reserve(SHARD, 10)
        assert not (tmp_path / "root").exists()

    on(disk(tmp_path / "root"), scenario)


def test_a_tier_that_was_not_started_says_so(tmp_path: Path) -> None:
    with pytest.raises(TierUnavailable, match="not started"):
        asyncio.run(disk(tmp_path).fetch(MANIFEST))


def test_umask_and_setgid_are_kept(tmp_path: Path) -> None:
    tmp_path.chmod(0o2775)
    before = os.umask(0o027)
    try:
        save_and_load(tmp_path)
    finally:
        os.umask(before)
    folder = tmp_path / "run" / CHECKPOINT.attempt
    assert folder.stat().st_mode & 0o7777 == 0o2750 and folder.parent.stat().st_mode & 0o7777 == 0o2750
    assert {each.name: each.stat().st_mode & 0o777 for each in folder.iterdir()} == {
        "model.safetensors": 0o640,
        "manifest.json": 0o640,
    }


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[Path]:
    """A tree on a file system that is mounted read-only, holding one checkpoint."""
    with tmpfs(tmp_path / "frozen", 4) as point:
        on(disk(point), lambda tier: save(tier, SHARD, data_of(5000)))
        subprocess.run(["mount", "-o", "remount,ro", str(point)], check=True)
        yield point


@pytest.mark.parametrize("read_only", [True, False], ids=["asked", "found"])
def test_a_read_only_file_system(frozen: Path, read_only: bool) -> None:
    """Loads as usual, whether or not one knew; writing is refused by name."""

    async def scenario(tier: FileTier) -> None:
        assert tier.info.read_only
        assert await get(tier, SHARD, 5000) == data_of(5000)
        assert await tier.fetch(MANIFEST) == b"{}"
        async with await tier.lease([SHARD]):
            assert (CHECKPOINT.attempt, SHARD.name, 5000) in await found(tier)
        refused = await tier.reserve(NEW, 10)
        assert isinstance(refused, Refused) and refused.reason == "read-only"
        for call in (
            tier.commit(RecordKey("run", "x"), b""),
            tier.beat(RecordKey("run", "x"), b""),
            tier.drop([SHARD]),
        ):
            with pytest.raises(TierError, match="EROFS"):
                await call

    on(disk(frozen, read_only=read_only), scenario)


def test_reading_only_writes_nothing(tmp_path: Path) -> None:
    on(disk(tmp_path), lambda tier: save(tier, SHARD, data_of(5000)))
    before = {path: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.rglob("*")]}

    async def scenario(tier: FileTier) -> None:
        assert await get(tier, SHARD, 5000) == data_of(5000)
        assert isinstance(await tier.reserve(NEW, 10), Refused)

    on(FileTier(tmp_path, read_only=True), scenario)
    assert {path: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.rglob("*")]} == before


def test_a_plain_folder_of_safetensors_files(tmp_path: Path) -> None:
    """As downloaded: links to blobs elsewhere, no manifest, nothing of ours."""
    blobs, folder = tmp_path / "blobs", tmp_path / "hub" / "my model"
    blobs.mkdir()
    folder.mkdir(parents=True)
    (blobs / "abc").write_bytes(data_of(5000))
    (folder / "model.safetensors").symlink_to(blobs / "abc")
    (folder / "config.json").write_bytes(b"{}")
    plain = ShardKey(CheckpointKey("", "my model"), "model.safetensors")
    record = RecordKey("", "my model/config.json")

    async def scenario(tier: FileTier) -> None:
        assert await get(tier, plain, 5000) == data_of(5000)
        assert await tier.fetch(record) == b"{}"
        assert await found(tier, "") == {("my model", "model.safetensors", 5000), ("my model", "config.json", 2)}
        async with await tier.lease([plain]):
            pass
        with pytest.raises(TierError, match="absent"):
            await tier.lease([ShardKey(plain.checkpoint, "absent.safetensors")])
        with pytest.raises(CheckpointGone):
            await tier.lease([ShardKey(CheckpointKey("", "other"), "model.safetensors")])

    on(disk(tmp_path / "hub", read_only=True), scenario)

    async def writing(tier: FileTier) -> None:
        for call in (
            tier.drop([plain.checkpoint]),
            tier.drop([plain]),
            tier.reserve(plain, 1),
            tier.commit(record, b""),
        ):
            with pytest.raises(TierError, match="not stepwell's"):
                await call

    on(disk(tmp_path / "hub"), writing)
    assert tree(tmp_path / "hub") == {"my model", "my model/model.safetensors", "my model/config.json"}


def test_more_leases_than_half_of_the_file_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda which: (6, 6))
    shards = [ShardKey(CHECKPOINT, f"{number}.safetensors") for number in range(5)]

    async def scenario(tier: FileTier) -> None:
        reservations: list[Reservation] = [await put(tier, shard, data_of(100)) for shard in shards]
        await tier.commit(MANIFEST, b"{}", shards=reservations)
        async with await tier.lease(shards):
            assert "3 shards leased" in repr(tier)
            for shard in shards:
                assert await get(tier, shard, 100) == data_of(100)

    on(disk(tmp_path), scenario)


def test_a_truncated_file_is_named_with_its_offset(tmp_path: Path) -> None:
    async def scenario(tier: FileTier) -> None:
        await save(tier, SHARD, data_of(20_000))
        os.truncate(tmp_path / SHARD_PATH, 10_000)
        memory = Memory(20_000)
        [result] = await tier.read([ChunkIO(SHARD, 8192, 8192, memory.address)])
        assert isinstance(result.error, TierError) and "truncated" in str(result.error)
        assert result.error.where["path"] == str(tmp_path / SHARD_PATH) and result.error.where["offset"] == 8192

    on(disk(tmp_path), scenario)
