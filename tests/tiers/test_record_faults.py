"""Records of the file driver where the system does not play along: no links, failing calls, many writers."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepwell.errors import TierError, TierUnavailable
from stepwell.tiers import _folders, _records
from stepwell.tiers.base import RecordKey
from stepwell.tiers.file import FileTier
from tests.contract.suite import CHECKPOINT, MANIFEST, SHARD, data_of, found, put, save
from tests.tiers.helpers import disk, on, record_deletions, refusing, started, tree

RECORD = RecordKey("run", "epochs/0000001.json")


@pytest.fixture(params=["rename", "claim"])
def linkless(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A file system without hard links, or even without RENAME_NOREPLACE."""
    monkeypatch.setattr(os, "link", refusing(errno.EPERM))
    if request.param == "claim":
        monkeypatch.setattr(_records, "rename_noreplace", refusing(errno.EINVAL))
    yield


@pytest.mark.usefixtures("linkless")
def test_records_without_hard_links(tmp_path: Path) -> None:
    async def scenario(tier: FileTier) -> None:
        texts = [b"%d" % number for number in range(8)]
        won = await asyncio.gather(*(tier.commit(RECORD, text) for text in texts))
        assert won.count(True) == 1 and await tier.fetch(RECORD) == texts[won.index(True)]
        assert not await tier.commit(RECORD, b"late")

    on(disk(tmp_path), scenario)
    assert tree(tmp_path) == {"run", "run/epochs", "run/epochs/0000001.json"}


def test_a_removal_that_hangs_does_not_take_what_is_committed_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asked for it may have given it up long ago."""
    real, begun, go_on = _folders.drop, threading.Event(), threading.Event()

    def drop(*given: Any) -> None:
        begun.set()
        assert go_on.wait(20)
        real(*given)

    async def scenario(tier: FileTier) -> None:
        await tier.commit(RECORD, b"old")
        monkeypatch.setattr(_folders, "drop", drop)
        dropping = asyncio.ensure_future(tier.drop([RECORD]))
        assert await asyncio.to_thread(begun.wait, 20)
        dropping.cancel()
        committing = asyncio.ensure_future(tier.commit(RECORD, b"new"))
        await asyncio.sleep(0.05)
        go_on.set()
        assert await committing and await tier.fetch(RECORD) == b"new"
        await asyncio.wait([dropping])

    on(disk(tmp_path), scenario)


def test_two_drivers_and_one_record(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(disk(tmp_path)) as first, started(disk(tmp_path)) as second:
            for number in range(10):
                record = RecordKey("run", f"epochs/{number}.json")
                won = await asyncio.gather(first.commit(record, b"first"), second.commit(record, b"second"))
                assert sorted(won) == [False, True]
                assert await first.fetch(record) == (b"first" if won[0] else b"second")

    asyncio.run(main())


def test_the_claim_of_a_dead_writer_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", refusing(errno.EPERM))
    monkeypatch.setattr(_records, "rename_noreplace", refusing(errno.ENOSYS))
    monkeypatch.setattr(_records, "CLAIM_WAIT_S", 0.01)
    claim = tmp_path / "run" / "epochs" / ".0000001.json.claim"
    claim.parent.mkdir(parents=True)
    claim.write_bytes(b"")

    async def scenario(tier: FileTier) -> None:
        with pytest.raises(TierError, match="claimed"):
            await tier.commit(RECORD, b"x")
        assert await tier.fetch(RECORD) is None
        long_ago = claim.stat().st_mtime - _records.CLAIM_STALE_S - 1
        os.utime(claim, (long_ago, long_ago))
        assert await tier.commit(RECORD, b"x")
        assert await tier.fetch(RECORD) == b"x"

    on(disk(tmp_path), scenario)
    assert not claim.exists()


def test_a_lost_answer_to_a_link_is_not_taken_for_another_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over NFS the repeated call finds the file that the first one made."""
    real = os.link

    def link(source: str, target: str) -> None:
        real(source, target)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)

    monkeypatch.setattr(os, "link", link)
    assert on(disk(tmp_path), lambda tier: tier.commit(RECORD, b"x")) is True


