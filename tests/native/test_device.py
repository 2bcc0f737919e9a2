"""D2H and H2D against a plain model: every map of pieces, both directions, with kernels and without."""

from __future__ import annotations

import errno
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from stepwell.native import DeviceEngine, Done, Engine, Job, Op, PieceMap, Region, Ticket, crc32c, probe_device
from tests.fakecuda import GATHER, SCATTER, FakeCuda

Run = Callable[[Engine, list[Job]], list[Done]]
MakeDevice = Callable[..., DeviceEngine]
SMALL = 64 << 10  # pieces below cross together
STAGE = 4 << 20
PROPERTY = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

sizes = st.one_of(st.integers(0, 300), st.sampled_from([4096, SMALL - 1, SMALL, SMALL + 1]), st.integers(0, 1_200_000))
#: runs of pieces: how many, how large each, whether they are holes
runs = st.lists(st.tuples(st.integers(1, 300), sizes, st.integers(0, 4).map(lambda n: n == 0)), min_size=1, max_size=6)


class Pieces:
    """Pieces in "device" memory of their own, some of them holes."""

    def __init__(self, items: list[tuple[int, int, bool]], seed: int) -> None:
        rng = np.random.default_rng(seed)
        items = [(count if size < 3000 else 1 + count % 3, size, hole) for count, size, hole in items]
        self.sizes = [size for count, size, _ in items for _ in range(count)]
        self.holes = [hole for count, _, hole in items for _ in range(count)]
        self.offsets = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.uint64)
        self.total = int(self.offsets[-1])
        self.memory = rng.integers(0, 256, self.total + 3 * len(self.sizes) + 1, dtype=np.uint8)
        # apart from each other and in another order than in the shard, so that neighbours do not help
        order = rng.permutation(len(self.sizes))
        self.starts = np.zeros(len(self.sizes), np.int64)
        self.starts[order] = np.concatenate([[0], np.cumsum(np.array(self.sizes)[order] + 3)])[:-1]

    def map_of(self, memory: NDArray[np.uint8]) -> PieceMap:
        addresses = self.starts + memory.ctypes.data
        addresses[np.array(self.holes)] = 0
        return PieceMap(self.offsets, addresses.astype(np.uint64), memory)

    def copy(self, slot: NDArray[np.uint8], memory: NDArray[np.uint8], start: int, length: int, down: bool) -> None:
        """What the engine ought to do: the bytes [start, start + length) of the shard, one piece after the other."""
        for size, hole, at, place in zip(
            self.sizes, self.holes, self.offsets[:-1].tolist(), self.starts.tolist(), strict=True
        ):
            low, high = max(at, start), min(at + size, start + length)
            if hole or low >= high:
                continue
            inside = memory[place + low - at : place + high - at]
            if down:
                slot[low - start : high - start] = inside
            else:
                inside[:] = slot[low - start : high - start]


pieces = st.builds(Pieces, runs, st.integers(0, 99))


@pytest.fixture(params=["kernels", "copies"])
def gpu(request: pytest.FixtureRequest, make_device: MakeDevice) -> DeviceEngine:
    engine = make_device()
    if request.param == "kernels":
        engine.use_kernels(GATHER, SCATTER)
    return engine


