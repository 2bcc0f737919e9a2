"""Rank and world, and the small key-value store that the ranks of a job share.

Both are read when the first save or restore needs them, so that a store can be opened before
torch.distributed is initialised.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import weakref
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

from stepwell.errors import WaitTimeout

#: first and longest pause between two looks at the job's store
_POLL_FIRST_S, _POLL_LAST_S = 0.002, 0.05


class JobStore(Protocol):
    """Values that every rank of the job sees. Keys are written once."""

    def put(self, key: str, value: bytes) -> None: ...

    def poll(self, key: str) -> bytes | None:
        """The value, or None if nobody has put it yet. Never blocks for long."""
        ...


class LocalStore:
    """For a world of one."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def put(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def poll(self, key: str) -> bytes | None:
        return self._values.get(key)


class DistributedStore:
    """The store of torch.distributed's default process group, by a connection of our own.

    Who waits for a key holds the lock of its connection meanwhile. Training's threads wait there, as when they make a
    new group, and the event loop must not wait with them; nor must they with it, so only `check` and a `get` of what
    is there are used.
    """

    def __init__(self) -> None:
        from torch.distributed.distributed_c10d import _get_default_store

        self._store = _own_connection(_get_default_store())

    def put(self, key: str, value: bytes) -> None:
        self._store.set(key, value.hex())

    def poll(self, key: str) -> bytes | None:
        return bytes.fromhex(self._store.get(key).decode()) if self._store.check([key]) else None


#: a store of torch's -> our connection to it
_connections: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _own_connection(store: Any) -> Any:
    """The store itself where it cannot be cloned: old versions of torch, and stores written in Python."""
    if store not in _connections:
        try:
            _connections[store] = store.clone()
        except (AttributeError, RuntimeError):
            return store
    return _connections[store]


@dataclass(frozen=True, slots=True)
class Job:
    """This process's place in its job."""

    rank: int
    world: int
    store: JobStore
    name: str | None  # of the scheduler's job, the same in its restarts
    restarts: int

    @property
    def leader(self) -> bool:
        return self.rank == 0


def current_job() -> Job:
    """As torch.distributed says now, and the scheduler's environment at the first call."""
    name, restarts = _scheduled(os.getpid())
    groups = _groups or _find_groups()
    if groups is not None and groups.WORLD is not None:
        import torch.distributed as dist

        return Job(dist.get_rank(), dist.get_world_size(), DistributedStore(), name, restarts)
    return Job(0, 1, LocalStore(), name, restarts)


#: torch.distributed's class that knows the default process group; each save asks it, so it is not looked for again
_groups: Any = None


def _find_groups() -> Any:
    """None as long as nobody has imported it, as who has initialised it has; or if this torch was built without it."""
    global _groups
    _groups = getattr(sys.modules.get("torch.distributed"), "GroupMember", None)
    return _groups


@functools.cache
def _scheduled(pid: int) -> tuple[str | None, int]:
    """The job's name and its restarts. Looked up once a process, since each save asks: a launcher may set them in a
    child that it forks, nobody sets them later."""
    name = next(
        (os.environ[k] for k in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "TORCHELASTIC_RUN_ID") if k in os.environ),
        None,
    )
    return name, int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or os.environ.get("SLURM_RESTART_COUNT") or 0)


class GivenUp(Exception):
    """What is waited for will not come; says why."""


async def wait_for(store: JobStore, key: str, timeout: float, what: str, unless: Collection[str] = ()) -> bytes:
    """The value of `key` once a rank has put it. unless: keys under which ranks say why it will not come.

    Raises WaitTimeout that says `what` did not come; GivenUp.
    """
    loop = asyncio.get_running_loop()
    deadline, pause = loop.time() + timeout, _POLL_FIRST_S
    while (value := store.poll(key)) is None:
        reason = next((said for each in unless if (said := store.poll(each)) is not None), None)
        if reason is not None:
            if (value := store.poll(key)) is not None:  # it came before that
                return value
            raise GivenUp(reason.decode())
        if loop.time() > deadline:
            raise WaitTimeout(f"{what} did not come within {timeout:.0f} s", todo="See whether that rank is alive")
        await asyncio.sleep(pause)
        pause = min(pause * 1.5, _POLL_LAST_S)
    return value
