"""Jobs of several ranks: processes of their own that meet at a store of torch.distributed, which the test holds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports it all the same

ROOT = Path(__file__).parents[1]
WAIT_S = 100.0

#: before each rank's code, which then knows `rank` and `world`
_JOIN = """
import sys, torch, torch.distributed as dist, stepwell
rank, world, port = map(int, sys.argv[-3:])
dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=world)
"""


@contextmanager
def running(code: str, *arguments: object, world: int = 2) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts the ranks, with pipes for what they read and say; kills those that are still there at the end.

    The store's port is chosen by the system and never let go of, so that jobs beside this one cannot take it.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-W", "ignore", "-c", _JOIN + code, *map(str, arguments)]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(store.port)], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def ended(code: str, *arguments: object, world: int = 2) -> list[subprocess.CompletedProcess[str]]:
    """Runs the ranks to their ends. Raises TimeoutExpired if one hangs."""
    with running(code, *arguments, world=world) as ranks:
        said = [process.communicate(timeout=WAIT_S) for process in ranks]
        return [subprocess.CompletedProcess(p.args, p.returncode, *s) for p, s in zip(ranks, said, strict=True)]
