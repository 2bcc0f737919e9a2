"""What plain copies reach: between pinned host memory and the device, in each direction, and on the device.

Two kinds of pinned memory (allocated by CUDA; registered with it) and pieces of 8 to 64 MiB are tried; the best of
them is the peak of this run, measured anew beside whatever is compared with it.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.gpu.device import Device
from stepwell.native import Region

PIECES_MIB = (8, 16, 64)
BUFFER_BYTES = 512 << 20  # on the host of each kind, and twice on the device
Direction = Literal["d2h", "h2d", "d2d"]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to copy."""

    memory: str
    piece_bytes: int

    def __str__(self) -> str:
        return f"{self.memory}, pieces of {self.piece_bytes >> 20} MiB"


@dataclass(slots=True)
class Plain:
    """Buffers for plain copies. `close` gives them back."""

    device: Device
    sample_bytes: int  # copied in one measurement
    buffer_bytes: int = BUFFER_BYTES
    best: dict[Direction, Way] = field(default_factory=dict)
    pilots: dict[str, float] = field(default_factory=dict)
    _host: dict[str, Tensor] = field(default_factory=dict)
    _gpu: list[Tensor] = field(default_factory=list)
    _region: Region | None = None

    def __post_init__(self) -> None:
        self.buffer_bytes = min(self.buffer_bytes, self.sample_bytes)
        size = self.buffer_bytes
        self._gpu = [torch.ones(size, dtype=torch.uint8, device=self.device.torch) for _ in range(2)]
        if not self.device.is_gpu:
            self._host["plain"] = torch.ones(size, dtype=torch.uint8)
        else:
            self._host["allocated"] = torch.ones(size, dtype=torch.uint8, pin_memory=True)
            self._host["registered"] = self._registered(size)
        for direction in ("d2h", "h2d"):
            self._choose(direction)
        self.best["d2d"] = Way("device", size)

    def _registered(self, size: int) -> Tensor:
        self._region = Region(size)
        self._region.populate(0, size)
        result = _cudart().cudaHostRegister(self._region.address, size, 0)
        if int(result):
            raise RuntimeError(f"cudaHostRegister of {size} bytes: {result}")
        return torch.frombuffer(self._region.view(), dtype=torch.uint8)

    def _choose(self, direction: Direction) -> None:
        speeds: dict[Way, float] = {}
        for memory, mib in itertools.product(self._host, PIECES_MIB):
            way = Way(memory, min(mib << 20, self.buffer_bytes))
            self._run(direction, way)
            speeds[way] = self._run(direction, way)
            self.pilots[f"{direction} {way}"] = round(speeds[way] / 1e9, 2)
        self.best[direction] = max(speeds, key=speeds.__getitem__)

    def rate(self, direction: Direction) -> float:
        """Bytes per second now, by the best way; "d2d" counts each byte once."""
        return self._run(direction, self.best[direction])

    def _run(self, direction: Direction, way: Way) -> float:
        host = self._host.get(way.memory, self._gpu[1])
        source, target = (host, self._gpu[0]) if direction == "h2d" else (self._gpu[0], host)
        pairs = list(zip(torch.split(target, way.piece_bytes), torch.split(source, way.piece_bytes), strict=True))
        rounds = max(1, self.sample_bytes // self.buffer_bytes)
        self.device.wait()
        began = time.perf_counter()
        for _ in range(rounds):
            for to, of in pairs:
                to.copy_(of, non_blocking=True)
        self.device.wait()
        return rounds * self.buffer_bytes / (time.perf_counter() - began)

    def close(self) -> None:
        """The memory goes back; no copy may be asked for any more."""
        self._host.clear()
        self._gpu.clear()
        if self._region is not None:
            _cudart().cudaHostUnregister(self._region.address)
            self._region.close()
            self._region = None
        self.device.give_back()


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
