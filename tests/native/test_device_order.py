"""Marks, latches and releases: a copy sees what came before its mark, and nothing that came after its release."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from stepwell.native import DeviceEngine, Done, Engine, Gathering, Job, Latch, Op, PieceMap, Region, Ticket
from stepwell.native._engine import lib
from stepwell.native._kernels import PIECES_MAX
from tests.fakecuda import ENGINE, GATHER, USER, FakeCuda

Run = Callable[[Engine, list[Job]], list[Done]]
Wait = Callable[[Engine, int], list[Done]]
MakeDevice = Callable[..., DeviceEngine]
WAIT_S = 60.0
SMALL_BYTES: int = lib.SW_SMALL_BYTES
SIZE = 8192  # of the region that a job of these tests fills


@pytest.fixture
def stream(fake: FakeCuda) -> Iterator[int]:
    stream = fake.stream()
    yield stream
    fake.go()
    fake.end_stream(stream)


@pytest.fixture
def pinned(gpu: DeviceEngine, fake: FakeCuda, region: Region) -> Iterator[Region]:
    """Copies to pageable memory come back when they are done: nothing could be held."""
    region.view()[:] = bytes(region.size)
    assert gpu.pin(region.address, region.size)
    yield region
    fake.go()
    gpu.unpin(region.address)


def shard_of(*arrays: NDArray[np.uint8]) -> PieceMap:
    offsets = np.concatenate([[0], np.cumsum([array.size for array in arrays])]).astype(np.uint64)
    return PieceMap(offsets, np.array([array.ctypes.data for array in arrays], np.uint64), arrays)


def test_copies_start_after_their_mark(
    gpu: DeviceEngine, fake: FakeCuda, stream: int, wait: Wait, pinned: Region
) -> None:
    """The caller's stream is behind; the latch opens all the same, because the copies are issued."""
    data = np.zeros(SIZE, np.uint8)
    fake.hold(USER)
    fake.write(stream, data.ctypes.data, 7, SIZE)
    mark, latch = gpu.mark(stream), Latch(2)
    gpu.submit(
        [
            Job(Op.D2H, address=pinned.address, length=SIZE, pieces=shard_of(data), mark=mark, latches=[latch]),
            Job(Op.D2H, address=pinned.address + SIZE, length=SIZE, pieces=shard_of(data), mark=mark, latches=[latch]),
        ]
    )
    assert latch.wait(WAIT_S)
    assert gpu.reap() == [] and bytes(pinned.view(0, 2 * SIZE)) == bytes(2 * SIZE)
    fake.go()
    assert [done.result for done in wait(gpu, 2)] == [SIZE, SIZE]
    assert bytes(pinned.view(0, 2 * SIZE)) == b"\x07" * (2 * SIZE)


