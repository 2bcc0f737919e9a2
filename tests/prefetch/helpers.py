"""What the tests of prefetching share: models on disk, checkpoints of several parts, and looks at the arena."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import stepwell
from stepwell.runtime import Runtime
from stepwell.tiers.host import HostTier, Priority, Slot

MIB = 1 << 20


def model(folder: Path, number: int, mebibytes: int = 9) -> Path:
    """A plain folder of one file, which has exactly so many chunks of 1 MiB."""
    path = folder / f"model-{number}"
    path.mkdir()
    save_file({"w": torch.full((mebibytes * MIB // 4 - 100,), float(number))}, path / "model.safetensors")
    return path


def check(path: Path, number: int) -> None:
    """Loads a model and looks at its values."""
    assert bool((stepwell.load(path)["w"] == number).all())


def state(value: float, mebibytes: int = 4) -> dict[str, Any]:
    """A model of two tensors, and an optimizer of one, each of so many MiB."""
    size = mebibytes * MIB // 4
    return {
        "model": {"first": torch.full((size,), value), "second": torch.full((size,), -value)},
        "optimizer": {"m": torch.full((size,), 2 * value)},
    }


def on_loop(work: Any) -> Any:
    return Runtime.get().run(work, 20)


def calls(what: Callable[[], Any]) -> Any:
    """Calls something on the event loop, where all of the arena lives."""

    async def call() -> Any:
        return what()

    return on_loop(call())


def hold(store: stepwell.CheckpointStore, count: int) -> list[Slot]:
    """Takes room away from what may be kept, until it is `let_go`."""

    async def take() -> list[Slot]:
        return [await store.mover.arena.acquire(Priority.RESTORE, kept=True) for _ in range(count)]

    return list(on_loop(take()))


def let_go(store: stepwell.CheckpointStore, slots: Sequence[Slot]) -> None:
    def give() -> None:
        for slot in slots:
            store.mover.arena.release(slot)

    calls(give)


def here(tier: HostTier) -> list[tuple[str, int]]:
    """The keys of all chunks in memory, sorted."""
    arena = tier.arena
    return sorted(calls(lambda: [arena.key(s, n) for s in arena.shards() for n in arena.chunks(s)]))


def check_books(tier: HostTier) -> None:
    """Nothing is held, and the arena's counts are what its slots say."""
    arena = tier.arena

    def look() -> None:
        kept = [slot for slot in arena._slots if slot.kept]
        assert arena._kept == len(kept) <= arena.kept_max
        assert arena._clean == sum(slot.clean for slot in kept)
        assert arena._idle == sum(slot.idle for slot in kept)
        assert all(slot.chunk is not None and slot.filled for slot in kept)
        assert arena.in_use == 0 and not arena._waiting
        assert len(arena._free) + len(kept) == len(arena._slots)

    calls(look)


def moved_bytes(store: stepwell.CheckpointStore, source: str = "disk") -> int:
    """What has come from a tier, to wherever."""
    return sum(edge.moved_bytes for edge in store.status().edges if edge.source == source)
