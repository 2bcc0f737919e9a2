"""A device's own memory: taking and giving it back, what is left of it, and jobs of it when things go wrong."""

from __future__ import annotations

import errno
import os
import threading
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from stepwell.native import DeviceEngine, Done, Engine, Job, Latch, Op, PieceMap, Region, device_total_bytes
from tests.fakecuda import ENGINE, GATHER, MOVE, SCATTER, USER, FakeCuda

Run = Callable[[Engine, list[Job]], list[Done]]
Wait = Callable[[Engine, int], list[Done]]
MakeDevice = Callable[..., DeviceEngine]
WAIT_S = 60.0
MIB = 1 << 20
ILLEGAL_ADDRESS = 700
#: two kernels, a copy, a kernel, a copy; or, by the kernel that moves runs, two of that
SIZES = [100] * 300 + [100_000] + [50] * 20 + [70_000]
TAKES = {"kernels": (2, 3), "moves": (0, 2)}
TOTAL = sum(SIZES)
#: every call that an engine makes for such a job, and how often at most
CALLS = {
    "cuEventCreate": 1,
    "cuEventRecord": 1,
    "cuEventQuery": 1,
    "cuStreamWaitEvent": 2,
    "cuMemcpyDtoDAsync_v2": 2,
    "cuLaunchKernel": 3,
}


class Both:
    """A state's pieces, in memory that stands for tensors, and one slot in the device's."""

    def __init__(self, gpu: DeviceEngine, way: str) -> None:
        self.takes = TAKES[way]
        gpu.use_kernels(GATHER, SCATTER, MOVE if way == "moves" else 0)
        self.gpu, self.slot = gpu, gpu.allocate(TOTAL)
        self.state = np.zeros(TOTAL, np.uint8)
        offsets = np.concatenate([[0], np.cumsum(SIZES)]).astype(np.uint64)
        self.pieces = PieceMap(offsets, offsets[:-1] + np.uint64(self.state.ctypes.data), self.state)
        self.slots = PieceMap(np.array([0, TOTAL]), np.array([self.slot], np.uint64))

    def job(self, op: Op, **more: object) -> Job:
        return Job(op, length=TOTAL, pieces=self.pieces, slots=self.slots, **more)  # type: ignore[arg-type]

    def wait_issued(self) -> None:
        """Waits for all that the first job takes; it has not ended then."""
        while (self.gpu.statistics().copies, self.gpu.statistics().kernels) != self.takes:
            assert self.gpu.reap() == []

    def fetched(self, run: Run) -> NDArray[np.uint8]:
        found = np.zeros(TOTAL, np.uint8)
        job = Job(Op.D2H, address=found.ctypes.data, length=TOTAL, pieces=self.slots, keep=found)
        assert run(self.gpu, [job])[0].result == TOTAL
        return found


@pytest.fixture(params=TAKES)
def both(request: pytest.FixtureRequest, gpu: DeviceEngine, fake: FakeCuda) -> Iterator[Both]:
    both = Both(gpu, request.param)
    yield both
    fake.reset()
    gpu.free(both.slot)


@pytest.fixture
def stream(fake: FakeCuda) -> Iterator[int]:
    stream = fake.stream()
    yield stream
    fake.go()
    fake.end_stream(stream)


@pytest.mark.parametrize("op", [Op.PACK, Op.UNPACK])
def test_all_copies_and_kernels_start_after_the_mark(
    both: Both, gpu: DeviceEngine, fake: FakeCuda, stream: int, wait: Wait, run: Run, op: Op
) -> None:
    """The caller's stream is behind; a pack's latch opens all the same, an unpack's once it has ended."""
    fake.hold(USER)
    fake.write(stream, both.state.ctypes.data if op is Op.PACK else both.slot, 7, TOTAL)
    latch = Latch(2)
    gpu.submit([both.job(op, mark=gpu.mark(stream), latches=[latch, latch])])
    both.wait_issued()
    if op is Op.PACK:
        assert latch.wait(WAIT_S)
    assert latch.left == (0 if op is Op.PACK else 2)
    assert gpu.reap() == [] and not both.state.any()
    fake.go()
    assert wait(gpu, 1)[0].result == TOTAL and latch.left == 0
    assert (both.state == 7).all() and (both.fetched(run) == 7).all()


