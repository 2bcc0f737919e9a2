"""Gather and scatter against a plain model of a shard as one bytes object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from stepwell.native import BLOCK_BYTES, Done, Engine, Job, Latch, Op, PieceMap, Region, Ticket, crc32c

Run = Callable[[Engine, list[Job]], list[Done]]
PROPERTY = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@dataclass
class Pieces:
    """Random pieces, some of them holes, in memory of their own; `model` is what the shard should be."""

    sizes: list[int]
    holes: list[bool]
    seed: int

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.offsets = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.uint64)
        self.total = int(self.offsets[-1])
        # one byte more at the front, so that addresses are odd as often as even
        self.arrays = [rng.integers(0, 256, size + 1, dtype=np.uint8)[1:] for size in self.sizes]
        self.map = self.map_of(self.arrays)

    def map_of(self, arrays: list[NDArray[np.uint8]]) -> PieceMap:
        addresses = [0 if hole else array.ctypes.data for array, hole in zip(arrays, self.holes, strict=True)]
        return PieceMap(self.offsets, np.array(addresses, np.uint64), arrays)

    def shard(self, background: bytes) -> bytes:
        """The shard's bytes: pieces over `background`, which shows through the holes."""
        shard = bytearray(background[: self.total])
        for array, hole, at in zip(self.arrays, self.holes, self.offsets[:-1].astype(int).tolist(), strict=True):
            if not hole:
                shard[at : at + array.size] = array.tobytes()
        return bytes(shard)


sizes = st.one_of(
    st.integers(0, 300), st.sampled_from([4095, 4096, 8191, 8192, 16384, 20_000]), st.integers(0, 1_200_000)
)
pieces = st.lists(st.tuples(sizes, st.integers(0, 4).map(lambda n: n == 0)), min_size=1, max_size=12).flatmap(
    lambda items: st.builds(Pieces, st.just([s for s, _ in items]), st.just([h for _, h in items]), st.integers(0, 99))
)


