"""Every version of crc32c against published values and against the portable one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.native import Engine, Job, Op, PieceMap, Region, crc32c, crc32c_combine, features, force_crc32c

VERSIONS = features()["crc32c_versions"].split(", ")
NOISE = np.random.default_rng(3).integers(0, 256, 200_000, dtype=np.uint8)

#: RFC 3720, B.4, and the check value of the catalogue of CRCs
VECTORS = [
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
    (b"123456789", 0xE3069283),
    (b"", 0),
]


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> Iterator[str]:
    force_crc32c(request.param)
    yield request.param
    force_crc32c(None)


def test_published_values(version: str) -> None:
    assert features()["crc32c"] == version
    for data, expected in VECTORS:
        assert crc32c(data) == expected


def portable(data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> int:
    force_crc32c("portable")
    try:
        return crc32c(data)
    finally:
        force_crc32c(None)


# lengths around each loop's border: a word, 64 and 256 bytes, three streams short and long
edges = st.sampled_from([0, 7, 8, 63, 64, 255, 256, 320, 511, 768, 1024, 12288, 16384]).flatmap(
    lambda edge: st.integers(max(0, edge - 2), edge + 2)
)
lengths = edges | st.integers(0, 150_000)


@pytest.mark.parametrize("name", VERSIONS)
@given(start=st.integers(0, 130), length=lengths)
@settings(max_examples=150, deadline=None)
def test_every_version_equals_the_portable_one(name: str, start: int, length: int) -> None:
    data = NOISE[start : start + length]
    expected = portable(data)
    force_crc32c(name)
    try:
        assert crc32c(data) == expected
    finally:
        force_crc32c(None)


@given(split=st.integers(0, 5000), length=st.integers(0, 5000))
@settings(max_examples=100, deadline=None)
def test_pieces_continue_and_combine(split: int, length: int) -> None:
    a, b = NOISE[:split], NOISE[split : split + length]
    whole = crc32c(NOISE[: split + length])
    assert crc32c(b, crc32c(a)) == whole
    assert crc32c_combine(crc32c(a), crc32c(b), length) == whole


def test_combine_over_lengths_beyond_32_bits() -> None:
    """Zeros, by doubling: the checksum of 2^k zero bytes is combined from two halves; associativity then
    checks lengths that nobody could checksum in a test."""
    zeros = {1: crc32c(b"\0")}
    size = 1
    while size < 1 << 40:
        zeros[2 * size] = crc32c_combine(zeros[size], zeros[size], size)
        size *= 2
    assert zeros[1 << 20] == crc32c(bytes(1 << 20))
    assert zeros[1 << 26] == crc32c(bytes(1 << 26))
    a, b, c = crc32c(b"abc"), zeros[1 << 40], zeros[1 << 33]
    left = crc32c_combine(crc32c_combine(a, b, 1 << 40), c, 1 << 33)
    assert left == crc32c_combine(a, crc32c_combine(b, c, 1 << 33), (1 << 40) + (1 << 33))


@pytest.mark.parametrize("name", VERSIONS)
def test_copy_with_checksum_keeps_every_byte(name: str, make_engine: type[Engine]) -> None:
    """The versions that copy while they checksum, at all alignments of source and target."""
    import select

    engine = make_engine("threads")
    force_crc32c(name)
    try:
        with Region(1 << 20) as region:
            for start in (0, 1, 8, 63):
                for shift in (0, 1, 15, 32, 63):
                    size = 100_000 + 7 * shift
                    crcs = np.zeros(1, np.uint32)
                    pieces = PieceMap(np.array([0, size]), np.array([NOISE.ctypes.data + start]), NOISE)
                    engine.submit(
                        [Job(Op.GATHER, address=region.address + shift, length=size, pieces=pieces, crcs=crcs)]
                    )
                    select.select([engine.fileno()], [], [], 10)
                    assert engine.reap()[0].result == size
                    expected = NOISE[start : start + size]
                    assert bytes(region.view(shift, size)) == expected.tobytes()
                    assert int(crcs[0]) == crc32c(expected)
    finally:
        force_crc32c(None)


def test_unknown_version_is_refused() -> None:
    with pytest.raises(ValueError, match="portable"):
        force_crc32c("md5")