def test_a_release_keeps_a_pack_whole(
    both: Both, gpu: DeviceEngine, fake: FakeCuda, stream: int, wait: Wait, run: Run
) -> None:
    """Training goes on as soon as the copies are issued, and its stream waits for them."""
    both.state[:] = 1
    latch = Latch(1)
    fake.hold(ENGINE)
    gpu.submit([both.job(Op.PACK, latches=[latch])])
    assert latch.wait(WAIT_S) and gpu.release(latch, stream)
    fake.write(stream, both.state.ctypes.data, 2, TOTAL)
    assert fake.pending(stream) == 2 and (both.state == 1).all()
    fake.go()
    fake.finish(stream)
    wait(gpu, 1)
    assert (both.state == 2).all() and (both.fetched(run) == 1).all()


@pytest.mark.parametrize("op", [Op.PACK, Op.UNPACK])
@pytest.mark.parametrize("call", CALLS)
def test_each_call_may_fail_once(both: Both, gpu: DeviceEngine, fake: FakeCuda, run: Run, call: str, op: Op) -> None:
    """The job fails in the driver's words, nothing of it is under way at its end, and the next is none the worse."""
    fake.slow(0.0005)
    times = {"cuMemcpyDtoDAsync_v2": both.takes[0], "cuLaunchKernel": both.takes[1]}.get(call, CALLS[call])
    for nth in range(1, times + 1):
        mark, latch = gpu.mark(0), Latch(1)
        if call == "cuEventCreate":
            marks = [gpu.mark(0) for _ in range(4)]  # none of the pool is left
        fake.fail(call, ILLEGAL_ADDRESS, nth=nth)
        [done] = run(gpu, [both.job(op, latches=[latch], mark=mark)])
        assert done.result == -errno.EIO
        assert latch.wait(0) and fake.count("under_way") == 0
        assert gpu.last_error == f"{call.removesuffix('_v2')}: CUDA_ERROR_ILLEGAL_ADDRESS"
        fake.fail("", 0)
        assert run(gpu, [both.job(Op.PACK)])[0].result == TOTAL
        both.state[:] = nth
        assert run(gpu, [both.job(Op.PACK)])[0].result == TOTAL and (both.fetched(run) == nth).all()
        if call == "cuEventCreate":
            del marks


def test_a_failed_job_ends_after_what_it_has_issued(both: Both, gpu: DeviceEngine, fake: FakeCuda, wait: Wait) -> None:
    """Its slots are given away once it has ended: nothing may still be written to them then."""
    fake.hold()
    fake.fail(["cuLaunchKernel", "cuMemcpyDtoDAsync_v2"][both.takes[0] > 0], ILLEGAL_ADDRESS, nth=2)
    gpu.submit([both.job(Op.PACK)])
    both.wait_issued()
    assert gpu.reap() == [] and gpu.statistics().requests_in_flight == 1
    with pytest.raises(OSError):  # the driver here refuses what a real one waits for
        gpu.free(both.slot)
    fake.go()
    assert wait(gpu, 1)[0].result == -errno.EIO


def test_a_copy_stays_in_one_allocation(gpu: DeviceEngine, fake: FakeCuda, run: Run, region: Region) -> None:
    """The driver refuses a piece that leaves it, and slots in host memory."""
    address, tensor = gpu.allocate(MIB), np.ones(MIB, np.uint8)
    assert gpu.pin(region.address, region.size)
    state = PieceMap(np.array([0, MIB]), np.array([tensor.ctypes.data], np.uint64), tensor)
    results = []
    for slot in (address, address + 4096, region.address, address):
        slots = PieceMap(np.array([0, MIB]), np.array([slot], np.uint64))
        results += [done.result for done in run(gpu, [Job(Op.PACK, length=MIB, pieces=state, slots=slots)])]
    assert results == [MIB, -errno.EIO, -errno.EIO, MIB]
    assert gpu.last_error == "cuMemcpyDtoDAsync: CUDA_ERROR_INVALID_VALUE"
    gpu.unpin(region.address)
    gpu.free(address)


