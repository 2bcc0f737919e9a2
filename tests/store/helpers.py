"""Tiers and states that the store's tests share."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import stepwell
from stepwell.policies.evict import LRU
from stepwell.runtime import Runtime
from stepwell.tiers.file import FileTier
from stepwell.tiers.host import HostTier
from stepwell.tiers.wrap import Fault, Faulty

#: a fault from the first operation on, for ever
ALWAYS = 10**9


def state(value: float = 1.0, size: int = 100_000) -> dict[str, Any]:
    return {"model": {"w": torch.full((size,), value)}}


def host(mebibytes: int = 64) -> HostTier:
    return HostTier(LRU(), mebibytes << 20, chunk_bytes=1 << 20)


def disk(path: Path, plan: Sequence[Fault] = (), name: str = "disk") -> Faulty:
    (path / name).mkdir(exist_ok=True)
    return Faulty(FileTier(path / name, name=name), plan)


@contextmanager
def sharing(path: Path) -> Iterator[Path]:
    """A config file with a shared host tier, in memory of its own, over the disk `path`."""
    memory = tempfile.mkdtemp(prefix="stepwell-test-", dir="/dev/shm")
    file = path / "shared.toml"
    file.write_text(
        f'[[tier]]\nname = "host"\ndriver = "host"\ncapacity = "256MiB"\nshared = true\npath = "{memory}"\n'
        f'[[tier]]\nname = "disk"\ndriver = "file"\npath = "{path}"\n'
    )
    try:
        yield file
    finally:
        shutil.rmtree(memory)


def steps(store: stepwell.CheckpointStore, tier: str) -> list[int]:
    return [c.step for c in store.checkpoints() if tier in c.tiers]


def release(tier: Faulty) -> None:
    """Ends all stalls of a tier that a store uses."""
    Runtime.get().loop.call_soon_threadsafe(tier.release)


def eventually(what: Callable[[], bool]) -> None:
    """For what becomes true in the background and has no event of its own."""
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.005)
