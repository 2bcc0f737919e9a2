"""The engine on a real GPU, through the real driver: what the fake one only claims. Needs torch with CUDA."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from stepwell.native import (
    DeviceEngine,
    Done,
    Engine,
    Job,
    Latch,
    Op,
    PieceMap,
    Region,
    device_total_bytes,
    probe_device,
)
from stepwell.native._kernels import GATHER, SCATTER, SOURCE

Run = Callable[[Engine, list[Job]], list[Done]]
Wait = Callable[[Engine, int], list[Done]]
WAIT_S = 60.0
SLOT = 8 << 20

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def torch() -> Any:
    works, reason = probe_device()
    if not works:
        pytest.skip(reason)
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch was built without CUDA")
    torch.cuda.init()
    return torch


@pytest.fixture(params=["kernels", "copies"])
def gpu(request: pytest.FixtureRequest, torch: Any) -> Iterator[DeviceEngine]:
    with DeviceEngine("gpu", 0) as engine:
        if request.param == "kernels":
            module = pytest.importorskip("cupy").RawModule(code=SOURCE)
            engine.use_kernels(*(module.get_function(name).kernel.ptr for name in (GATHER, SCATTER)))
        yield engine


@pytest.fixture
def slots(gpu: DeviceEngine) -> Iterator[Region]:
    with Region(8 * SLOT) as region:
        region.populate(0, region.size)
        assert gpu.pin(region.address, region.size), gpu.pin_refusal
        yield region
        gpu.unpin(region.address)


def scattered(torch: Any, sizes: NDArray[np.int64], seed: int) -> tuple[Any, NDArray[np.int64]]:
    """GPU memory with pieces of these sizes, in another order than the shard's and a few bytes apart; their starts."""
    order = np.random.default_rng(seed).permutation(sizes.size)
    starts = np.zeros(sizes.size, np.int64)
    starts[order] = np.concatenate([[0], np.cumsum(sizes[order] + order % 19)])[:-1]
    memory = torch.randint(0, 256, (int(sizes.sum()) + 19 * sizes.size,), dtype=torch.uint8, device="cuda")
    return memory, starts


@pytest.mark.parametrize("high", [64, 5000, 100_000, 4 << 20])
def test_both_ways_every_alignment(torch: Any, gpu: DeviceEngine, run: Run, slots: Region, high: int) -> None:
    sizes = np.random.default_rng(high).integers(1, high, min(20_000, 4 * SLOT // high))
    total = int(sizes.sum())
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.uint64)
    memory, starts = scattered(torch, sizes, 1)
    assert total <= slots.size
    shard = PieceMap(offsets, (starts + memory.data_ptr()).astype(np.uint64), memory)

    def jobs(op: Op) -> list[Job]:
        return [
            Job(op, -1, slots.address + at, 0, min(SLOT, total - at), pieces=shard, pieces_offset=at)
            for at in range(0, total, SLOT)
        ]

    torch.cuda.synchronize()
    assert sum(done.result for done in run(gpu, jobs(Op.D2H))) == total
    host, got = memory.cpu().numpy(), np.frombuffer(slots.view(0, total), np.uint8)
    for start, size, at in zip(starts.tolist(), sizes.tolist(), offsets.tolist(), strict=False):
        assert np.array_equal(got[at : at + size], host[start : start + size])
    before = host.copy()
    got ^= 0xFF
    torch.cuda.synchronize()
    assert sum(done.result for done in run(gpu, jobs(Op.H2D))) == total
    host = memory.cpu().numpy()
    for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
        before[start : start + size] ^= 0xFF
    assert np.array_equal(host, before)
    del got


def test_no_snapshot_is_torn(torch: Any, gpu: DeviceEngine, wait: Wait, slots: Region) -> None:
    """Steps that change every tensor, a snapshot after each, and nothing between that waits for the GPU."""
    sizes = [1 << 20, 70_000, *[3000] * 100]
    tensors = [torch.zeros(size, dtype=torch.uint8, device="cuda") for size in sizes]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.uint64)
    shard = PieceMap(offsets, np.array([tensor.data_ptr() for tensor in tensors], np.uint64), tensors)
    total = int(offsets[-1])
    count = slots.size // total
    stream = torch.cuda.current_stream().cuda_stream
    for step in range(1, count + 1):
        for tensor in tensors:
            tensor.fill_(step)
        mark, latch = gpu.mark(stream), Latch(2)
        base = slots.address + (step - 1) * total
        half = total // 2
        gpu.submit(
            [
                Job(Op.D2H, -1, base + at, 0, length, pieces=shard, pieces_offset=at, mark=mark, latches=(latch,))
                for at, length in ((0, half), (half, total - half))
            ]
        )
        assert latch.wait(WAIT_S) and gpu.release(latch, stream)
    for tensor in tensors:
        tensor.fill_(0)
    assert sum(done.result for done in wait(gpu, 2 * count)) == count * total
    for step in range(1, count + 1):
        assert (np.frombuffer(slots.view((step - 1) * total, total), np.uint8) == step).all()


def test_a_copy_waits_for_its_mark(torch: Any, gpu: DeviceEngine, run: Run, slots: Region) -> None:
    tensor = torch.zeros(100_000, dtype=torch.uint8, device="cuda")
    torch.cuda._sleep(50_000_000)
    tensor.fill_(5)
    shard = PieceMap(np.array([0, 100_000]), np.array([tensor.data_ptr()], np.uint64), tensor)
    mark = gpu.mark(torch.cuda.current_stream().cuda_stream)
    job = Job(Op.D2H, address=slots.address, length=100_000, pieces=shard, mark=mark)
    assert run(gpu, [job])[0].result == 100_000
    assert bytes(slots.view(0, 100_000)) == b"\x05" * 100_000


def test_a_capture_is_told(torch: Any, gpu: DeviceEngine) -> None:
    """The graph is none the worse for it."""
    tensor, stream = torch.zeros(10, device="cuda"), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        tensor.add_(1)
        with pytest.raises(OSError, match="captured into a graph"):
            gpu.mark(torch.cuda.current_stream().cuda_stream)
    graph.replay()
    assert tensor.sum().item() == 10


def test_memory_beside_that_of_torch(torch: Any, gpu: DeviceEngine) -> None:
    """It is refused without harm where there is none, and can be had while a graph is captured."""
    total = device_total_bytes(0)
    assert gpu.memory()[1] == total == torch.cuda.mem_get_info(0)[1]
    with pytest.raises(OSError, match="cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY") as caught:
        gpu.allocate(total)
    assert caught.value.errno == errno.ENOMEM
    tensor, stream = torch.ones(SLOT, dtype=torch.uint8, device="cuda"), torch.cuda.Stream()
    torch.cuda.empty_cache()  # as the capture does
    before, graph = gpu.memory()[0], torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        tensor.add_(1)
        address = gpu.allocate(8 * SLOT)
    graph.replay()
    torch.cuda.synchronize()
    held = gpu.memory()[0]
    assert held <= before - 8 * SLOT and address % 256 == 0
    gpu.free(address)
    assert gpu.memory()[0] >= held + 8 * SLOT and (tensor == 2).all().item()
