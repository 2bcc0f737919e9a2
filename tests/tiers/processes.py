"""Processes that hold shared memory, for tests that kill them: `python -m tests.tiers.processes WHAT ROOT`.

Each tells on its standard output how far it is, a word a line, and then waits to be killed.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from stepwell.errors import TierError
from stepwell.policies.evict import LRU
from stepwell.tiers import _shm
from stepwell.tiers.base import CheckpointKey, RecordKey, ShardKey
from stepwell.tiers.host import Priority
from stepwell.tiers.shared import SharedHostTier
from tests.contract.suite import put

ARENA = "host.run.0.test"
SLOT_BYTES, SLOTS = 8192, 16
PATIENCE_S = 60.0


def shared(root: Path, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES) -> SharedHostTier:
    """A tier on the arena that all these tests use."""
    return SharedHostTier(
        LRU(), slots * slot_bytes, arena=ARENA, run="run", root=root, chunk_bytes=slot_bytes, background=False,
        ahead=False,
    )  # fmt: skip


def arena_folder(root: Path) -> Path:
    return _shm.user_folder(root) / ARENA


class Child:
    """One of the functions below, in a process of its own. Killed, with all it has forked, when the context is left."""

    def __init__(self, what: str, *arguments: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.tiers.processes", what, *map(str, arguments)],
            stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def wait_for(self, word: str) -> str:
        """Reads up to a line that begins so; returns the line."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line.strip()
        raise AssertionError(f"the process ended without saying {word!r}: {self._process.wait(PATIENCE_S)}")

    def kill(self) -> None:
        """The process, not its children."""
        self._process.kill()
        self._process.wait(PATIENCE_S)

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            os.killpg(self._process.pid, 9)
        except ProcessLookupError:
            pass
        self._process.wait(PATIENCE_S)
        assert self._process.stdout is not None
        self._process.stdout.close()


def say(*words: object) -> None:
    print(*words, flush=True)


def own_and_fork(root: str) -> None:
    """Owns an arena, and has a forked child that outlives it."""
    lock = _shm.try_to_lock(_shm.user_folder(root) / "arena")
    assert lock is not None
    if os.fork() == 0:
        say("forked" if not lock.held else "the child holds the lock")
        time.sleep(PATIENCE_S)
    time.sleep(PATIENCE_S)


def leave(root: str) -> None:
    """Keeps a tier with a committed shard, a clean chunk, one that was never committed and one half filled."""

    async def main() -> None:
        tier = shared(Path(root))
        await tier.start()
        await fill(tier)
        await leave_undone(tier)
        pid = os.fork()
        if pid == 0:
            in_a_child(tier)
        os.waitpid(pid, 0)
        say("left")
        time.sleep(PATIENCE_S)

    asyncio.run(main())


def in_a_child(tier: SharedHostTier) -> None:
    """A forked child holds nothing of it, and is told so."""
    try:
        asyncio.new_event_loop().run_until_complete(tier.reserve(KEPT, 1))
    except TierError as error:
        say("child", tier.owned, error)
    maps = Path("/proc/self/maps").read_text()
    files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    say("maps", str(arena_folder(tier._root)) in maps, "files", any(ARENA in file for file in files))
    os._exit(0)


CHECKPOINT = CheckpointKey("run", "step-000000001.1-1")
KEPT = ShardKey(CHECKPOINT, "model.safetensors")
CACHED = ("file", "/models/a.safetensors", 1)
TORN = ShardKey(CheckpointKey("run", "step-000000002.1-2"), "model.safetensors")
KEPT_BYTES = 3 * SLOT_BYTES - 100


def data_of(size: int, seed: int) -> bytes:
    return bytes((i * 31 + seed * 7 + (i >> 8)) % 251 for i in range(size))


async def fill(tier: SharedHostTier) -> None:
    """A committed shard, and a chunk of a file that another tier has."""
    reservation = await put(tier, KEPT, data_of(KEPT_BYTES, 1), SLOT_BYTES)
    record = RecordKey("run", f"{CHECKPOINT.attempt}/manifest.json")
    assert await tier.commit(record, b'{"a": 1}', shards=[reservation])
    await _cache(tier, 0, True)


async def leave_undone(tier: SharedHostTier) -> None:
    """A shard that was never committed, and a chunk that is half there."""
    await put(tier, TORN, data_of(2 * SLOT_BYTES, 2), SLOT_BYTES)
    await _cache(tier, 1, False)


async def _cache(tier: SharedHostTier, number: int, whole: bool) -> None:
    if tier.arena.has(CACHED, number):
        return
    slot = await tier.arena.acquire(Priority.PREFETCH, kept=True)
    assert tier.arena.place(slot, CACHED, number, SLOT_BYTES, clean=True)
    tier.arena.view(slot, SLOT_BYTES)[:] = data_of(SLOT_BYTES, 3)
    if whole:
        tier.arena.filled(slot)
        tier.arena.release(slot)


if __name__ == "__main__":
    {"own_and_fork": own_and_fork, "leave": leave}[sys.argv[1]](*sys.argv[2:])
