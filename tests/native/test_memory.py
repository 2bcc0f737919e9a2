"""Regions: memory that is asked for, made ready and given back."""

from __future__ import annotations

import errno

import psutil
import pytest

from stepwell.native import Region


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def test_memory_is_taken_late_and_given_back() -> None:
    size = 64 << 20
    before = resident()
    region = Region(size)
    assert resident() - before < size // 4
    region.populate(0, size)
    assert resident() - before > size * 3 // 4
    region.close()
    assert resident() - before < size // 4


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