@pytest.mark.parametrize("call", ["fsync", "link"])
def test_a_record_is_whole_or_not_there(tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(tier: FileTier) -> None:
        (tmp_path / "run" / "epochs").mkdir(parents=True)
        with monkeypatch.context() as patch:
            patch.setattr(os, call, refusing(errno.EIO))
            with pytest.raises(TierError) as caught:
                await tier.commit(RECORD, b"x" * 10_000)
        assert caught.value.errno == errno.EIO and await tier.fetch(RECORD) is None
        assert await tier.commit(RECORD, b"whole")

    on(disk(tmp_path), scenario)
    assert tree(tmp_path) == {"run", "run/epochs", "run/epochs/0000001.json"}


def test_a_manifest_that_comes_while_its_checkpoint_is_deleted_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever call of the commit the deletion meets."""
    deleted_at: list[str] = []

    def deleting(real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            if not deleted_at:
                deleted_at.append(name)
                _folders.drop(str(tmp_path), str(tmp_path / "run" / CHECKPOINT.attempt), True)
            return real(*args, **named)

        return call

    async def scenario(tier: FileTier) -> None:
        record = RecordKey("run", f"{CHECKPOINT.attempt}/rank-00000.json")
        for name in ("lexists", "fsync", "scandir", "link"):
            del deleted_at[:]
            reservation = await put(tier, SHARD, data_of(10))
            assert await tier.commit(record, b"{}", shards=[reservation])
            with monkeypatch.context() as patch:
                where = os.path if name == "lexists" else os
                patch.setattr(where, name, deleting(getattr(where, name), name))
                with pytest.raises(TierError) as caught:
                    await tier.commit(MANIFEST, b"{}")
            assert deleted_at == [name] and caught.value.errno == errno.ENOENT
            assert tree(tmp_path) == {"run"}

    on(disk(tmp_path), scenario)


def test_a_drop_deletes_the_manifest_that_arrives_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(tier: FileTier) -> None:
        await save(tier, SHARD, data_of(10))

        def arrive(folder: int) -> None:
            monkeypatch.undo()
            (tmp_path / "run" / MANIFEST.name).write_bytes(b"{}")

        monkeypatch.setattr(_folders, "_sync_open_folder", arrive)
        await tier.drop([CHECKPOINT])

    on(disk(tmp_path), scenario)
    assert tree(tmp_path) == {"run"}


def test_a_record_whose_folder_cannot_be_synced_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(tier: FileTier) -> None:
        reservation = await put(tier, SHARD, data_of(10))
        with monkeypatch.context() as patch:
            patch.setattr(_records, "sync_folder", refusing(errno.EIO))
            with pytest.raises(TierError):
                await tier.commit(MANIFEST, b"{}", shards=[reservation])
        assert await tier.fetch(MANIFEST) is None
        await tier.abort(reservation)  # would tear a checkpoint whose manifest had stayed
        assert await found(tier) == set()

    on(disk(tmp_path), scenario)


def test_a_torn_beat_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(tier: FileTier) -> None:
        await tier.beat(RECORD, b"old")
        monkeypatch.setattr(os, "rename", refusing(errno.EIO))
        with pytest.raises(TierError):
            await tier.beat(RECORD, b"new")
        assert await tier.fetch(RECORD) == b"old"

    on(disk(tmp_path), scenario)
    assert tree(tmp_path) == {"run", "run/epochs", "run/epochs/0000001.json"}


def test_folders_are_durable_before_what_is_in_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = _folders.sync_folder

    def sync(path: str) -> None:
        synced.append(os.path.relpath(path, tmp_path))
        real(path)

    monkeypatch.setattr(_folders, "sync_folder", sync)
    monkeypatch.setattr(_records, "sync_folder", sync)

    async def scenario(tier: FileTier) -> None:
        assert synced == ["."]
        reservation = await put(tier, SHARD, data_of(10))
        assert synced[1:] == ["root", "root/run"]
        await tier.commit(MANIFEST, b"{}", shards=[reservation])
        attempt = f"root/run/{CHECKPOINT.attempt}"
        assert synced[3:] == [attempt, attempt]  # for the shard, then for the manifest

    on(disk(tmp_path / "root"), scenario)


def test_a_drop_deletes_the_manifest_durably_before_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []

    async def scenario(tier: FileTier) -> None:
        await save(tier, SHARD, data_of(10))
        record_deletions(steps, monkeypatch)
        await tier.drop([CHECKPOINT])
        assert steps == ["manifest.json", "fsync", SHARD.name]

    on(disk(tmp_path), scenario)


def test_a_path_that_takes_no_more_calls_once_a_record_is_placed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is told that a commit failed whose record is there."""
    real, placed = os.link, False

    def link(source: str, target: str) -> None:
        nonlocal placed
        real(source, target)
        placed = True

    async def scenario(tier: FileTier) -> None:
        submit = tier._calls.executor.submit

        def refuse(*arguments: Any, **options: Any) -> Any:
            if placed:
                raise TierUnavailable("calls pile up")
            return submit(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, "link", link)
            patch.setattr(tier._calls.executor, "submit", refuse)
            assert await tier.commit(RECORD, b"x")
        assert await tier.fetch(RECORD) == b"x"

    on(disk(tmp_path), scenario)
    assert tree(tmp_path) == {"run", "run/epochs", "run/epochs/0000001.json"}
