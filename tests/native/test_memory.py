"""Regions: memory that is asked for, made ready and given back."""

from __future__ import annotations

import errno
import mmap
import os

import numpy as np
import pytest

from stepwell.native import Region


def resident(address: int, size: int) -> int:
    """Bytes of a range of addresses that have memory, as the kernel says."""
    page = mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        entries = np.frombuffer(os.pread(file.fileno(), size // page * 8, address // page * 8), np.uint64)
    return int(np.count_nonzero(entries >> np.uint64(62))) * page  # in memory or swapped out


def test_memory_is_taken_late_and_given_back() -> None:
    size = 64 << 20
    region = Region(size)
    address = region.address
    assert resident(address, size) == 0
    region.populate(0, size)
    assert resident(address, size) == size
    region.close()
    assert resident(address, size) < size // 4  # others may have taken some of the addresses


def test_populate_keeps_what_is_there() -> None:
    with Region(1 << 20) as region:
        region.view(5000, 5)[:] = b"there"
        region.populate(4096, 100_000)
        region.populate(0, 0)
        assert bytes(region.view(5000, 5)) == b"there"
        assert not any(region.view(10_000))


def test_size_is_rounded_and_aligned_for_huge_pages() -> None:
    with Region(4097) as region:
        assert region.size == 8192
        assert region.address % (2 << 20) == 0


def test_bounds_are_checked() -> None:
    with Region(4096) as region:
        for offset, length in ((0, 4097), (-1, 5), (4096, 1), (0, -1)):
            with pytest.raises(ValueError):
                region.view(offset, length)
            with pytest.raises(ValueError):
                region.populate(offset, length)
    with pytest.raises(ValueError, match="closed"):
        region.view()
    region.close()
    with pytest.raises(ValueError):
        Region(0)


def test_more_than_there_is_is_an_error() -> None:
    with pytest.raises(OSError) as caught:
        Region(1 << 60)
    assert caught.value.errno == errno.ENOMEM