@given(pieces=pieces, data=st.data())
@PROPERTY
def test_both_ways_equal_the_model(gpu: DeviceEngine, run: Run, pieces: Pieces, data: st.DataObject) -> None:
    """Also that neither holes nor anything around the job's bytes is touched, on either side."""
    start = data.draw(st.integers(0, pieces.total))
    length = data.draw(st.integers(0, pieces.total - start))
    pinned = data.draw(st.booleans())
    with Region(length + 4096) as region:
        if pinned:
            assert gpu.pin(region.address, region.size)
        slot = np.frombuffer(region.view(), np.uint8)
        slot[:] = np.random.default_rng(5).integers(0, 256, slot.size, dtype=np.uint8)
        expected = slot.copy()
        pieces.copy(expected, pieces.memory, start, length, True)
        whole = pieces.map_of(pieces.memory)
        job = Job(Op.D2H, address=region.address, length=length, pieces=whole, pieces_offset=start)
        assert run(gpu, [job])[0].result == length
        assert np.array_equal(slot, expected)

        slot[:] = np.random.default_rng(6).integers(0, 256, slot.size, dtype=np.uint8)
        after = pieces.memory.copy()
        pieces.copy(slot, after, start, length, False)
        job = Job(Op.H2D, address=region.address, length=length, pieces=whole, pieces_offset=start)
        assert run(gpu, [job])[0].result == length
        assert np.array_equal(pieces.memory, after)
        if pinned:
            gpu.unpin(region.address)
        del slot


def shard_of(sizes: list[int], memory: NDArray[np.uint8]) -> PieceMap:
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.uint64)
    return PieceMap(offsets, offsets[:-1] + np.uint64(memory.ctypes.data), memory)


def test_small_pieces_cross_in_one_copy(gpu: DeviceEngine, run: Run, fake: FakeCuda, region: Region) -> None:
    """240 pieces a kernel; large pieces alone; three small ones between large ones are not worth a kernel."""
    sizes = [1000] * 500 + [SMALL] + [8, 8, 8] + [1 << 20]
    data = np.random.default_rng(0).integers(0, 256, sum(sizes), dtype=np.uint8)
    copies, kernels = fake.count("copies"), fake.count("kernels")
    assert gpu.memory_bytes == 0
    job = Job(Op.D2H, address=region.address, length=data.size, pieces=shard_of(sizes, data))
    assert run(gpu, [job])[0].result == data.size
    assert bytes(region.view(0, data.size)) == data.tobytes()
    counts = gpu.statistics()
    assert (counts.copies, counts.kernels) == (fake.count("copies") - copies, fake.count("kernels") - kernels)
    assert (counts.copies, counts.kernels) in [(1 + 1 + 3 + 1, 3), (505, 0)]
    assert counts.bytes_fetched == data.size and counts.bytes_delivered == 0
    assert gpu.memory_bytes == (STAGE if counts.kernels else 0)


def test_stages_are_used_in_turn(make_device: MakeDevice, run: Run, fake: FakeCuda) -> None:
    """More small pieces than all stages hold, at once: what is filled is never what has not been emptied."""
    gpu = make_device()
    gpu.use_kernels(GATHER, SCATTER)
    fake.slow(0.001)
    size, count, jobs = 60_000, 1200, 8
    data = np.random.default_rng(0).integers(0, 256, size * count, dtype=np.uint8)
    shard = shard_of([size] * count, data)
    length = data.size // jobs
    with Region(data.size) as region:
        assert gpu.pin(region.address, region.size)
        parts = range(0, data.size, length)
        down = [Job(Op.D2H, address=region.address + at, length=length, pieces=shard, pieces_offset=at) for at in parts]
        assert {done.result for done in run(gpu, down)} == {length}
        assert bytes(region.view(0, data.size)) == data.tobytes()
        back = np.zeros_like(data)
        target = shard_of([size] * count, back)
        up = [Job(Op.H2D, address=region.address + at, length=length, pieces=target, pieces_offset=at) for at in parts]
        assert {done.result for done in run(gpu, up)} == {length}
        assert np.array_equal(back, data)
        gpu.unpin(region.address)
    assert gpu.memory_bytes == 3 * STAGE == fake.count("buffers") * STAGE