def test_memory_is_taken_and_given_back(gpu: DeviceEngine, fake: FakeCuda) -> None:
    fake.memory(100 * MIB, used=30 * MIB)
    assert gpu.memory() == (70 * MIB, 100 * MIB)
    first, second = gpu.allocate(40 * MIB), gpu.allocate(30 * MIB)
    assert gpu.memory() == (0, 100 * MIB) and first % 256 == second % 256 == 0
    assert gpu.memory_bytes == 0  # that is its own
    with pytest.raises(OSError, match="allocating 1 bytes of device 0: cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY") as caught:
        gpu.allocate(1)
    assert caught.value.errno == errno.ENOMEM
    gpu.free(first)
    assert gpu.memory() == (40 * MIB, 100 * MIB)
    third = gpu.allocate(40 * MIB)
    for address in (second, third):
        gpu.free(address)
    with pytest.raises(OSError, match="freeing memory of device 0: no memory was allocated there"):
        gpu.free(third)
    with pytest.raises(ValueError, match="at least one byte"):
        gpu.allocate(0)
    assert gpu.memory() == (70 * MIB, 100 * MIB)


def test_jobs_do_not_feel_that_memory_ran_out(both: Both, gpu: DeviceEngine, fake: FakeCuda, run: Run) -> None:
    both.state[:] = 3
    fake.memory(MIB)
    with pytest.raises(OSError, match="OUT_OF_MEMORY"):
        gpu.allocate(2 * MIB)
    assert run(gpu, [both.job(Op.PACK)])[0].result == TOTAL and (both.fetched(run) == 3).all()
    both.state[:] = 0
    assert run(gpu, [both.job(Op.UNPACK)])[0].result == TOTAL and (both.state == 3).all()


def test_threads_take_memory_at_once(gpu: DeviceEngine, fake: FakeCuda) -> None:
    """While others take it, look at it, and run out of it."""
    fake.memory(64 * MIB)
    start, taken, refused = threading.Barrier(8), list[int](), list[int]()

    def take() -> None:
        start.wait(WAIT_S)
        for _ in range(4):
            try:
                taken.append(gpu.allocate(4 * MIB))
            except OSError as error:
                assert error.errno == errno.ENOMEM
                refused.append(gpu.memory()[0])

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(set(taken)) == 16 and len(refused) == 16 and set(refused) == {0}
    for address in taken:
        gpu.free(address)


def test_all_of_a_device_is_known_without_using_it(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = fake.count("contexts")
    assert device_total_bytes(0, fake.path) == 64 << 30
    monkeypatch.setenv("FAKECUDA_TOTAL_BYTES", str(3 * MIB))
    assert device_total_bytes(1, fake.path) == 3 * MIB
    fake.memory(100 * MIB, used=30 * MIB)
    assert device_total_bytes(1, library=fake.path) == 100 * MIB
    assert fake.count("contexts") == contexts
    for index, library, said in (
        (7, fake.path, "memory of device 7: cuDeviceGet: CUDA_ERROR_INVALID_DEVICE"),
        (0, "libnothing.so.7", r"no NVIDIA driver: .*libnothing\.so\.7"),
    ):
        with pytest.raises(OSError, match=said) as caught:
            device_total_bytes(index, library)
        assert caught.value.errno == errno.ENODEV
    fake.fail("cuDeviceTotalMem_v2", 4)
    with pytest.raises(OSError, match="cuDeviceTotalMem: CUDA_ERROR_DEINITIALIZED"):
        device_total_bytes(0, fake.path)


def test_memory_of_closed_and_of_forked_engines(gpu: DeviceEngine, make_device: MakeDevice) -> None:
    address = gpu.allocate(MIB)
    calls: list[Callable[[], object]] = [lambda: gpu.allocate(1), lambda: gpu.free(address), gpu.memory]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is what is tested
        child = os.fork()
    if not child:
        refused = 0
        for call in calls:
            try:
                call()
            except RuntimeError as error:
                refused += "forked" in str(error)
        os._exit(0 if refused == 3 else 1)
    assert os.waitpid(child, 0)[1] == 0
    gpu.close()
    for call in calls:
        with pytest.raises(RuntimeError, match="closed"):
            call()
    make_device().free(address)  # of the same device
