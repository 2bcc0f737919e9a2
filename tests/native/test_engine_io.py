"""Reads and writes of both back ends against real files, looked at behind the engine's back."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from stepwell.native import Done, Engine, Job, Op, Region

SIZES = [0, 1, 511, 512, 4095, 4096, 4097, (1 << 20) + 1]
OFFSETS = [0, 1, 4097, (1 << 20) - 3]

Run = Callable[[Engine, list[Job]], list[Done]]
OpenFile = Callable[..., int]


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def put(region: Region, data: bytes, offset: int = 0) -> int:
    region.view(offset, len(data))[:] = data
    return region.address + offset


@pytest.mark.parametrize("size", SIZES)
def test_buffered_at_odd_offsets(
    engine: Engine, run: Run, region: Region, open_file: OpenFile, tmp_path: Path, size: int
) -> None:
    for offset in OFFSETS:
        fd = open_file(f"at-{offset}")
        data = noise(size, offset)
        odd = put(region, data, 5)  # memory need not be aligned either
        assert run(engine, [Job(Op.WRITE, fd, odd, offset, size)])[0].result == size
        assert (tmp_path / f"at-{offset}").read_bytes() == (bytes(offset) + data if size else b"")
        back = 4 << 20
        assert run(engine, [Job(Op.READ, fd, region.address + back, offset, size)])[0].result == size
        assert bytes(region.view(back, size)) == data


@pytest.mark.parametrize("size", SIZES)
def test_direct_is_padded_and_truncated(
    engine: Engine, run: Run, region: Region, open_file: OpenFile, tmp_path: Path, size: int
) -> None:
    fd = open_file(direct=True)
    data = noise(size)
    padded = -(-size // 4096) * 4096
    address = put(region, data + bytes(padded - size))
    assert run(engine, [Job(Op.WRITE, fd, address, 0, size, direct=True)])[0].result == size
    assert (tmp_path / "file").stat().st_size == padded
    os.ftruncate(fd, size)
    assert (tmp_path / "file").read_bytes() == data
    back = 4 << 20
    assert run(engine, [Job(Op.READ, fd, region.address + back, 0, size, direct=True)])[0].result == size
    assert bytes(region.view(back, size)) == data


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("most", [4096, 5000, 40_000])
def test_short_transfers_are_continued(
    engine: Engine, run: Run, region: Region, open_file: OpenFile, tmp_path: Path, direct: bool, most: int
) -> None:
    fd = open_file(direct=direct)
    data = noise(1_000_000)
    address = put(region, data + bytes(4096))
    engine.inject_faults(bytes_max=most)
    assert run(engine, [Job(Op.WRITE, fd, address, 0, len(data), direct=direct)])[0].result == len(data)
    os.ftruncate(fd, len(data))
    assert (tmp_path / "file").read_bytes() == data
    region.view(0, len(data))[:] = bytes(len(data))
    assert run(engine, [Job(Op.READ, fd, address, 0, len(data), direct=direct)])[0].result == len(data)
    assert bytes(region.view(0, len(data))) == data
    assert engine.statistics().short_transfers > 20


@pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN])
def test_interrupted_calls_are_repeated(
    engine: Engine, run: Run, region: Region, open_file: OpenFile, tmp_path: Path, number: int
) -> None:
    fd = open_file()
    data = noise(1_000_000)
    address = put(region, data)
    engine.inject_faults(every=2, error=number, bytes_max=10_000)
    done = run(engine, [Job(Op.WRITE, fd, address, 0, len(data))])
    done += run(engine, [Job(Op.SYNC, fd), Job(Op.READ, fd, address + (4 << 20), 0, len(data))])
    assert [d.result for d in done] == [len(data), 0, len(data)]
    assert (tmp_path / "file").read_bytes() == bytes(region.view(4 << 20, len(data))) == data
    counts = engine.statistics()
    assert (counts.retries_eintr if number == errno.EINTR else counts.retries_eagain) > 50


def test_endless_eagain_is_an_error(engine: Engine, run: Run, region: Region, open_file: OpenFile) -> None:
    engine.inject_faults(every=1, error=errno.EAGAIN)
    assert run(engine, [Job(Op.READ, open_file(), region.address, 0, 100)])[0].result == -errno.EAGAIN


def test_first_error_ends_the_job(engine: Engine, run: Run, region: Region, open_file: OpenFile) -> None:
    engine.inject_faults(every=3, error=errno.EIO)
    assert run(engine, [Job(Op.WRITE, open_file(), region.address, 0, 4 << 20)])[0].result == -errno.EIO
    assert engine.statistics().requests_in_flight == 0
    assert engine.statistics().jobs_failed == 1


def test_errors_of_the_system_come_back(engine: Engine, run: Run, region: Region, open_file: OpenFile) -> None:
    jobs = [
        Job(Op.READ, -1, region.address, 0, 4096),
        Job(Op.SYNC, -1),
        Job(Op.FALLOCATE, open_file(), offset=0, length=0),
        Job(Op.WRITE, open_file(), 4096, 0, 4096),  # no memory there
    ]
    assert [done.result for done in run(engine, jobs)] == [-errno.EBADF, -errno.EBADF, -errno.EINVAL, -errno.EFAULT]


@pytest.mark.parametrize("direct", [False, True])
def test_end_of_file_is_a_short_result(
    engine: Engine, run: Run, region: Region, open_file: OpenFile, direct: bool
) -> None:
    fd = open_file(direct=direct)
    os.ftruncate(fd, 700_001)
    lengths = [700_001, 700_002, 4 << 20]
    jobs = [Job(Op.READ, fd, region.address, 0, length, direct=direct) for length in lengths]
    jobs.append(Job(Op.READ, fd, region.address, 1 << 20, 5000, direct=direct))
    assert [run(engine, [job])[0].result for job in jobs] == [700_001, 700_001, 700_001, 0]


def test_fallocate_takes_real_blocks(engine: Engine, run: Run, open_file: OpenFile) -> None:
    fd = open_file()
    result = run(engine, [Job(Op.FALLOCATE, fd, offset=0, length=1 << 20)])[0].result
    if result == -errno.EOPNOTSUPP:
        pytest.skip("this file system cannot; emulating it is what we promise not to do")
    assert result == 0
    assert os.fstat(fd).st_size == 1 << 20
    assert os.fstat(fd).st_blocks * 512 >= 1 << 20


def test_lengths_beyond_32_bits(
    backend: str, make_engine: Callable[..., Engine], run: Run, open_file: OpenFile, tmp_path: Path
) -> None:
    """A sparse file of 5 GiB, read and written across the marks where 31 and 32 bits end."""
    length = (5 << 30) + 5
    marks = {0: b"start", (2 << 30) - 3: b"2 GiB mark", (4 << 30) - 3: b"4 GiB mark", length - 5: b"final"}
    fd = open_file()
    for offset, mark in marks.items():
        assert os.pwrite(fd, mark, offset) == len(mark)
    engine = make_engine(backend, request_bytes=4096)
    with Region(1 << 20) as window:
        for offset, mark in marks.items():
            done = run(engine, [Job(Op.READ, fd, window.address, max(0, offset - 4096), 4096 * 2)])[0]
            assert mark in bytes(window.view(0, done.result))
        for offset in ((2 << 30) - 2, (4 << 30) - 2):
            window.view(0, 4)[:] = b"over"
            assert run(engine, [Job(Op.WRITE, fd, window.address, offset, 4)])[0].result == 4
            assert os.pread(fd, 4, offset) == b"over"


@pytest.mark.slow
def test_one_job_of_more_than_32_bits(
    backend: str, make_engine: Callable[..., Engine], run: Run, open_file: OpenFile
) -> None:
    length = (4 << 30) + (1 << 20) + 5
    fd = open_file()
    os.ftruncate(fd, length)
    for offset in ((2 << 30) - 3, (4 << 30) - 3, length - 6):
        os.pwrite(fd, b"mark!!", offset)
    engine = make_engine(backend, threads=2, depth=8, request_bytes=4 << 20)
    with Region(length) as region:
        assert run(engine, [Job(Op.READ, fd, region.address, 0, length)])[0].result == length
        for offset in ((2 << 30) - 3, (4 << 30) - 3, length - 6):
            assert bytes(region.view(offset, 6)) == b"mark!!"
        assert engine.statistics().bytes_read == length


def test_completions_are_matched_by_job(engine: Engine, run: Run, region: Region, open_file: OpenFile) -> None:
    """Mixed sizes on two files, five hundred at once: each buffer gets its own bytes."""
    rng = random.Random(7)
    files = [open_file("a"), open_file("b")]
    contents = [noise(2 << 20, 1), noise(2 << 20, 2)]
    for fd, content in zip(files, contents, strict=True):
        os.pwrite(fd, content, 0)
    jobs, wanted, at = [], [], 0
    for _ in range(500):
        size = rng.choice([1, 100, 4096, 5000, 70_000])
        which, offset = rng.randrange(2), rng.randrange(1 << 20)
        if at + size > region.size:
            break
        jobs.append(Job(Op.READ, files[which], region.address + at, offset, size))
        wanted.append((at, contents[which][offset : offset + size]))
        at += size
    done = run(engine, jobs)
    assert [d.result for d in done] == [job.length for job in jobs]
    assert all(bytes(region.view(at, len(data))) == data for at, data in wanted)
    assert engine.statistics().requests_in_flight_max <= 4
    assert engine.statistics().jobs_done == len(jobs)


def test_registered_memory_is_used(
    make_engine: Callable[..., Engine], run: Run, region: Region, open_file: OpenFile
) -> None:
    engine = make_engine("auto", request_bytes=64 << 10)
    fd = open_file()
    data = noise(300_000)
    address = put(region, data)
    registered = engine.register(region)
    assert run(engine, [Job(Op.WRITE, fd, address, 0, len(data))])[0].result == len(data)
    counts = engine.statistics()
    assert counts.requests_fixed == (counts.requests if registered else 0)
    assert registered or counts.register_errno
    with Region(1 << 20) as other:  # not registered: goes the plain way beside it
        assert run(engine, [Job(Op.READ, fd, other.address, 0, len(data))])[0].result == len(data)
        assert bytes(other.view(0, len(data))) == data
    assert engine.statistics().requests_fixed == counts.requests_fixed


def test_memory_leaves_the_ring_with_its_region(
    make_engine: Callable[..., Engine], run: Run, open_file: OpenFile
) -> None:
    """A new region at the old address must not reach the old one's pages."""
    engine = make_engine("auto")
    fd = open_file()
    os.pwrite(fd, b"on disk", 0)
    for _ in range(3):
        with Region(1 << 20) as region:
            engine.register(region)
            assert run(engine, [Job(Op.READ, fd, region.address, 0, 7)])[0].result == 7
            assert bytes(region.view(0, 7)) == b"on disk"