def test_a_chunk_of_both_memories(
    make_device: MakeDevice, copier: Engine, run: Run, wait: Callable[[Engine, int], list[Done]], region: Region
) -> None:
    """D2H, then GATHER of what lies in host memory, which adds the checksums of all."""
    gpu = make_device()
    rng = np.random.default_rng(2)
    on_gpu, on_host = (rng.integers(0, 256, 100_000, dtype=np.uint8) for _ in range(2))
    cuts = np.array([0, 100_000, 200_000])
    device_map = PieceMap(cuts, np.array([0, on_gpu.ctypes.data], np.uint64), on_gpu)
    host_map = PieceMap(cuts, np.array([on_host.ctypes.data, 0], np.uint64), on_host)
    crcs, fetched = np.zeros(1, np.uint32), Ticket()
    added = Job(Op.GATHER, -1, region.address, 0, 200_000, pieces=host_map, crcs=crcs, after=fetched)
    copier.submit([added])
    job = Job(Op.D2H, address=region.address, length=200_000, pieces=device_map, signal=fetched)
    assert run(gpu, [job])[0].result == 200_000
    assert wait(copier, 1)[0].result == 200_000
    assert bytes(region.view(0, 200_000)) == on_host.tobytes() + on_gpu.tobytes()
    assert int(crcs[0]) == crc32c(region.view(0, 200_000))


def test_pinned_borders_are_not_crossed(make_device: MakeDevice, run: Run, region: Region) -> None:
    """The driver refuses a copy across two registrations; the job fails with its words, and the next goes on."""
    gpu = make_device()
    data = np.ones(1 << 20, np.uint8)
    shard = shard_of([data.size], data)
    assert gpu.pin(region.address, 1 << 20) and gpu.pin(region.address + (1 << 20), 1 << 20)
    good = Job(Op.D2H, address=region.address, length=data.size, pieces=shard)
    bad = Job(Op.D2H, address=region.address + 4096, length=data.size, pieces=shard)
    again = Job(Op.D2H, address=region.address + (1 << 20), length=data.size, pieces=shard)
    assert [done.result for done in run(gpu, [good, bad, again])] == [data.size, -errno.EIO, data.size]
    assert gpu.last_error == "cuMemcpyDtoHAsync: CUDA_ERROR_INVALID_VALUE"
    assert not gpu.pin(region.address + 4096, 4096)
    assert "ALREADY_REGISTERED" in gpu.pin_refusal
    gpu.unpin(region.address)
    gpu.unpin(region.address + (1 << 20))
    with pytest.raises(OSError, match="cuMemHostUnregister: CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"):
        gpu.unpin(region.address)


def test_engines_take_their_own_jobs_only(make_device: MakeDevice, copier: Engine, region: Region) -> None:
    gpu = make_device()
    shard = PieceMap(np.array([0, 10]), np.array([region.address]))
    for op in (Op.READ, Op.SYNC, Op.GATHER, Op.SCATTER):
        with pytest.raises(ValueError, match="kind device"):
            gpu.submit([Job(op, address=region.address, length=10, pieces=shard)])
    for op in (Op.D2H, Op.H2D):
        with pytest.raises(ValueError, match="kind threads"):
            copier.submit([Job(op, address=region.address, length=10, pieces=shard)])
        with pytest.raises(ValueError):
            gpu.submit([Job(op, address=region.address, length=10)])


def test_what_is_not_there_is_told_in_words(fake: FakeCuda) -> None:
    assert probe_device(fake.path) == (True, "CUDA works here")
    works, reason = probe_device("libnothing.so.7")
    assert not works and "libnothing.so.7" in reason
    with pytest.raises(OSError, match=r"libnothing\.so\.7"):
        DeviceEngine("none", 0, library="libnothing.so.7")
    with pytest.raises(OSError, match="libc.so.6 is too old: it has no cuInit"):
        DeviceEngine("none", 0, library="libc.so.6")
    with pytest.raises(OSError, match="CUDA_ERROR_INVALID_DEVICE"):
        DeviceEngine("none", 7, library=fake.path)
    with pytest.raises(ValueError, match="depth"):
        DeviceEngine("none", 0, library=fake.path, depth=5000)
    fake.fail("cuInit", 100)
    assert probe_device(fake.path) == (False, "cuInit: CUDA_ERROR_NO_DEVICE")
