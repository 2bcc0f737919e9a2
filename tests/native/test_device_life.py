"""A device's engine when things go wrong: calls of the driver that fail, forks, closes that hang, the process's end."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from stepwell.native import AsyncEngine, DeviceEngine, Done, Engine, Job, Latch, Op, PieceMap, Region, Ticket
from tests.fakecuda import GATHER, SCATTER, FakeCuda
from tests.resources import comes_back_to, describe_files, in_use

Run = Callable[[Engine, list[Job]], list[Done]]
Wait = Callable[[Engine, int], list[Done]]
MakeDevice = Callable[..., DeviceEngine]
WAIT_S = 60.0
ROOT = Path(__file__).resolve().parents[2]
ILLEGAL_ADDRESS = 700
SIZES = [100] * 300 + [100_000] + [50] * 20  # two kernels, a stage, a copy, a kernel and another stage
TOTAL = sum(SIZES)

#: every call that an engine makes for jobs, and how often a job of these sizes makes it at most
CALLS = {
    "cuEventCreate": 6,
    "cuEventRecord": 6,
    "cuEventQuery": 1,
    "cuStreamWaitEvent": 5,
    "cuMemAlloc_v2": 2,
    "cuMemcpyDtoHAsync_v2": 3,
    "cuMemcpyHtoDAsync_v2": 3,
    "cuLaunchKernel": 3,
}


class Memory:
    """Pieces in "device" memory, and a pinned slot."""

    def __init__(self, gpu: DeviceEngine) -> None:
        self.region = Region(1 << 20)
        self.data = np.random.default_rng(0).integers(1, 256, TOTAL, dtype=np.uint8)
        self.device = np.zeros(TOTAL, np.uint8)
        offsets = np.concatenate([[0], np.cumsum(SIZES)]).astype(np.uint64)
        self.map = PieceMap(offsets, offsets[:-1] + np.uint64(self.device.ctypes.data), self.device)
        assert gpu.pin(self.region.address, self.region.size)

    def job(self, op: Op, latch: Latch | None = None) -> Job:
        """A job for which the other side holds zeros."""
        self.device[:] = self.data if op is Op.D2H else 0
        self.region.view(0, TOTAL)[:] = bytes(TOTAL) if op is Op.D2H else self.data.tobytes()
        return Job(op, address=self.region.address, length=TOTAL, pieces=self.map, latches=[latch] if latch else ())

    def good(self) -> bool:
        return bytes(self.region.view(0, TOTAL)) == self.data.tobytes() == self.device.tobytes()


@pytest.fixture
def memory(gpu: DeviceEngine, fake: FakeCuda) -> Iterator[Memory]:
    memory = Memory(gpu)
    yield memory
    fake.reset()
    last = DeviceEngine("last", 0, library=fake.path)  # the other one may be closed
    last.unpin(memory.region.address)
    last.close()
    memory.region.close()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("op", [Op.D2H, Op.H2D])
def test_each_call_may_fail_once(
    gpu: DeviceEngine, memory: Memory, fake: FakeCuda, run: Run, call: str, op: Op
) -> None:
    """The job fails or has done all, nothing of it is under way at its end, and the next is none the worse for it."""
    failed = 0
    fake.slow(0.0005)
    for nth in range(1, CALLS[call] + 1):
        fake.fail(call, ILLEGAL_ADDRESS, nth=nth)
        latch = Latch(1)
        [done] = run(gpu, [memory.job(op, latch)])
        assert latch.wait(0) and fake.count("under_way") == 0
        if done.result == TOTAL:
            assert memory.good()
        else:
            assert done.result == -errno.EIO
            assert gpu.last_error == f"{call.removesuffix('_v2')}: CUDA_ERROR_ILLEGAL_ADDRESS"
            failed += 1
        fake.fail("", 0)
        assert run(gpu, [memory.job(op)])[0].result == TOTAL and memory.good()
    other_way = {Op.D2H: "cuMemcpyHtoDAsync_v2", Op.H2D: "cuMemcpyDtoHAsync_v2"}[op]
    assert failed or call in ("cuMemAlloc_v2", other_way)  # without memory each piece goes alone


def test_without_device_memory_each_piece_goes_alone(
    gpu: DeviceEngine, memory: Memory, fake: FakeCuda, run: Run
) -> None:
    fake.fail("cuMemAlloc_v2", 2, times=-1)
    assert run(gpu, [memory.job(Op.D2H)])[0].result == TOTAL and memory.good()
    assert (gpu.statistics().copies, gpu.statistics().kernels, gpu.memory_bytes) == (len(SIZES), 0, 0)
    fake.fail("cuMemAlloc_v2", 2, nth=2, times=-1)  # one stage is there, and serves
    assert run(gpu, [memory.job(Op.H2D)])[0].result == TOTAL and memory.good()
    assert gpu.statistics().kernels == 3 and gpu.memory_bytes == 4 << 20


def test_a_failed_job_ends_after_what_it_has_issued(
    gpu: DeviceEngine, memory: Memory, fake: FakeCuda, wait: Wait
) -> None:
    """Its slot is used again once it has ended, and its tensors are freed: nothing may still be copied then."""
    for op, call in [(Op.D2H, "cuMemcpyDtoHAsync_v2"), (Op.H2D, "cuMemcpyHtoDAsync_v2")]:
        fake.hold()
        fake.fail(call, ILLEGAL_ADDRESS, nth=3)
        before = gpu.statistics().copies
        gpu.submit([memory.job(op)])
        while gpu.statistics().copies < before + 3:
            assert gpu.reap() == []
        assert gpu.reap() == [] and gpu.statistics().requests_in_flight == 1
        fake.go()
        assert wait(gpu, 1)[0].result == -errno.EIO
        fake.fail("", 0)


def test_a_broken_device_fails_all_and_hangs_nothing(
    gpu: DeviceEngine, memory: Memory, fake: FakeCuda, run: Run
) -> None:
    fake.fail("*", ILLEGAL_ADDRESS, times=-1)
    latch, signal = Latch(6), Ticket()
    jobs = [memory.job(op, latch) for op in (Op.D2H, Op.H2D) * 3]
    jobs[-1].signal = signal
    assert {done.result for done in run(gpu, jobs)} == {-errno.EIO}
    assert latch.wait(0) and signal.state == "failed"
    with pytest.raises(OSError, match="ILLEGAL_ADDRESS"):
        gpu.mark(0)
    assert not gpu.pin(memory.region.address, 4096) and "ILLEGAL_ADDRESS" in gpu.pin_refusal
    fake.fail("", 0)


@pytest.mark.parametrize(
    ("call", "nth"),
    [
        ("cuInit", 1),
        ("cuDeviceGet", 1),
        ("cuDevicePrimaryCtxRetain", 1),
        ("cuCtxPushCurrent_v2", 1),
        ("cuThreadExchangeStreamCaptureMode", 1),
        ("cuStreamCreate", 1),
        ("cuStreamCreate", 2),
    ],
)
def test_an_engine_that_cannot_start_says_why_and_leaves_nothing(fake: FakeCuda, call: str, nth: int) -> None:
    before = in_use()
    fake.fail(call, 2, nth=nth)
    with pytest.raises(OSError, match=f"{call.removesuffix('_v2')}: CUDA_ERROR_OUT_OF_MEMORY") as caught:
        DeviceEngine("no", 0, library=fake.path)
    assert caught.value.errno == errno.ENOMEM
    assert comes_back_to(before), describe_files()


def test_closing_cancels_what_waits_and_finishes_what_runs(gpu: DeviceEngine, memory: Memory, fake: FakeCuda) -> None:
    latch, runs, never = Latch(2), Latch(1), Ticket()
    waiting, running = memory.job(Op.D2H, latch), memory.job(Op.D2H)
    waiting.after, running.latches = never, (latch, runs)
    fake.slow(0.01)
    gpu.submit([waiting, running])
    assert runs.wait(WAIT_S) and latch.left == 1
    assert gpu.close(WAIT_S)
    assert memory.good() and latch.left == 0
    for call in (lambda: gpu.mark(0), lambda: gpu.release(latch, 0), lambda: gpu.pin(0, 1), lambda: gpu.memory_bytes):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_a_forked_child_is_refused(gpu: DeviceEngine, memory: Memory, run: Run) -> None:
    latch = Latch(1)
    run(gpu, [memory.job(Op.D2H, latch)])
    mark = gpu.mark(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is what is tested
        child = os.fork()
    if not child:
        refused = 0
        for call in (
            lambda: gpu.submit([memory.job(Op.D2H)]),
            lambda: gpu.mark(0),
            lambda: gpu.release(latch, 0),
            lambda: gpu.pin(memory.region.address, 4096),
            lambda: gpu.unpin(memory.region.address),
            lambda: gpu.memory_bytes,
        ):
            try:
                call()
            except RuntimeError as error:
                refused += "forked" in str(error)
        gpu.close()  # leaves the parent's alone
        del mark, latch
        gc.collect()
        os._exit(0 if refused == 6 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert run(gpu, [memory.job(Op.H2D)])[0].result == TOTAL and memory.good()
    assert mark is not None and latch.left == 0


#: argv: the library, JSON of sys.path, then Python for the end: copies are under way, and the device stands still
STANDS_STILL = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
import numpy as np
from stepwell.native import DeviceEngine, Job, Latch, Op, PieceMap, Region
from tests.fakecuda import FakeCuda
fake = FakeCuda(sys.argv[1])
gpu = DeviceEngine("gpu", 0, library=fake.path, depth=2)
region, data = Region(4096), np.zeros(4096, np.uint8)
gpu.pin(region.address, region.size)
issued, delivered, cancelled, mark = Latch(1), Latch(1), Latch(1), gpu.mark(0)
fake.hold()
shard = PieceMap(np.array([0, 4096]), np.array([data.ctypes.data]))
def job(op, latch):
    return Job(op, -1, region.address, 0, 4096, pieces=shard, latches=[latch], mark=mark)
gpu.submit([job(Op.D2H, issued), job(Op.H2D, delivered)])
assert issued.wait(60)
while gpu.statistics().copies < 2:
    pass
kept = sys.getrefcount(shard)
exec(sys.argv[3])
"""


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("fake.off(); print(gpu.close(60))", "True"),
        ("fake.off(); print('left open')", "left open"),
        # the third one was never issued; the memory of the first two stays, because the device may still write to it
        (
            "gpu.submit([job(Op.D2H, cancelled)]); "
            "print(gpu.close(0.02), delivered.wait(60), cancelled.wait(60), sys.getrefcount(shard) == kept)",
            "False True True True",
        ),
    ],
    ids=["closed", "left", "given up"],
)
def test_a_process_ends_although_its_device_stands_still(fake_library: str, ending: str, said: str) -> None:
    """Also with the driver torn down already, as it is when a process ends."""
    path = json.dumps([*sys.path, str(ROOT)])  # for tests.fakecuda
    command = [sys.executable, "-W", "ignore", "-c", STANDS_STILL, fake_library, path, ending]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout.strip()) == (0, said), done.stderr


