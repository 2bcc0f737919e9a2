"""Training that changes every tensor in place, and states compared byte for byte: for tests of guards."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stepwell
from stepwell.native import Latch
from stepwell.tiers.base import Tier
from stepwell.tiers.file import FileTier
from stepwell.tiers.wrap import Fault, Faulty, Throttled
from tests.store.helpers import ALWAYS, host, release

OptimizerOf = Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]


class Net(torch.nn.Module):
    """Large and small weights, a tied one, and statistics that the forward changes."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(600, width)
        self.norm = torch.nn.BatchNorm1d(width * 4)
        self.up = torch.nn.Linear(width, width * 4)
        self.head = torch.nn.Linear(width, 600, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.up(self.embed(ids)))
        return found


class Training:
    """One or two optimizers, and beside them what no guard covers."""

    def __init__(self, make: OptimizerOf, seed: int = 0, *, two: bool = False) -> None:
        self.random = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        self.net = Net()
        parameters = list(self.net.parameters())
        cut = len(parameters) // 2 if two else len(parameters)
        self.optimizers = [make(parameters[:cut])] + ([make(parameters[cut:])] if two else [])
        self.ema = [p.detach().clone() for p in parameters]  # the largest is larger than what is put aside
        self.counts, self.seen = np.arange(3000.0), np.zeros(400_000)
        self.step = 0

    @property
    def state(self) -> dict[str, Any]:
        optimizers = {f"optimizer{i}": each for i, each in enumerate(self.optimizers)}
        ema = {f"{i}": each for i, each in enumerate(self.ema)}
        beside = {"counts": self.counts, "seen": self.seen, "step": self.step}
        return {"model": self.net, **optimizers, "ema": ema, "beside": beside}

    def forward(self) -> None:
        """Changes statistics, and all that no guard covers."""
        self.step += 1
        with torch.no_grad():
            self.net(torch.randint(600, (8,), generator=self.random))
        for mine in self.ema:
            mine.add_(self.step)
        self.counts += 1
        self.seen += 1

    def update(self, which: int = 0) -> None:
        optimizer = self.optimizers[which]
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.randn(p.shape, generator=self.random)
        optimizer.step()

    def train(self) -> None:
        """One step."""
        self.forward()
        for which in range(len(self.optimizers)):
            self.update(which)


def frozen(state: Any) -> Any:
    """A copy of all that is in a state, as plain data."""
    if hasattr(state, "state_dict"):
        return frozen(state.state_dict())
    if isinstance(state, Mapping):
        return {key: frozen(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [frozen(value) for value in state]
    if isinstance(state, torch.Tensor):
        return (state.dtype, tuple(state.shape), state.detach().contiguous().reshape(-1).view(torch.uint8).clone())
    return state.copy() if isinstance(state, np.ndarray) else state


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Where two frozen states are not alike, bit for bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return [f"{path}: {sorted(map(str, one.keys() ^ other.keys()))}"]
        return [found for key in one for found in differences(one[key], other[key], f"{path}.{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [
            found for i, pair in enumerate(zip(one, other, strict=True)) for found in differences(*pair, f"{path}[{i}]")
        ]
    if isinstance(one, tuple):
        alike = one[:2] == other[:2] and torch.equal(one[2], other[2])
    else:
        alike = np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other
    return [] if alike else [path]


class Stuck:
    """A disk that stands still from its first write on, under host memory that is smaller than the state: what save()
    does not wait for is not copied before `go`, which comes as soon as an update waits."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, mebibytes: int = 4) -> None:
        (path / "disk").mkdir()
        self.disk = Faulty(FileTier(path / "disk", name="disk"), [Fault("write", 1, "stall", times=ALWAYS)])
        self.tiers: list[Tier] = [host(mebibytes), self.disk]
        self.waits = 0  # how often somebody found copies missing
        self.goes = True  # once somebody waits
        wait = Latch.wait

        def waited(latch: Latch, timeout: float | None = None) -> bool:
            if latch.left:
                self.waits += 1
                if self.goes:
                    self.go()
            return wait(latch, timeout)

        monkeypatch.setattr(Latch, "wait", waited)

    def go(self) -> None:
        self.disk.plan = []
        release(self.disk)


def opened(tiers: Sequence[Tier], **settings: Any) -> stepwell.CheckpointStore:
    return stepwell.open(run="run", tiers=tiers, **settings)


def slow_disk(path: Path, bytes_per_s: float) -> Tier:
    (path / "disk").mkdir()
    return Throttled(FileTier(path / "disk", name="disk"), bytes_per_s, time.monotonic, asyncio.sleep)


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread
