"""Files in memory, mapped by several: made ready, given back, never a SIGBUS, and not for forked children."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepwell.native import Mapping, allocate, give_back, memory_kind
from tests.mounts import tmpfs

MIB = 1 << 20


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    """An empty file of a tmpfs of 4 MiB."""
    with tmpfs(tmp_path / "small", 4) as place:
        made = os.open(place / "file", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        yield made
        os.close(made)


def test_what_one_writes_the_other_reads(fd: int) -> None:
    with Mapping(fd, 0, 64 * MIB) as mine, Mapping(fd, 0, 64 * MIB, writable=False) as theirs:
        mine.populate(MIB, MIB)
        assert os.fstat(fd).st_size == 2 * MIB and os.fstat(fd).st_blocks * 512 == MIB
        mine.view(MIB, 5)[:] = b"hello"
        theirs.enter(MIB, MIB)
        assert bytes(theirs.view(MIB, 6)) == b"hello\0"
        with Mapping(fd, MIB, MIB) as part:
            assert bytes(part.view(0, 5)) == b"hello"


def test_memory_made_ready_again_is_new(fd: int) -> None:
    with Mapping(fd, 0, MIB) as mapping:
        mapping.populate(0, MIB)
        mapping.view(0, 5)[:] = b"hello"
        mapping.populate(0, MIB)
        assert bytes(mapping.view(0, 5)) == bytes(5)
        give_back(fd, 0, MIB)
        assert os.fstat(fd).st_blocks == 0 and os.fstat(fd).st_size == MIB


def huge_bytes(mapping: Mapping) -> int:
    """Of a mapping, what is in huge pages."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"{mapping.address:x}-"))
    row = next(line for line in lines[start:] if line.startswith("ShmemPmdMapped:"))
    return int(row.split()[1]) << 10


def test_whole_huge_pages_are_made_as_such_where_the_kernel_does_that(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "roomy", 64) as place:
        fd = os.open(place / "file", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        with Mapping(fd, 8 * MIB, 64 * MIB) as mine, Mapping(fd, 9 * MIB, 8 * MIB, writable=False) as theirs:
            mine.populate(2 * MIB, 8 * MIB)
            assert os.fstat(fd).st_size == 18 * MIB and os.fstat(fd).st_blocks * 512 == 8 * MIB
            assert bytes(mine.view(2 * MIB, 8 * MIB)) == bytes(8 * MIB)
            for at in range(2, 10):
                mine.view(at * MIB, 1)[:] = b"x"
            assert bytes(theirs.view(MIB, 2)) == b"x\0"
            mine.populate(4 * MIB, 2 * MIB)
            assert bytes(mine.view(4 * MIB, 1)) == b"\0" and bytes(mine.view(6 * MIB, 1)) == b"x"
            give_back(fd, 10 * MIB, 2 * MIB)
            assert os.fstat(fd).st_blocks * 512 == 6 * MIB and bytes(theirs.view(5 * MIB, 1)) == b"x"
            made = huge_bytes(mine)
        os.close(fd)
    if not made:
        pytest.skip("this kernel makes no huge pages of a tmpfs that was not mounted for them")
    assert made == 6 * MIB


def test_a_full_mount_is_an_error_and_no_signal(fd: int) -> None:
    with Mapping(fd, 0, 64 * MIB) as mapping:
        mapping.populate(0, 2 * MIB)
        with pytest.raises(OSError) as full:
            mapping.populate(2 * MIB, 8 * MIB)
        assert full.value.errno == errno.ENOSPC
        assert os.fstat(fd).st_blocks * 512 == 2 * MIB  # what it got of them went back
        with pytest.raises(OSError) as full:
            allocate(fd, 2 * MIB, 8 * MIB)
        assert full.value.errno == errno.ENOSPC
        with pytest.raises(OSError) as beyond:
            mapping.enter(32 * MIB, MIB)
        assert beyond.value.errno == errno.EFAULT
    with pytest.raises(ValueError, match="closed"):
        mapping.populate(0, MIB)


def test_what_cannot_be_mapped_says_so(fd: int) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        Mapping(-1, 0, MIB)
    with pytest.raises(OSError, match="Invalid argument"):
        Mapping(fd, 1, MIB)


def test_memory_is_told_from_disks(fd: int, tmp_path: Path) -> None:
    assert memory_kind(fd) == ("tmpfs", os.sysconf("SC_PAGESIZE"))
    disk = os.open(tmp_path, os.O_RDONLY)
    assert memory_kind(disk)[0] in ("", "tmpfs")
    os.close(disk)
    with pytest.raises(OSError):
        memory_kind(-1)


FORK = """
import mmap, os, sys
from stepwell.native import Mapping
fd = os.memfd_create("arena")
mapping = Mapping(fd, 0, 1 << 20)
mapping.populate(0, 1 << 20)
def mapped():
    return any("memfd:arena" in line for line in open("/proc/self/maps"))
assert mapped()
if os.fork() == 0:
    assert not mapped()
    other = mmap.mmap(-1, 1 << 20)
    other[:] = b"x" * (1 << 20)
    del mapping  # must not take what may lie there now
    os._exit(other[0] != ord("x"))
_, status = os.wait()
mapping.view(0, 1)[:] = b"y"
sys.exit(status != 0)
"""


def test_a_forked_child_does_not_have_it_and_frees_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
