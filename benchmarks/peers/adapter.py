"""stepwell as a peer in the harness; imported by `benchmarks.peers.harness` once the harness can be imported."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import stepwell
from benchmarks.states import ready_store

Base: Any = importlib.import_module("peers").Adapter


class Stepwell(Base):  # type: ignore[misc]  # the harness lies outside the project and has no types
    """A store for each folder; saves are in the background, restores go into the existing tensors."""

    name = "stepwell"
    restores = "in place"

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        super().__init__(rank, world)
        self.stores: dict[Path, stepwell.CheckpointStore] = {}
        self.step = 1

    def store(self, directory: Path, size: int = 0) -> stepwell.CheckpointStore:
        if directory not in self.stores:
            self.stores[directory] = ready_store(directory / "run", size) if size else stepwell.open(directory / "run")
        return self.stores[directory]

    def setup(self, state: dict[str, Any], directory: Path) -> None:
        size = importlib.import_module("workloads").total_bytes(state)
        newest = self.store(directory, size).latest()  # the harness warms up in one folder again and again
        self.step = newest.step + 1 if newest else 1

    def begin(self, state: dict[str, Any], directory: Path) -> stepwell.Save:
        return self.store(directory).save(self.step, state)

    def finish(self, handle: stepwell.Save) -> None:
        handle.wait()

    def restore(self, directory: Path, into: dict[str, Any]) -> dict[str, Any]:
        if self.store(directory).restore(into) is None:
            raise RuntimeError(f"no checkpoint in {directory}")
        return into

    def close(self) -> None:
        for store in self.stores.values():
            store.close()
