"""The hunter of torn snapshots: training changes every tensor at random moments while saves run, and each save must
come back as the state was when it was called.

Several stores save the same tensors in turn, so that some saves are always under way. Tensors lie on a GPU (with
`--gpu`; else in memory that stands for one) and in host memory, and are changed by fused, foreach and plain optimizers
under guards, one of them from a thread of its own, by loops of one's own after `before_update`, and without a word
where nobody guards them. Checkpoints stay in host memory and are restored from there, or, with `--tier 2GiB`, from a
tier in the GPU's memory; one in `--every` goes to the disk, and is restored from there, too. With `--break` updates do
not wait for copies: then there must be torn snapshots.

    python -m tests.campaign.torn --saves 10000 --seed 1 --dir SCRATCH [--gpu] [--break]
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

import stepwell
from stepwell.guarding import Guards
from stepwell.saving import Save
from stepwell.tiers.base import CHUNK_BYTES
from tests.campaign.changing import (
    WRITTEN_BYTES_MIN,
    Announced,
    CudaPlace,
    Free,
    Group,
    HostPlace,
    StandInPlace,
    Stepped,
    sizes,
    wrong_tensors,
)
from tests.campaign.command import command
from tests.fakecuda import FakeCuda, build

#: stores that save the same state in turn
STORES = 3
#: how long a save may take to memory, on a busy machine
PATIENCE_S = 60.0
#: of what is wrong, so many are told
TOLD = 20

GPU_TIER = """
[[tier]]
name = "gpu"
driver = "gpu"
capacity = "{capacity}"
"""

CONFIG = """
[[tier]]
name = "host"
driver = "host"
capacity = "{capacity}"

