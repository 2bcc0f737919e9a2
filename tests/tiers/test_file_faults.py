"""The file driver where the system does not play along: no direct I/O, no links, failing and hung calls."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from stepwell.errors import TierError, TierUnavailable
from stepwell.native import Ticket
from stepwell.tiers import _files, _folders, file
from stepwell.tiers._probe import O_DIRECT
from stepwell.tiers.base import ChunkIO, RecordKey, Reservation
from stepwell.tiers.file import FileTier
from tests.contract.suite import (
    CHECKPOINT,
    LENGTHS,
    NEW,
    OTHER,
    SHARD,
    Memory,
    chunks_of,
    data_of,
    get,
    put,
    save,
)
from tests.resources import comes_back_to, describe_files, in_use
from tests.tiers.helpers import disk, files_in_use, on, refusing

RECORD = RecordKey("run", "epochs/0000001.json")


# -- direct I/O ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", LENGTHS)
def test_a_file_that_refuses_direct_writes_at_the_first_write(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe passed, this file's first write does not: it is written buffered, and `detail` says so."""

    async def scenario(tier: FileTier) -> None:
        tier._medium.direct_write = True
        monkeypatch.setattr(os, "pwrite", refusing(errno.EINVAL))
        await save(tier, SHARD, data_of(size))
        assert ("direct write refused" in tier.info.detail.get("buffered", "")) == (size > 0)

    on(disk(tmp_path), scenario)
    assert (tmp_path / "run" / CHECKPOINT.attempt / SHARD.name).read_bytes() == data_of(size)


@pytest.mark.parametrize("size", LENGTHS)
def test_a_file_that_refuses_direct_io_in_the_middle(tmp_path: Path, size: int) -> None:
    """Each chunk that comes back with EINVAL is moved again without O_DIRECT, and the file stays buffered."""

    async def scenario(tier: FileTier) -> None:
        medium = tier._medium
        if not (medium.direct_write and medium.direct_read):
            pytest.skip("no direct I/O here")
        real, refused = medium._run, 0

        async def run(jobs: list[Any]) -> list[int]:
            nonlocal refused
            refused += sum(job.direct for job in jobs)
            results = iter(await real([job for job in jobs if not job.direct]))
            return [-errno.EINVAL if job.direct else next(results) for job in jobs]

        medium._run = run  # type: ignore[method-assign]
        await save(tier, SHARD, data_of(size))
        assert await get(tier, SHARD, size) == data_of(size)
        assert refused == 2 * len(chunks_of(SHARD, size, Memory(size)))

    on(disk(tmp_path), scenario)
    assert (tmp_path / "run" / CHECKPOINT.attempt / SHARD.name).read_bytes() == data_of(size)


def test_a_root_without_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", refusing(errno.EINVAL))

    async def scenario(tier: FileTier) -> None:
        assert tier.info.detail["writing"] == "buffered" and "EINVAL" in tier.info.detail["access"]
        await save(tier, SHARD, data_of(5000))
        assert await get(tier, SHARD, 5000) == data_of(5000)

    on(disk(tmp_path), scenario)


def test_direct_io_is_used_where_it_works(tmp_path: Path) -> None:
    async def scenario(tier: FileTier) -> None:
        reservation = await tier.reserve(SHARD, 5000)
        assert isinstance(reservation, Reservation)
        if tier.info.detail["writing"] == "direct":
            fdinfo = Path(f"/proc/self/fdinfo/{tier._writers.files[SHARD].fd}").read_text()
            flags = next(line for line in fdinfo.splitlines() if line.startswith("flags"))
            assert int(flags.split()[1], 8) & O_DIRECT

    on(disk(tmp_path), scenario)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_errors_of_the_medium_have_errno_path_and_offset(tmp_path: Path, number: int) -> None:
    async def scenario(tier: FileTier) -> None:
        await save(tier, SHARD, data_of(5000))
        assert isinstance(await tier.reserve(OTHER, 5000), Reservation)
        memory = Memory(5000)
        for engine, move, shard in (
            (tier._medium.reader, tier.read, SHARD),
            (tier._medium.writer, tier.write, OTHER),
        ):
            engine.engine.inject_faults(every=1, error=number)
            [result] = await move([ChunkIO(shard, 4096, 900, memory.address)])
            assert isinstance(result.error, TierError) and result.error.errno == number
            assert isinstance(result.error, TierUnavailable) == (number == errno.ESTALE)
            assert result.error.where["offset"] == 4096 and shard.name in str(result.error.where["path"])

    on(disk(tmp_path), scenario)


