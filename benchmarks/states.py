"""States of the peers' harness for the benchmarks of a single process, and how a store is made ready for one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import stepwell
from benchmarks import peers
from stepwell.hostmem import host_budget_bytes, local_ranks


def build(workload: str) -> tuple[dict[str, Any], int]:
    """The state of a workload, and its bytes."""
    peers.harness()
    module = peers.workloads()
    state: dict[str, Any] = module.WORKLOADS[workload].build(0)
    return state, int(module.total_bytes(state))


def ready_store(run: Path, state_bytes: int, host_bytes: int | None = None) -> stepwell.CheckpointStore:
    """A store whose host tier has its memory already: by default as much as it would take by itself."""
    store = stepwell.open(run, host=host_bytes or host_budget_bytes(state_bytes, local_ranks()))
    deadline = time.monotonic() + 60
    while True:
        host = store.status().tier("host")
        assert host.capacity_bytes is not None and host.ready_bytes is not None
        if host.ready_bytes >= host.capacity_bytes:
            return store
        if time.monotonic() > deadline:
            raise RuntimeError(f"only {host.ready_bytes} of {host.capacity_bytes} bytes of host memory became ready")
        time.sleep(0.05)
