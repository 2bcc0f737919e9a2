"""Owners and readers of a shared host tier, killed at random moments: memory must never hold a wrong byte.

Each round forks a trainer, which owns the arena, goes on from the newest checkpoint and saves step after step, and a
reader beside it, which restores again and again. One of them is killed at a random moment. If it was the reader, the
trainer must go on. Then both are killed, and everything in memory is looked at: each chunk that is said to be filled
has the checksums of its checkpoint's record; a new process, which adopts the arena, restores the newest step that was
acknowledged in memory, and those before it, value for value. At the end the arena is removed, and
nothing is left.

    python -m tests.campaign.hosts --rounds 300 --seed 1 --dir SCRATCH
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import stepwell
from stepwell.errors import StepwellError
from stepwell.format.names import Attempt, rank_file
from stepwell.format.records import RankRecord, decode
from stepwell.native import BLOCK_BYTES, crc32c
from stepwell.tiers import _shm
from stepwell.tiers._index import SlotState, name_of
from stepwell.tiers._sharedindex import IndexView, Unusable
from stepwell.tiers.base import CheckpointKey, ShardKey
from stepwell.tiers.shared import SharedHostTier
from tests.campaign.command import command
from tests.campaign.kill9 import forked, same

#: elements of the large tensor: three chunks
SIZE = 5_000_000
#: of the arena: some four checkpoints, so that older ones are evicted
CAPACITY = "128MiB"
#: how long a trainer may need to save one more step, on a busy machine
PATIENCE_S = 60.0

CONFIG = """
[[tier]]
name = "host"
driver = "host"
capacity = "{capacity}"
shared = true
path = "{root}"

[[tier]]
name = "disk"
driver = "file"
path = "{disk}"
retain = {{ last = 3 }}
"""


def state_at(step: int) -> dict[str, object]:
    """A state that tells its step in every byte of its tensor."""
    return {"model": {"weight": torch.arange(SIZE, dtype=torch.int32) + step}, "step": step}


def blank() -> dict[str, object]:
    return {"model": {"weight": torch.zeros(SIZE, dtype=torch.int32)}, "step": -1}


class Trial:
    """One run with its arena, over all rounds."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.root, self.disk, self.config = root, folder / "disk", folder / "config.toml"
        self.disk.mkdir()
        self.config.write_text(CONFIG.format(capacity=CAPACITY, root=root, disk=self.disk))

    def open(self, **options: object) -> stepwell.CheckpointStore:
        return stepwell.open(self.config, run="run", **options)  # type: ignore[arg-type]

    def train(self, report: int) -> None:
        """Saves step after step until it is killed; tells of each when memory has it, and when the disk has it."""
        store = self.open()
        host = store.tiers[0]
        assert isinstance(host, SharedHostTier) and host.owned, f"the reader kept the memory: {host!r}"
        state = blank()
        found = store.restore(state)
        first = found.step + 1 if found else 1
        os.write(report, b"ready\n")
        for step in range(first, first + 1000):
            save = store.save(step, state_at(step))
            save.wait("host")
            os.write(report, b"m%d\n" % step)
            if step % 3:
                save.wait("disk")
                os.write(report, b"d%d\n" % step)

    def read(self, report: int) -> None:
        """Restores again and again. Ends with an error if a value is wrong."""
        while True:
            with self.open(mode="r") as store:
                state = blank()
                try:
                    found = store.restore(state)
                except StepwellError:  # what retention has deleted since, for one
                    continue
                if found is not None:
                    assert same(state, state_at(found.step)), f"a reader got other values for step {found.step}"
            os.write(report, b"r\n")

    def check(self, in_memory: int, on_disk: int) -> None:
        """Raises AssertionError unless all that memory and disk hold is right."""
        check_arena(self)
        with self.open() as store:
            state = blank()
            found = store.restore(state)
            assert found is not None or not in_memory, f"step {in_memory} was in memory, and nothing was found"
            if found is None:
                return
            assert found.step >= max(in_memory, on_disk), (
                f"{in_memory} was in memory, {found.step} was restored from {found.sources}; there are "
                f"{[(each.step, each.tiers) for each in store.checkpoints()]}"
            )
            assert not found.skipped, found.skipped
            assert same(state, state_at(found.step)), f"step {found.step} holds other values"
            assert found.sources.get("host", 0) > 0, f"step {found.step} came from {found.sources}"
            for checkpoint in store.checkpoints()[-3:-1]:
                assert store.restore(state := blank(), step=checkpoint.step) is not None
                assert same(state, state_at(checkpoint.step)), f"step {checkpoint.step} holds other values"


def check_arena(trial: Trial) -> int:
    """Raises AssertionError unless each filled chunk of a known checkpoint is right; returns how many those are."""
    checked = 0
    for found in _shm.arenas(trial.root):
        assert not found.alive, "the arena has an owner although all processes are dead"
        try:
            view = IndexView(found.folder)
        except (Unusable, OSError):  # its first owner was killed while making it
            continue
        known = _known(trial, found.folder)
        with (found.folder / _shm.SLOTS).open("rb") as slots:
            for row in map(view.look, range(view.count)):
                if row.state is not SlotState.FILLED or row.name not in known:
                    continue
                slots.seek(row.slot * view.slot_bytes)
                data = slots.read(row.length)
                each = view.slot_bytes // BLOCK_BYTES
                crcs = known[row.name][row.chunk * each : (row.chunk + 1) * each]
                blocks = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
                assert [crc32c(block) for block in blocks] == crcs, f"chunk {row.chunk} in slot {row.slot} is wrong"
                checked += 1
        view.close()
    return checked