# -- hung and failing calls ----------------------------------------------------------------------------


def test_another_ranks_abort_may_remove_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = _folders.make_folders, 0

    def make_folders(root: str, path: str) -> None:
        nonlocal calls
        calls += 1
        real(root, path)
        if calls < 3:
            os.rmdir(path)

    monkeypatch.setattr(_files, "make_folders", make_folders)
    on(disk(tmp_path), lambda tier: save(tier, SHARD, data_of(10)))
    assert calls == 3


def test_a_hung_path_delays_neither_its_caller_nor_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "CLOSE_S", 0.01)
    gate, hung = threading.Event(), threading.Event()
    before = in_use()

    def create(*arguments: object) -> tuple[int, bool]:
        hung.set()
        gate.wait()
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    async def scenario(tier: FileTier) -> None:
        await save(tier, SHARD, data_of(10))
        monkeypatch.setattr(_files, "create", create)
        reserving = asyncio.ensure_future(tier.reserve(NEW, 10))
        await asyncio.to_thread(hung.wait)
        assert await get(tier, SHARD, 10) == data_of(10)  # other calls go on
        reserving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reserving

    on(disk(tmp_path), scenario)
    gate.set()
    assert comes_back_to(before), describe_files()


def test_a_path_that_lets_calls_pile_up_is_unavailable(tmp_path: Path) -> None:
    async def scenario(tier: FileTier) -> None:
        tier._calls.executor.waiting_max = 0
        for call in (tier.fetch(RECORD), tier.commit(RECORD, b""), tier.reserve(SHARD, 1), tier.lease([SHARD])):
            with pytest.raises(TierUnavailable, match="does not answer"):
                await call

    on(disk(tmp_path), scenario)


@pytest.mark.parametrize("refused", [1, 2])
def test_leases_that_are_refused_hold_nothing(tmp_path: Path, refused: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of its calls the path does not take any more."""

    async def scenario(tier: FileTier) -> None:
        await save(tier, SHARD, data_of(10))
        reservation = await put(tier, NEW, data_of(10))
        before, call, calls = files_in_use(), tier._calls.call, 0

        async def piled_up(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == refused:
                raise TierUnavailable("calls pile up")
            return await call(*arguments)

        async with await tier.lease([SHARD]):
            with monkeypatch.context() as patch:
                patch.setattr(tier._calls, "call", piled_up)
                with pytest.raises(TierUnavailable, match="pile up"):
                    await tier.lease([SHARD, NEW])
        assert comes_back_to(before), describe_files()
        await tier.abort(reservation)

    on(disk(tmp_path), scenario)


def test_a_write_that_close_overtakes_fails_by_name(tmp_path: Path) -> None:
    async def scenario(tier: FileTier) -> None:
        assert isinstance(await tier.reserve(SHARD, 10), Reservation)
        await tier._medium.close(1.0)
        memory, signal = Memory(10), Ticket()
        [result] = await tier.write([ChunkIO(SHARD, 0, 10, memory.address, None, signal)])
        assert isinstance(result.error, TierError) and result.error.errno == errno.ECANCELED
        assert signal.state == "failed"

    on(disk(tmp_path), scenario)


def test_no_descriptors_leak_when_things_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(tier: FileTier) -> None:
        before = files_in_use()
        for name, where in (("sync_folder", _folders), ("make_folders", _files), ("set_direct", _files)):
            with monkeypatch.context() as patch:
                patch.setattr(where, name, refusing(errno.EIO))
                with pytest.raises(TierError):
                    await tier.reserve(SHARD, 10)
        (tmp_path / "run" / CHECKPOINT.attempt / SHARD.name).mkdir(parents=True)
        with pytest.raises(TierError):
            await tier.reserve(SHARD, 10)
        assert tier.usage().in_flight_bytes == 0
        assert comes_back_to(before), describe_files()

    on(disk(tmp_path), scenario)