def blocks(length: int) -> int:
    return -(-length // BLOCK_BYTES)


@given(pieces=pieces, data=st.data())
@PROPERTY
def test_round_trip(copier: Engine, run: Run, pieces: Pieces, data: st.DataObject) -> None:
    """From a random block on: gather equals the model, checksums and padding too; scatter brings it back."""
    first = data.draw(st.integers(0, pieces.total // BLOCK_BYTES))
    start = first * BLOCK_BYTES
    length = data.draw(st.integers(0, pieces.total - start))
    with Region(length + 4096) as region:
        region.view()[:] = b"\xaa" * region.size
        expected = pieces.shard(b"\xaa" * pieces.total)[start : start + length]
        crcs = np.zeros(blocks(length), np.uint32)
        job = Job(Op.GATHER, address=region.address, length=length, pieces=pieces.map, pieces_offset=start, crcs=crcs)
        assert run(copier, [job])[0].result == length
        assert bytes(region.view(0, length)) == expected
        padded = -(-length // 4096) * 4096
        assert bytes(region.view(length, padded - length)) == bytes(padded - length)
        assert region.view()[padded] == 0xAA
        assert [int(c) for c in crcs] == [
            crc32c(expected[at : at + BLOCK_BYTES]) for at in range(0, length, BLOCK_BYTES)
        ]

        targets = [np.full_like(array, 0x55) for array in pieces.arrays]
        job = Job(
            Op.SCATTER,
            address=region.address,
            length=length,
            pieces=pieces.map_of(targets),
            pieces_offset=start,
            crcs=crcs,
        )
        done = run(copier, [job])[0]
        assert (done.result, done.bad_blocks) == (length, 0)
        for target, array, hole, at in zip(
            targets, pieces.arrays, pieces.holes, pieces.offsets.astype(int).tolist(), strict=False
        ):
            low = min(max(start - at, 0), array.size)
            high = max(min(start + length - at, array.size), low)
            if hole:
                low = high = 0
            assert np.array_equal(target[low:high], array[low:high])
            assert np.all(target[:low] == 0x55) and np.all(target[high:] == 0x55)


@given(pieces=pieces, slot_blocks=st.integers(1, 2), seed=st.integers(0, 99), data=st.data())
@PROPERTY
def test_slots_anywhere_hold_what_one_buffer_would(
    run: Run, pieces: Pieces, slot_blocks: int, seed: int, data: st.DataObject
) -> None:
    """Several threads may share the job. Beside the bytes and the padding of the last one nothing is touched."""
    start = data.draw(st.integers(0, pieces.total // BLOCK_BYTES)) * BLOCK_BYTES
    length = data.draw(st.integers(0, pieces.total - start))
    size = slot_blocks * BLOCK_BYTES
    count = pieces.total // size + 1
    order = np.random.default_rng(seed).permutation(count).astype(np.uint64)
    with Region(count * size) as region, Engine("slots", backend="threads", threads=3) as copier:
        region.view()[:] = b"\xaa" * region.size
        expected = pieces.shard(b"\xaa" * pieces.total)[start : start + length]
        slots = PieceMap(
            np.arange(count + 1, dtype=np.uint64) * np.uint64(size), order * np.uint64(size) + np.uint64(region.address)
        )
        crcs, latch, signal = np.zeros(blocks(length), np.uint32), Latch(1), Ticket()
        job = Job(
            Op.GATHER, slots=slots, length=length, pieces=pieces.map, pieces_offset=start, crcs=crcs, latches=[latch],
            signal=signal, keep=region,
        )  # fmt: skip
        assert run(copier, [job])[0].result == length
        assert (latch.left, signal.state) == (0, "done")
        assert copier.statistics().bytes_gathered == length
        assert [int(c) for c in crcs] == [
            crc32c(expected[at : at + BLOCK_BYTES]) for at in range(0, length, BLOCK_BYTES)
        ]
        shard = b"".join(bytes(region.view(int(place) * size, size)) for place in order)
        assert shard[start : start + length] == expected
        padded = start + -(-length // 4096) * 4096
        assert shard[:start] == b"\xaa" * start and shard[padded:] == b"\xaa" * (len(shard) - padded)
        assert shard[start + length : padded] == bytes(padded - start - length)


def test_slots_that_share_a_checksum_are_refused(copier: Engine) -> None:
    shard = PieceMap(np.array([0, 4 * BLOCK_BYTES]), np.zeros(1, np.uint64))
    slots = PieceMap(np.array([0, 4096, BLOCK_BYTES, 4 * BLOCK_BYTES]), np.zeros(3, np.uint64))
    job = Job(Op.GATHER, slots=slots, length=2 * BLOCK_BYTES, pieces=shard, crcs=np.zeros(2, np.uint32))
    with pytest.raises(ValueError, match="malformed"):
        copier.submit([job])
    assert copier.statistics().jobs_submitted == 0


@given(pieces=pieces, data=st.data())
@PROPERTY
def test_a_flipped_byte_is_found_and_not_scattered(
    copier: Engine, run: Run, pieces: Pieces, data: st.DataObject
) -> None:
    if not pieces.total:
        return
    with Region(pieces.total) as region:
        crcs = np.zeros(blocks(pieces.total), np.uint32)
        run(copier, [Job(Op.GATHER, address=region.address, length=pieces.total, pieces=pieces.map, crcs=crcs)])
        at = data.draw(st.integers(0, pieces.total - 1))
        region.view()[at] ^= 1 << data.draw(st.integers(0, 7))
        bad = at // BLOCK_BYTES
        targets = [np.zeros_like(array) for array in pieces.arrays]
        scatter = Job(Op.SCATTER, address=region.address, length=pieces.total, pieces=pieces.map_of(targets), crcs=crcs)
        verify = Job(Op.SCATTER, address=region.address, length=pieces.total, crcs=crcs)
        for done in run(copier, [scatter, verify]):
            assert done.bad_blocks == 1 << bad
            assert done.result == pieces.total - len(range(pieces.total)[bad * BLOCK_BYTES :][:BLOCK_BYTES])
        for target, array, hole, start in zip(
            targets, pieces.arrays, pieces.holes, pieces.offsets.astype(int).tolist(), strict=False
        ):
            places = np.arange(start, start + array.size) // BLOCK_BYTES
            kept = (places != bad) & (not hole)
            assert np.array_equal(target, np.where(kept, array, 0))


def test_one_map_serves_many_jobs_at_once(make_engine: Callable[..., Engine], run: Run) -> None:
    engine = make_engine("threads", threads=4)
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, 16 << 20, dtype=np.uint8)
    cuts = np.concatenate([[0], np.sort(rng.integers(0, data.size, 3000)), [data.size]]).astype(np.uint64)
    shared = PieceMap(cuts, cuts[:-1] + np.uint64(data.ctypes.data), data)
    with Region(data.size) as region:
        jobs = [
            Job(
                Op.GATHER,
                address=region.address + at,
                length=1 << 20,
                pieces=shared,
                pieces_offset=at,
                crcs=np.zeros(1, np.uint32),
            )
            for at in range(0, data.size, 1 << 20)
        ]
        assert {done.result for done in run(engine, jobs)} == {1 << 20}
        assert bytes(region.view()) == data.tobytes()
    assert engine.statistics().bytes_gathered == data.size


def test_without_checksums_any_offset_goes(copier: Engine, run: Run) -> None:
    data = np.arange(10_000, dtype=np.uint8)
    shard = PieceMap(np.array([0, 10_000]), np.array([data.ctypes.data]), data)
    with Region(4096) as region:
        region.view()[:] = b"\xff" * 4096
        assert (
            run(copier, [Job(Op.GATHER, address=region.address, length=50, pieces=shard, pieces_offset=77)])[0].result
            == 50
        )
        assert bytes(region.view(0, 50)) == data[77:127].tobytes()
        assert region.view()[50] == 0xFF  # no padding without checksums


def test_what_no_piece_covers_is_a_hole(copier: Engine, run: Run) -> None:
    data = np.full(10, 7, np.uint8)
    shard = PieceMap(np.array([5, 15]), np.array([data.ctypes.data]), data)
    with Region(4096) as region:
        assert run(copier, [Job(Op.GATHER, address=region.address, length=20, pieces=shard)])[0].result == 20
        assert bytes(region.view(0, 20)) == bytes(5) + data.tobytes() + bytes(5)


@pytest.mark.parametrize(
    ("offsets", "addresses"), [([0, 5, 4], [1, 1]), ([0, 5], [1, 1]), ([], []), ([[0, 1]], [1])], ids=repr
)
def test_maps_that_do_not_fit_are_refused(offsets: list[int], addresses: list[int]) -> None:
    with pytest.raises(ValueError):
        PieceMap(np.array(offsets, np.uint64), np.array(addresses, np.uint64))


def test_malformed_jobs_are_refused_whole(copier: Engine, region: Region) -> None:
    shard = PieceMap(np.array([0, 10]), np.array([region.address]))
    good = Job(Op.SCATTER, address=region.address, length=1)
    for bad in (
        Job(Op.GATHER, address=region.address, length=10),
        Job(
            Op.GATHER, address=region.address, length=10, pieces=shard, pieces_offset=4096, crcs=np.zeros(1, np.uint32)
        ),
        Job(Op.GATHER, address=region.address, length=BLOCK_BYTES + 1, pieces=shard, crcs=np.zeros(1, np.uint32)),
        Job(Op.GATHER, address=region.address, length=10, pieces=shard, crcs=np.zeros(1, np.uint64)),
        Job(Op.GATHER, address=region.address, length=10, pieces=shard, crcs=np.zeros(4, np.uint32)[::2]),
        Job(Op.SCATTER, address=region.address, length=65 * BLOCK_BYTES, crcs=np.zeros(65, np.uint32)),
        Job(Op.READ, 0, region.address, 0, 10, crcs=np.zeros(1, np.uint32)),
    ):
        with pytest.raises(ValueError):
            copier.submit([good, bad])
    assert copier.statistics().jobs_submitted == 0
