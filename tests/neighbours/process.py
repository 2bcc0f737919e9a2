"""A process that shares an arena with others, for the tests: `python -m tests.neighbours.process MEMORY DISK MODE MIB
SILENT_S`. The last is how long it waits for an owner that says nothing.

It says one JSON document when it is ready and one after each line on stdin: `load` loads the shard whole and says
whether every byte was right, where the bytes came from, and what it has read from the disk; `hold N` asks the owner for
N chunks and keeps them; `linked` says whether the owner is there, `used` how many of its own slots are in use; `fork`
makes a child that does nothing; `quit` ends it in order.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from stepwell import neighbouring
from stepwell.mover import Mover
from stepwell.native import AsyncEngine, Engine
from stepwell.neighbouring import Lent
from stepwell.policies.evict import LRU
from stepwell.sharing import share
from stepwell.tiers.file import FileTier
from stepwell.tiers.shared import SharedHostTier
from tests.core.moving import MIB, target
from tests.neighbours.nearby import OnDisk, lend, reading


def disk_bytes() -> int:
    """What this process has had read from disks so far."""
    return next(int(line.split()[1]) for line in open("/proc/self/io") if line.startswith("read_bytes"))


def say(**document: object) -> None:
    print(json.dumps(document), flush=True)


async def main(memory: str, root: str, mode: str, mib: str, silent_s: str) -> None:
    vars(neighbouring)["SILENT_S"] = float(silent_s)
    host = SharedHostTier(LRU(), int(mib) * MIB, arena="arena", run="run", root=memory, chunk_bytes=MIB)
    disk = FileTier(root, name="disk", read_only=True, reading="direct")
    engine = Engine("copy", backend="threads", threads=2)
    mover = Mover(AsyncEngine(engine), host.arena, host)
    for tier in (host, disk):
        await tier.start()
    sharing = await share(mover, [host, disk], "w" if mode == "w" else "r")
    shard = OnDisk(Path(root), (Path(root) / "expected").read_bytes())
    crcs = shard.crcs
    held: list[Lent | None] = []
    say(owned=host.owned, sharing=repr(sharing))
    while (line := (await asyncio.to_thread(sys.stdin.readline)).strip()) not in ("", "quit"):
        if line == "load":
            before, into = disk_bytes(), target(len(shard.data))
            # a client keeps nothing of what it had to read itself: it is to ask each time
            how = replace(reading(shard, disk, into=into, crcs=crcs), stays=host.owned)
            await mover.get(how, mover.all_of(len(shard.data)))
            good = np.array_equal(into.data, np.frombuffer(shard.data, np.uint8))
            say(good=good, took=how.healing.read_bytes, disk_bytes=disk_bytes() - before)
        elif line == "fork":
            if (pid := os.fork()) == 0:
                signal.pause()
            say(forked=pid)
        elif line == "used":
            say(used=host.arena.in_use)
        elif line == "linked":
            say(linked=sharing is not None and sharing._served is not None and sharing._served.connected)
        else:
            assert sharing is not None and sharing._served is not None
            held += [await lend(sharing._served, shard, disk, chunk) for chunk in range(int(line.split()[1]))]
            say(held=sum(each is not None for each in held))
    if sharing is not None:
        await sharing.close()
    for tier in (host, disk):
        await tier.close()
    mover.copier.close()  # type: ignore[attr-defined]
    engine.close()
    say(ended=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