def test_many_engines_leave_nothing(fake: FakeCuda, run: Run) -> None:
    data = np.zeros(8192, np.uint8)
    offsets = np.arange(0, 8193, 512, dtype=np.uint64)
    shard = PieceMap(offsets, offsets[:-1] + np.uint64(data.ctypes.data), data)
    fake.finish(0)  # the default stream's thread comes with its first use, and stays
    before, owned = in_use(), fake.owned()
    with Region(8192) as region:
        for number in range(100):
            with DeviceEngine(f"g{number}", number % 2, library=fake.path) as engine:
                engine.use_kernels(GATHER, SCATTER)
                latch, mark = Latch(1), engine.mark(0)
                job = Job(Op.D2H, address=region.address, length=8192, pieces=shard, mark=mark, latches=[latch])
                assert run(engine, [job])[0].result == 8192
    del job, latch, mark  # these keep their context, and may be collected after the engine
    assert comes_back_to(before), describe_files()
    assert fake.owned() == owned


def test_under_asyncio(gpu: DeviceEngine, memory: Memory) -> None:
    async def main() -> list[Done]:
        bridge = AsyncEngine(gpu)
        done = await bridge.run([memory.job(Op.D2H), memory.job(Op.D2H)])
        bridge.close()
        return done

    assert [done.result for done in asyncio.run(main())] == [TOTAL, TOTAL] and memory.good()
