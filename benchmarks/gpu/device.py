"""The device that is measured: a GPU, or the CPU in its place, so that everything can be tried anywhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import profiler

from stepwell.native import Region


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment in the order of the device's work, not of the caller's."""

    event: torch.cuda.Event | None
    at: float

    def wait(self) -> None:
        """Until the device has come to it."""
        if self.event is not None:
            self.event.synchronize()

    def since(self, earlier: Moment) -> float:
        """Seconds; waits for both."""
        if self.event is None or earlier.event is None:
            return self.at - earlier.at
        self.wait()
        return float(earlier.event.elapsed_time(self.event)) / 1000


class Device:
    """`cuda`, `cuda:1`, `cpu`."""

    def __init__(self, name: str) -> None:
        self.torch = torch.device(name)
        self.is_gpu = self.torch.type == "cuda"
        if self.is_gpu:
            self.torch = torch.device("cuda", self.torch.index or 0)
            torch.cuda.set_device(self.torch)
        self.name = torch.cuda.get_device_name(self.torch) if self.is_gpu else "cpu"

    def moment(self) -> Moment:
        """Now, on the current stream."""
        if not self.is_gpu:
            return Moment(None, time.perf_counter())
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return Moment(event, 0.0)

    def wait(self) -> None:
        """Until all work of this process is done."""
        if self.is_gpu:
            torch.cuda.synchronize(self.torch)

    def seconds_of(self, work: Callable[[], object]) -> float | None:
        """From the begin of the first thing that the GPU does meanwhile to the end of the last one, as its profiler saw
        it: copies and kernels of all streams. None if it saw nothing, as on a CPU."""
        if not self.is_gpu:
            work()
            return None
        with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as profile:
            work()
            self.wait()
        seen = [event.time_range for event in profile.events() if event.device_type.name == "CUDA"]
        return (max(each.end for each in seen) - min(each.start for each in seen)) / 1e6 if seen else None

    def foreign_bytes(self) -> int:
        """Memory of the device in use that torch's allocator does not hold: of contexts, kernels, engines."""
        if not self.is_gpu:
            return 0
        free, total = torch.cuda.mem_get_info(self.torch)
        return int(total - free - torch.cuda.memory_reserved(self.torch))

    def pinning_bytes(self, size_bytes: int) -> int:
        """Memory of the device that pinning so much host memory takes, by the driver alone."""
        if not self.is_gpu:
            return 0
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with Region(size_bytes) as region:
            region.populate(0, size_bytes)
            before = self.foreign_bytes()
            runtime.cudaHostRegister(region.address, size_bytes, 0)
            after = self.foreign_bytes()
            runtime.cudaHostUnregister(region.address)
        return after - before

    def peak_bytes(self) -> int:
        """The most that torch's allocator has had in use since the last call."""
        if not self.is_gpu:
            return 0
        peak = torch.cuda.max_memory_allocated(self.torch)
        torch.cuda.reset_peak_memory_stats(self.torch)
        return int(peak)

    def give_back(self) -> None:
        """Memory that torch's allocator only holds in store."""
        if self.is_gpu:
            torch.cuda.empty_cache()