def _known(trial: Trial, folder: Path) -> dict[str, list[int]]:
    """Name of shard -> checksums of its blocks, from the records in memory and on the disk."""
    records = [path.read_bytes().partition(b"\n")[2] for path in (folder / _shm.RECORDS).glob("*[!w]")]
    records += [path.read_bytes() for path in trial.disk.glob(f"run/step-*/{rank_file(0)}")]
    known = {}
    for data in records:
        try:
            record = decode(data, RankRecord)
        except StepwellError:  # a manifest or the run's own; or it was being written
            continue
        attempt = Attempt.parse(record.attempt)
        assert attempt is not None
        for shard in record.shards:
            known[name_of(ShardKey(CheckpointKey("run", attempt.folder), shard.file))] = [int(c) for c in shard.crcs()]
    return known


class Process:
    """A forked process that reports lines."""

    def __init__(self, work: Callable[[int], None]) -> None:
        self._reading, writing = os.pipe()
        self._pid = forked(lambda: work(writing))
        os.close(writing)
        self._said = b""

    def lines(self, wait_s: float = 0.0) -> list[bytes]:
        """All that it has said so far; waits for more, at most so long."""
        while (
            self._reading >= 0
            and select.select([self._reading], [], [], wait_s)[0]
            and (part := os.read(self._reading, 4096))
        ):
            self._said += part
            wait_s = 0.0
        return self._said.split()

    def newest(self, mark: str) -> int:
        return max((int(line[1:]) for line in self.lines() if line.startswith(mark.encode())), default=0)

    def wait_for(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, f"{what}: nothing for {PATIENCE_S:.0f} s"
            assert self.lines(0.1) is not None and self.running, f"{what}: the process died by itself"

    @property
    def running(self) -> bool:
        return os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def kill(self) -> None:
        """Raises AssertionError if it had ended by itself: then something was wrong. Idempotent."""
        if self._reading < 0:
            return
        alone = self.running
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self.lines()
        os.close(self._reading)
        self._reading = -1
        assert alone, "a process ended by itself"


def one_round(trial: Trial, rng: random.Random, window_s: float) -> dict[str, object]:
    """One kill of one of both, and what is left. Raises AssertionError if anything is wrong."""
    trainer, reader = Process(trial.train), Process(trial.read)
    owner_first = rng.random() < 0.7
    try:
        first = b"ready" if rng.random() < 0.2 else b"m"
        trainer.wait_for(lambda: any(line.startswith(first) for line in trainer.lines()), "the trainer's start")
        time.sleep(rng.random() * window_s)
        if owner_first:
            trainer.kill()
            time.sleep(rng.random() * window_s / 4)  # the reader may adopt it, and dies with it
        else:
            reader.kill()
            before = trainer.newest("m")
            trainer.wait_for(lambda: trainer.newest("m") > before, "the trainer without its reader")
            time.sleep(rng.random() * window_s)
    finally:
        for process in (trainer, reader):
            process.kill()
    in_memory, on_disk = trainer.newest("m"), trainer.newest("d")
    _, status = os.waitpid(forked(lambda: trial.check(in_memory, on_disk)), 0)
    assert os.waitstatus_to_exitcode(status) == 0, f"the check after step {in_memory} failed"
    return {"in_memory": in_memory, "ahead": in_memory > on_disk, "owner": owner_first}


def run(scratch: Path, rounds: int, seed: int, window_s: float = 0.4) -> dict[str, object]:
    """All rounds; returns the totals."""
    rng, wrong, ahead, owners, steps = random.Random(seed), 0, 0, 0, 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=_shm.ROOT, prefix="stepwell-campaign-") as root:
        trial = Trial(scratch, Path(root))
        for number in range(rounds):
            try:
                got = one_round(trial, rng, window_s)
            except AssertionError as error:
                wrong += 1
                print(f"round {number + 1} is WRONG: {error}", file=sys.stderr)
                continue
            ahead += bool(got["ahead"])
            owners += bool(got["owner"])
            steps = max(steps, int(str(got["in_memory"])))
            if sys.stderr.isatty() or number % 50 == 49:
                print(f"round {number + 1} of {rounds}: {ahead} left a step in memory alone", file=sys.stderr)
        for found in _shm.arenas(root):
            _shm.remove(found.folder)
        left = [path.name for path in _shm.user_folder(root).iterdir()]
    return {
        "trial": "shared host memory",
        "rounds": rounds,
        "seed": seed,
        "wrong": wrong,
        "owners_killed_first": owners,
        "steps_in_memory_alone": ahead,
        "steps_acknowledged": steps,
        "left": left,
        "seconds": round(time.monotonic() - began, 1),
    }


if __name__ == "__main__":
    command(__doc__, run)
