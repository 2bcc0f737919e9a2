"""A store with a GPU tier, on a driver and in memory that stand for a GPU, for the tests of it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import stepwell
from stepwell import building
from stepwell.native import AsyncEngine, Done, Job, Op
from stepwell.runtime import Runtime
from stepwell.tiers.gpu import GpuTier
from tests.fakecuda import FakeCuda
from tests.gpus import stand_in
from tests.state.standing import Standing

GPU = '[[tier]]\nname = "gpu"\ndriver = "gpu"\ncapacity = "{}"\n'
HOST = '[[tier]]\nname = "host"\ndriver = "host"\ncapacity = "{}"\n'
NVME = '[[tier]]\nname = "nvme"\ndriver = "file"\npath = "{}"\nflush = {}\n'
MIB = 1 << 20


class Bench:
    """Tensors on a GPU that are set to one value each by what is enqueued on the training stream, and values beside."""

    def __init__(self, driver: FakeCuda, on: Standing, stream: int, seed: int = 1) -> None:
        self.driver, self.on, self.stream = driver, on, stream
        self.choose = random.Random(seed)
        self.tensors: list[torch.Tensor] = []
        self.values: list[int] = []
        self.epoch = 0

    def add(self, count: int, gpu: int = 0, sizes: Sequence[int] = (4096, 5000, 9000, 100_000, 3_000_000)) -> None:
        # none under 4 KiB: torch puts those aside, and here it does so at once, not in the order of the stream
        made = [self.on.put(torch.zeros(self.choose.choice(sizes), dtype=torch.uint8), gpu) for _ in range(count)]
        self.tensors += made
        self.values += [0] * count

    def update(self) -> None:
        """Enqueued, like an optimizer's kernels: it may run much later."""
        for at, tensor in enumerate(self.tensors):
            value = self.values[at] = self.choose.randrange(256)
            self.driver.write(self.stream, tensor.data_ptr(), value, tensor.nbytes)
        self.epoch += 1

    def state(self, *, cpu: bool = True) -> dict[str, Any]:
        model = {f"t{at}": tensor for at, tensor in enumerate(self.tensors)}
        if not cpu:
            return {"model": model}
        return {"model": model, "cpu": {"ema": torch.full((70_000,), self.epoch, dtype=torch.int32)}}

    @property
    def gpu_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def expected(self) -> tuple[int, list[int]]:
        return self.epoch, list(self.values)

    def check(
        self, store: stepwell.CheckpointStore, step: int, expected: tuple[int, list[int]], *, cpu: bool = True
    ) -> dict[str, int]:
        """Restores a step into other tensors; returns where each byte came from."""
        blank = self.state(cpu=cpu)
        blank["model"] = {name: self.on.put(torch.full_like(t, 77), 0) for name, t in blank["model"].items()}
        if cpu:
            blank["cpu"]["ema"].fill_(-1)
        found = store.restore(blank, step=step)
        assert found is not None
        epoch, values = expected
        for at, value in enumerate(values):
            assert bool((blank["model"][f"t{at}"] == value).all()), f"step {step}, tensor {at} is not all {value}"
        assert not cpu or bool((blank["cpu"]["ema"] == epoch).all())
        return dict(found.sources)


def opened(
    folder: Path, gpu: str = "640MiB", host: str | None = "96MiB", flush: str = "'all'"
) -> stepwell.CheckpointStore:
    """host: None for no host tier."""
    (folder / "nvme").mkdir(exist_ok=True)
    config = folder / "config.toml"
    memory = "" if host is None else HOST.format(host)
    config.write_text(GPU.format(gpu) + memory + NVME.format(folder / "nvme", flush))
    return stepwell.open(config, run="run")


def ops(patch: pytest.MonkeyPatch) -> Counter[Op]:
    """What is submitted to engines from now on."""
    found, start = Counter[Op](), AsyncEngine.start

    def counted(self: AsyncEngine, jobs: Sequence[Job]) -> list[asyncio.Future[Done]]:
        found.update(job.op for job in jobs)
        return start(self, jobs)

    patch.setattr(AsyncEngine, "start", counted)
    return found


@contextmanager
def benches(driver: FakeCuda, patch: pytest.MonkeyPatch, *, kernels: bool = True) -> Iterator[Bench]:
    """GPU tiers that are opened meanwhile have chunks of 1 MiB."""
    patch.setattr(building, "GpuTier", partial(GpuTier, chunk_bytes=MIB))
    with stand_in(driver, patch, kernels=kernels) as (on, stream):
        yield Bench(driver, on, stream)


class Bus:
    """The way from a GPU to host memory (or "up"), once the GPU is in use: nothing crosses until `go`."""

    def __init__(self, patch: pytest.MonkeyPatch, way: str = "down") -> None:
        engine: AsyncEngine = getattr(Runtime.get().gpus.get(0), way)
        self._start = engine.start
        self.held: list[tuple[Sequence[Job], list[asyncio.Future[Done]]]] = []
        self._open = False
        patch.setattr(engine, "start", self._hold)

    def _hold(self, jobs: Sequence[Job]) -> list[asyncio.Future[Done]]:
        if self._open:
            return self._start(jobs)
        promised = [asyncio.get_running_loop().create_future() for _ in jobs]
        self.held.append((jobs, promised))
        return promised

    def __enter__(self) -> Bus:
        return self

    def __exit__(self, *error: object) -> None:
        self.go()

    def go(self) -> None:
        """Idempotent."""

        async def all_go() -> None:
            held, self.held, self._open = self.held, [], True
            for jobs, promised in held:
                for copying, future in zip(self._start(jobs), promised, strict=True):
                    copying.add_done_callback(partial(_pass_on, future))

        Runtime.get().run(all_go())


def _pass_on(future: asyncio.Future[Done], done: asyncio.Future[Done]) -> None:
    future.set_result(done.result())