[[tier]]
name = "disk"
driver = "file"
path = "{path}"
flush = {{ every_steps = {every} }}
retain = {{ last = 2 }}
"""


def groups_of(place: HostPlace, seed: int, largest_bytes: int) -> list[Group]:
    """The tensors; equal seeds give equal ones, also where they lie elsewhere."""
    rng, host = random.Random(seed), HostPlace()

    def some(count: int, part: int, least_bytes: int = 4) -> list[int]:
        """Of one group, whose largest tensor is that part of the largest of all."""
        return [*sizes(rng, count - 1, largest_bytes // part, least_bytes), largest_bytes // part // 4]

    groups: list[Group] = [
        Stepped(place, some(rng.randint(8, 20), 1), seed, as_object=False).begin(),
        Stepped(host, some(rng.randint(3, 6), 8), seed + 1, as_object=True).begin(),
        Announced(place, some(rng.randint(10, 30), 1, WRITTEN_BYTES_MIN), seed + 2),
        Free(place, some(rng.randint(4, 10), 4), seed + 3),
        Free(host, some(rng.randint(2, 5), 8), seed + 4),
    ]
    return groups


@dataclass(frozen=True, slots=True)
class Asked:
    """A save, and what its tensors held."""

    store: stepwell.CheckpointStore
    reader: stepwell.CheckpointStore
    step: int
    save: Save
    values: list[list[float]]


class Hunt:
    """Of one trial."""

    def __init__(
        self,
        place: HostPlace,
        stores: list[stepwell.CheckpointStore],
        readers: list[stepwell.CheckpointStore],
        seed: int,
        largest_bytes: int,
    ) -> None:
        self._rng, self._stores, self._readers = random.Random(seed), stores, readers
        self._groups = groups_of(place, seed, largest_bytes)
        self._blank = groups_of(place, seed, largest_bytes)  # restored into
        for group in self._groups:
            group.guard(stores)
        self._thread = ThreadPoolExecutor(1)
        self._beside: Future[torch.cuda.Stream | None] | None = None
        self._gpu = isinstance(place, CudaPlace)
        self.nbytes = sum(tensor.nbytes for group in self._groups for tensor in group.tensors)
        self.tensors = sum(len(group.tensors) for group in self._groups)
        self.checked = self.wrong = self.from_gpu = self.from_memory = self.from_disk = 0

    def run(self, saves: int) -> None:
        pending: deque[Asked] = deque()
        with self._thread:
            for step in range(1, saves + 1):
                pending.append(self._save(step))
                for _ in range(self._rng.randrange(4)):
                    self._change()
                while len(pending) > self._rng.randrange(len(self._stores)):  # each store's last save is looked at
                    self._check(pending.popleft())
                if step % 1000 == 0:
                    print(f"save {step} of {saves}: {self.wrong} wrong", file=sys.stderr)
            while pending:
                self._check(pending.popleft())
            self._join()

    def _save(self, step: int) -> Asked:
        self._join()
        which = step % len(self._stores)
        store = self._stores[which]
        save = store.save(step, {f"part{at}": group.state for at, group in enumerate(self._groups)})
        return Asked(store, self._readers[which], step, save, [group.values for group in self._groups])

    def _change(self) -> None:
        """Lets one group be changed, the first also by another thread: until that is done it is left alone."""
        group = self._rng.choice(self._groups)
        if group is not self._groups[0]:
            group.change()
        elif self._rng.random() < 0.5:
            self._join()
            group.change()
        elif self._beside is None:
            self._beside = self._thread.submit(self._change_beside, torch.cuda.current_stream() if self._gpu else None)

    def _change_beside(self, after: torch.cuda.Stream | None) -> torch.cuda.Stream | None:
        if after is None:
            self._groups[0].change()
            return None
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(after)
        with torch.cuda.stream(stream):
            self._groups[0].change()
        return stream

    def _join(self) -> None:
        if self._beside is not None:
            stream = self._beside.result()
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)
            self._beside = None

    def _check(self, asked: Asked) -> None:
        try:
            asked.save.wait("host", timeout=PATIENCE_S)
            self._compare(asked, asked.store)
            if not asked.save.held:
                asked.save.wait("disk", timeout=PATIENCE_S)
                self._compare(asked, asked.reader)
        except (stepwell.StepwellError, AssertionError) as error:
            self._note(f"step {asked.step}: {type(error).__name__}: {error}")
        self.checked += 1

    def _compare(self, asked: Asked, store: stepwell.CheckpointStore) -> None:
        found = store.restore({f"part{at}": group.state for at, group in enumerate(self._blank)}, step=asked.step)
        assert found is not None and found.step == asked.step, f"{found} was restored"
        from_disk = store is asked.reader
        assert bool(found.sources.get("disk")) is from_disk, f"it came from {found.sources}"
        self.from_gpu += "gpu" in found.sources
        self.from_disk, self.from_memory = self.from_disk + from_disk, self.from_memory + (not from_disk)
        if torn := wrong_tensors(self._blank, asked.values):
            self._note(f"step {asked.step}: {torn} tensors are not as they were, restored from {found.sources}")

    def _note(self, what: str) -> None:
        self.wrong += 1
        if self.wrong <= TOLD:
            print(f"WRONG: {what}", file=sys.stderr)


@contextlib.contextmanager
def placed(folder: Path, on_gpu: bool) -> Iterator[HostPlace]:
    """A GPU, or what stands for one."""
    if on_gpu:
        if not torch.cuda.is_available():
            sys.exit("there is no GPU: without --gpu, memory stands for one")
        yield CudaPlace()
        return
    import pytest  # machines with GPUs need not have it

    from tests.gpus import stand_in

    driver = FakeCuda(build(folder))
    with pytest.MonkeyPatch.context() as patch, stand_in(driver, patch, kernels=True) as (on, stream):
        yield StandInPlace(driver, on, stream)


@contextlib.contextmanager
def opened(
    folder: Path, every: int, capacity_bytes: int, gpu_tier: str
) -> Iterator[tuple[list[stepwell.CheckpointStore], ...]]:
    """The stores that save, and for each of them one that reads what it has put on the disk."""
    with contextlib.ExitStack() as stack:
        stores, readers = [], []
        for number in range(STORES):
            disk = folder / f"disk{number}"
            disk.mkdir()
            config = folder / f"config{number}.toml"
            nearest = GPU_TIER.format(capacity=gpu_tier) if gpu_tier else ""
            config.write_text(nearest + CONFIG.format(capacity=capacity_bytes, path=disk, every=every))
            stores.append(stack.enter_context(stepwell.open(config, run="run")))
            readers.append(stack.enter_context(stepwell.open(disk / "run", mode="r")))
        yield stores, readers


def unguarded() -> contextlib.AbstractContextManager[object]:
    """Updates that do not wait for the copies of what they change."""
    return mock.patch.object(Guards, "_let_through", lambda self, lazy, until: lazy.cover.let_through(lazy.owner))


def run(
    folder: Path,
    saves: int,
    seed: int,
    every: str = "60",
    mib: str = "",
    tier: str = "",
    on_gpu: bool = False,
    broken: bool = False,
) -> dict[str, object]:
    """All saves; returns the totals. mib: about the size of the state. tier: the capacity of a tier in the GPU's
    memory; empty: there is none."""
    largest_bytes = int(mib or (64 if on_gpu else 8)) * (1 << 20) // 8
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(placed(folder, on_gpu))
        stores, readers = stack.enter_context(
            opened(folder, int(every), 4 * (8 * largest_bytes + 6 * CHUNK_BYTES), tier)
        )
        if broken:
            stack.enter_context(unguarded())
        hunt = Hunt(place, stores, readers, seed, largest_bytes)
        began = time.monotonic()
        hunt.run(saves)
        seconds = time.monotonic() - began
    return {
        "trial": "torn snapshots",
        "device": torch.cuda.get_device_name() if on_gpu else "stand-in",
        "saves": saves,
        "seed": seed,
        "tier": tier,
        "broken": broken,
        "tensors": hunt.tensors,
        "state_bytes": hunt.nbytes,
        "checked": hunt.checked,
        "from_gpu": hunt.from_gpu,
        "from_memory": hunt.from_memory,
        "from_disk": hunt.from_disk,
        "wrong": hunt.wrong,
        "seconds": round(seconds, 1),
    }


if __name__ == "__main__":
    command(
        __doc__,
        run,
        counted="saves",
        count=1000,
        flags={"gpu": "on_gpu", "break": "broken"},
        every="60",
        mib="",
        tier="",
    )
