"""A drain that is killed again and again: the next process goes on from the bytes that are there.

A checkpoint is saved to a disk and drained to a shared tier with a limit on bandwidth. The process is killed (-9) at
a random moment while it writes there; the next one opens the run and drains, and so on; the last one gets to the end.
What all of them began to write, chunk by chunk, is counted. Written again is what that is more than the checkpoint.

    python -m tests.campaign.drains --kills 20 --seed 1 --dir SCRATCH
"""

from __future__ import annotations

import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import torch

import stepwell
from stepwell.tiers.base import CHUNK_BYTES, Tier
from stepwell.tiers.file import FileTier
from stepwell.tiers.pfs import PfsTier
from stepwell.tiers.wrap import Event, Traced
from tests.campaign.command import command
from tests.campaign.kill9 import forked

#: what the shared tier lets through
RATE = 200e6
#: a kill comes after so many chunks of one process, at most
CHUNKS_MAX = 5
#: bytes that may be written again: a share of the checkpoint, and a chunk a kill
SHARE_MAX = 0.02


def state(size_bytes: int) -> dict[str, object]:
    return {"model": {"w": torch.arange(size_bytes // 4, dtype=torch.int32)}}


def tiers(folder: Path, told: int) -> list[Tier]:
    """A disk and a shared tier; `told` hears of each chunk that is begun on the latter, a line with its bytes each."""

    def watch(event: Event) -> None:
        if event.operation == "write" and event.phase == "started":
            os.write(told, b"%d\n" % event.size_bytes)

    far = PfsTier(folder / "pfs", write_bytes_per_s=RATE)
    return [FileTier(folder / "disk", name="disk"), Traced(far, watch)]


def drain(folder: Path, size_bytes: int, told: int) -> None:
    """Drains the checkpoint that an earlier process has left; saves it if there is none."""
    with stepwell.open(run="run", tiers=tiers(folder, told)) as store:
        if store.latest() is None:
            store.save(1, state(size_bytes)).wait("disk")
        report = store.drain("1h")
        assert report.newest.get("pfs") == 1, str(report)


def check(folder: Path, size_bytes: int) -> None:
    found = stepwell.load(folder / "pfs" / "run@1")
    assert torch.equal(found["model"]["w"], torch.arange(size_bytes // 4, dtype=torch.int32)), "other values came back"


class Count:
    """What a process says of the chunks that it begins to write."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._rest = b""
        self.chunks = self.size_bytes = 0

    def listen(self) -> bool:
        """Waits for the next word; False once the process has ended."""
        part = os.read(self._pipe, 4096)
        *lines, self._rest = (self._rest + part).split(b"\n")
        self.chunks += len(lines)
        self.size_bytes += sum(map(int, lines))
        return bool(part)


def killed(pid: int, count: Count, rng: random.Random) -> bool:
    """Lets the process write some chunks and kills it; False if it came to its end before that."""
    wanted = rng.randint(1, CHUNKS_MAX)
    while count.chunks < wanted:
        if not count.listen():
            return False
    time.sleep(rng.random() * CHUNK_BYTES / RATE)
    os.kill(pid, signal.SIGKILL)
    while count.listen():
        pass
    return True


def run(folder: Path, kills: int, seed: int) -> dict[str, object]:
    """All kills, the end, and the totals. Raises AssertionError if what comes back is wrong."""
    rng, began = random.Random(seed), time.monotonic()
    size_bytes = kills * (CHUNKS_MAX + 1) * CHUNK_BYTES - 4096  # enough for every kill, its header beside it
    for tier in ("disk", "pfs"):
        (folder / tier).mkdir()
    written_bytes, by_process = 0, list[int]()
    for number in range(kills + 1):
        pipe, told = os.pipe()
        pid = forked(partial(drain, folder, size_bytes, told))
        os.close(told)
        count = Count(pipe)
        if number < kills:
            assert killed(pid, count, rng), f"process {number + 1} ended before it was killed"
        while count.listen():
            pass
        os.close(pipe)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == (-signal.SIGKILL if number < kills else 0)
        committed = list((folder / "pfs").glob("run/step-*/manifest.json"))
        assert len(committed) == (number == kills), committed
        written_bytes += count.size_bytes
        by_process.append(count.size_bytes)
    _, status = os.waitpid(forked(lambda: check(folder, size_bytes)), 0)
    assert os.waitstatus_to_exitcode(status) == 0, "the check failed"
    shards = [path.stat().st_size for path in (folder / "pfs").glob("run/step-*/*.safetensors")]
    again = written_bytes - sum(shards)
    allowed = int(SHARE_MAX * sum(shards)) + kills * CHUNK_BYTES
    return {
        "trial": "drains",
        "kills": kills,
        "seed": seed,
        "checkpoint_bytes": sum(shards),
        "written_again_bytes": again,
        "allowed_bytes": allowed,
        "by_process": by_process,
        "wrong": int(not 0 <= again <= allowed),
        "seconds": round(time.monotonic() - began, 1),
    }


if __name__ == "__main__":
    command(__doc__, run, counted="kills")