@pytest.mark.parametrize("kernel", [GATHER, 0], ids=["kernels", "copies"])
@given(data=st.data())
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_a_mark_gathers_is_gathered_in_the_order_of_its_stream(
    gpu: DeviceEngine, fake: FakeCuda, stream: int, wait: Wait, pinned: Region, kernel: int, data: st.DataObject
) -> None:
    """Whatever the sizes: small pieces by a kernel, some hundred at once, larger ones by a copy each."""
    gpu.use_kernels(kernel, 0)
    small, large = st.integers(0, 40), st.sampled_from([SMALL_BYTES - 1, SMALL_BYTES, SMALL_BYTES + 5])
    repeats = data.draw(st.sampled_from([1, 30, 100]))
    lengths = data.draw(st.lists(small | large, min_size=1, max_size=5)) + data.draw(st.lists(small)) * repeats
    places = np.cumsum([0, *lengths])
    room, aside = np.zeros(places[-1] + 1, np.uint8), np.full(places[-1] + 1, 200, np.uint8)
    order = data.draw(st.permutations(range(len(lengths))))
    addresses = np.array([room.ctypes.data + places[at] for at in order], np.uint64)
    gathering = Gathering(aside.ctypes.data, addresses, np.array([lengths[at] for at in order], np.uint64))
    for value in (3, 9):
        wanted = np.arange(room.size, dtype=np.uint64) * value % 251
        fake.hold(USER)
        room[:] = wanted
        fake.write(stream, room.ctypes.data, value, 1)
        wanted[0] = value
        before = fake.count("kernels")
        mark = gpu.mark(stream, gathering)
        few = sum(length < SMALL_BYTES for length in lengths)
        assert fake.count("kernels") - before == (-(-few // PIECES_MAX) if kernel else 0)
        fake.write(stream, room.ctypes.data, 77, room.size)
        job = Job(Op.D2H, address=pinned.address, length=1, pieces=shard_of(aside[:1]), mark=mark)
        gpu.submit([job])
        fake.go()
        assert [done.result for done in wait(gpu, 1)] == [1]
        expected = np.concatenate([wanted[places[at] : places[at] + lengths[at]] for at in order])
        assert np.array_equal(aside[:-1], expected) and aside[-1] == 200
        fake.finish(stream)


@pytest.mark.parametrize("kernel", [GATHER, 0], ids=["kernels", "copies"])
def test_a_mark_that_cannot_gather_is_none(gpu: DeviceEngine, fake: FakeCuda, stream: int, kernel: int) -> None:
    gpu.use_kernels(kernel, 0)
    data = np.zeros(3 * PIECES_MAX, np.uint8)
    addresses = np.arange(data.ctypes.data + PIECES_MAX, data.ctypes.data + data.size, dtype=np.uint64)
    gathering = Gathering(data.ctypes.data, addresses[::2], np.ones(PIECES_MAX, np.uint64))
    both = Gathering(data.ctypes.data, addresses, np.ones(addresses.size, np.uint64))
    gpu.mark(stream)
    events = fake.owned()
    call = "cuLaunchKernel" if kernel else "cuMemcpyDtoDAsync_v2"
    fake.fail(call, 700, nth=2)
    with pytest.raises(OSError, match=f"marking a stream of device 0: {call.removesuffix('_v2')}"):
        gpu.mark(stream, both)
    assert fake.owned() == events and fake.count("depth") == 0
    assert gpu.mark(stream, gathering) is not None
    fake.finish(stream)  # it uses the memory of this test


@pytest.mark.parametrize("count", [1, 16])
def test_deliveries_start_after_their_mark(
    gpu: DeviceEngine, fake: FakeCuda, stream: int, wait: Wait, pinned: Region, count: int
) -> None:
    """Memory that is given anew may still be read by what was put on the stream before; by copies and by kernels."""
    arrays = [np.zeros(100, np.uint8) for _ in range(count)]
    pinned.view()[:] = b"\x09" * pinned.size
    fake.hold(USER)
    for array in arrays:
        fake.write(stream, array.ctypes.data, 7, 100)
    job = Job(Op.H2D, address=pinned.address, length=100 * count, pieces=shard_of(*arrays), mark=gpu.mark(stream))
    gpu.submit([job])
    while gpu.statistics().copies < 1:
        assert not any(array.any() for array in arrays)
    fake.go()
    assert wait(gpu, 1)[0].result == 100 * count
    assert all((array == 9).all() for array in arrays)
    assert gpu.statistics().kernels == (count > 1)


def test_without_a_release_a_snapshot_is_torn(
    gpu: DeviceEngine, fake: FakeCuda, stream: int, wait: Wait, pinned: Region
) -> None:
    """So that the tests of this file can fail: the driver here really lets a write overtake a copy."""
    data = np.full(SIZE, 1, np.uint8)
    latch = Latch(1)
    fake.hold(ENGINE)
    gpu.submit([Job(Op.D2H, address=pinned.address, length=SIZE, pieces=shard_of(data), latches=[latch])])
    assert latch.wait(WAIT_S)
    fake.write(stream, data.ctypes.data, 2, SIZE)
    fake.finish(stream)
    fake.go()
    wait(gpu, 1)
    assert bytes(pinned.view(0, SIZE)) == b"\x02" * SIZE


def test_a_release_holds_the_stream_not_the_caller(
    gpu: DeviceEngine, fake: FakeCuda, stream: int, wait: Wait, pinned: Region
) -> None:
    data = np.full(SIZE, 1, np.uint8)
    latch = Latch(1)
    fake.hold(ENGINE)
    gpu.submit([Job(Op.D2H, address=pinned.address, length=SIZE, pieces=shard_of(data), latches=[latch])])
    assert latch.wait(WAIT_S)
    assert gpu.release(latch, stream)
    fake.write(stream, data.ctypes.data, 2, SIZE)
    assert fake.pending(stream) == 2 and data[0] == 1
    fake.go()
    fake.finish(stream)
    assert data[0] == 2
    wait(gpu, 1)
    assert bytes(pinned.view(0, SIZE)) == b"\x01" * SIZE


def test_a_release_covers_all_jobs_whoever_opened_the_latch(
    gpu: DeviceEngine, copier: Engine, fake: FakeCuda, stream: int, wait: Wait, pinned: Region
) -> None:
    """Two fetches are issued, then a GATHER ends and brings the latch to zero: the stream waits for both fetches."""
    arrays = [np.full(SIZE, 1, np.uint8) for _ in range(2)]
    latch, begin = Latch(3), Ticket()
    fake.hold(ENGINE)
    for index, array in enumerate(arrays):
        address = pinned.address + index * SIZE
        gpu.submit([Job(Op.D2H, address=address, length=SIZE, pieces=shard_of(array), latches=[latch])])
    host = shard_of(np.full(SIZE, 1, np.uint8))
    gather = Job(Op.GATHER, address=pinned.address + 2 * SIZE, length=SIZE, pieces=host, after=begin, latches=[latch])
    copier.submit([gather])
    while latch.left > 1:
        assert not latch.wait(0)
    begin.fire()
    assert latch.wait(WAIT_S) and gpu.release(latch, stream)
    for array in arrays:
        fake.write(stream, array.ctypes.data, 2, SIZE)
    fake.hold(ENGINE, steps=2)  # the first fetch and its event; the other one still stands
    assert fake.pending(stream) == 3
    fake.go()
    wait(gpu, 2)
    wait(copier, 1)
    fake.finish(stream)  # it writes to these arrays
    assert bytes(pinned.view(0, 3 * SIZE)) == b"\x01" * (3 * SIZE)


def test_each_device_releases_its_own_copies(
    gpu: DeviceEngine, make_device: MakeDevice, fake: FakeCuda, stream: int, wait: Wait, pinned: Region
) -> None:
    other = make_device(1)
    data = np.full(SIZE, 1, np.uint8)
    latch, nothing = Latch(1), Latch(0)
    other.submit([Job(Op.D2H, address=pinned.address, length=SIZE, pieces=shard_of(data), latches=[latch])])
    assert latch.wait(WAIT_S)
    assert not gpu.release(latch, stream) and other.release(latch, stream)
    assert not other.release(nothing, stream)
    wait(other, 1)


@given(
    sizes=st.lists(st.sampled_from([1, 100, 5000, 70_000]), min_size=1, max_size=12),
    cut=st.integers(1, 200_000),
    # of each training step: which streams stand still from there on, and how far the engine's go all the same
    steps=st.lists(
        st.tuples(st.sampled_from([0, ENGINE, USER, ENGINE | USER]), st.integers(0, 10)), min_size=1, max_size=3
    ),
)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_no_snapshot_is_ever_torn(
    gpu: DeviceEngine,
    fake: FakeCuda,
    stream: int,
    wait: Wait,
    pinned: Region,
    sizes: list[int],
    cut: int,
    steps: list[tuple[int, int]],
) -> None:
    """Training steps that change every tensor, with a snapshot after each; streams stand still at any moment."""
    tensors = [np.zeros(size, np.uint8) for size in sizes]
    shard, total = shard_of(*tensors), sum(sizes)
    chunks = [(at, min(cut, total - at)) for at in range(0, total, cut)][:64]
    for step, (kinds, more) in enumerate(steps, 1):
        fake.hold(kinds, steps=more)
        for tensor in tensors:
            fake.write(stream, tensor.ctypes.data, step, tensor.size)
        mark, latch = gpu.mark(stream), Latch(len(chunks))
        base = pinned.address + (step - 1) * total
        gpu.submit(
            [
                Job(
                    Op.D2H,
                    address=base + at,
                    length=length,
                    pieces=shard,
                    pieces_offset=at,
                    mark=mark,
                    latches=(latch,),
                )
                for at, length in chunks
            ]
        )
        assert latch.wait(WAIT_S) and gpu.release(latch, stream)
    for tensor in tensors:
        fake.write(stream, tensor.ctypes.data, 99, tensor.size)
    fake.go()
    assert [done.result for done in wait(gpu, len(steps) * len(chunks))] == [length for _, length in chunks] * len(
        steps
    )
    fake.finish(stream)
    assert all((tensor == 99).all() for tensor in tensors)
    seen = min(total, cut * 64)
    for step in range(1, len(steps) + 1):
        assert bytes(pinned.view((step - 1) * total, seen)) == bytes([step]) * seen


def test_jobs_end_in_order(gpu: DeviceEngine, fake: FakeCuda, wait: Wait, pinned: Region) -> None:
    arrays = [np.full(1000, value % 251, np.uint8) for value in range(600)]  # more than are issued at once
    jobs = [
        Job(Op.D2H, address=pinned.address + 1000 * at, length=1000, pieces=shard_of(array))
        for at, array in enumerate(arrays)
    ]
    fake.hold()
    gpu.submit(jobs)
    while gpu.statistics().requests_in_flight < 512:
        assert gpu.reap() == []
    fake.go()
    assert [done.job for done in wait(gpu, 600)] == jobs
    assert gpu.statistics().requests_in_flight_max == 512
    assert bytes(pinned.view(0, 600_000)) == b"".join(array.tobytes() for array in arrays)


def test_a_captured_stream_is_refused(gpu: DeviceEngine, fake: FakeCuda, stream: int, run: Run, pinned: Region) -> None:
    """What waits for such an event would become part of the graph."""
    data, latch = np.zeros(10, np.uint8), Latch(1)
    run(gpu, [Job(Op.D2H, address=pinned.address, length=10, pieces=shard_of(data), latches=[latch])])
    fake.capture(stream, True)
    for call in (lambda: gpu.mark(stream), lambda: gpu.release(latch, stream)):
        with pytest.raises(OSError, match="captured into a graph") as caught:
            call()
        assert caught.value.errno == errno.EBUSY
    fake.capture(stream, False)
    assert gpu.mark(stream) is not None and gpu.release(latch, stream)


def test_the_default_stream_can_be_marked(gpu: DeviceEngine, fake: FakeCuda, run: Run, pinned: Region) -> None:
    """It is another one in each context: the engine's must be current for that, and not stay so."""
    data = np.zeros(SIZE, np.uint8)
    fake.write(0, data.ctypes.data, 3, SIZE)
    mark, latch = gpu.mark(0), Latch(1)
    job = Job(Op.D2H, address=pinned.address, length=SIZE, pieces=shard_of(data), mark=mark, latches=[latch])
    assert run(gpu, [job])[0].result == SIZE
    assert gpu.release(latch, 0) and fake.count("depth") == 0
    assert bytes(pinned.view(0, SIZE)) == b"\x03" * SIZE
