"""Starts the training script as a child process, and kills it with SIGKILL: in a save, or in a flush to the pfs."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from examples.demo.progress import Watch
from examples.demo.tiers import Tiers, good_bytes, shard_bytes

ROOT = Path(__file__).resolve().parents[2]
CHILD_TIMEOUT_S = 600
LOOK_S, POLL_S = 0.05, 0.0005  # between two looks at the child's log, and at the folder that the kill waits for


@dataclass
class Attempt:
    """What one training process did, from its log."""

    losses: dict[int, str] = field(default_factory=dict)  # step -> loss.hex(): every bit of it
    saves: dict[int, dict[str, Any]] = field(default_factory=dict)  # by step: the report of each
    restored: dict[str, Any] | None = None
    digests: dict[str, str] | None = None  # None: it did not come to its end
    edges: list[tuple[str, str, int]] = field(default_factory=list)  # (from, to, bytes moved) at the last look
    killed: str = ""  # where, in words; "": it was not killed where it should have been
    committed_step: int = 0  # the newest checkpoint that was committed on a disk when it ended
    cut: Cut | None = None

    @property
    def first_step(self) -> int:
        return min(self.losses, default=0)

    def moved(self, source: str | None, target: str) -> int:
        """Bytes from one end to the other; None: from anywhere."""
        return sum(moved for one, other, moved in self.edges if source in (None, one) and other == target)


@dataclass(frozen=True, slots=True)
class Cut:
    """A flush to the pfs that a kill cut off. Bytes are of shards, in whole chunks, when the process was dead."""

    step: int
    total_bytes: int  # of the checkpoint
    there_bytes: int  # of it on the pfs
    waiting_bytes: int  # of it and of the other checkpoints that must still get to the pfs
    waiting_there_bytes: int  # of all of them on the pfs


@dataclass
class Training:
    """One run of the demo: its tiers, and how its script is started."""

    run: str
    tiers: Tiers
    steps: int
    options: list[str]
    console: Console

    def start(self, attempt: int, until: int | None = None) -> Child:
        """Starts a process that trains to step `until`, or to the end."""
        command = [sys.executable, "-m", "examples.demo.train", "--config", str(self.tiers.config), "--run", self.run]
        command += ["--log", str(self.log(attempt)), "--steps", str(self.steps), *self.options]
        command += [] if until is None else ["--until", str(until)]
        words = self.log(attempt).with_suffix(".txt")
        with words.open("wb") as output:
            process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        name = f"{self.run}, process {attempt}" if attempt > 1 else self.run
        return Child(process, words, Watch(self.log(attempt), name, self.steps, self.console))

    def log(self, attempt: int) -> Path:
        return self.tiers.home / f"{self.run}.{attempt}.jsonl"

    def read(self, attempt: int) -> Attempt:
        done = Attempt()
        log = self.log(attempt)
        for line in log.read_text().splitlines() if log.exists() else []:
            record = json.loads(line)
            if record["kind"] == "loss":
                done.losses[record["step"]] = record["loss"]
            elif record["kind"] == "save":
                done.saves[record["step"]] = record
            elif record["kind"] == "restore":
                done.restored = record
            elif record["kind"] == "status":
                done.edges = [(source, target, moved) for source, target, moved in record["edges"]]
            elif record["kind"] == "end":
                done.digests = record["digests"]
        done.committed_step = max(self.tiers.committed("nvme", self.run), default=0)
        return done


@dataclass
class Child:
    """A training process under way. A context manager: it does not outlive it."""

    process: subprocess.Popen[bytes]
    output: Path
    watch: Watch

    def __enter__(self) -> Child:
        self.watch.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.kill()
        self.watch.__exit__(*error)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def wait(self) -> int:
        """Its exit code."""
        deadline = time.monotonic() + CHILD_TIMEOUT_S
        while self.process.poll() is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the training script took longer than {CHILD_TIMEOUT_S} s")
            self.watch.look()
            time.sleep(LOOK_S)
        return self.process.returncode

    def wait_for_folder(self, tiers: Tiers, tier: str, run: str, step: int) -> Path:
        """Returns at once when the folder of a step shows up on a tier without a manifest."""
        deadline, looked_at = time.monotonic() + CHILD_TIMEOUT_S, 0.0
        old = tiers.step(tier, run, step)
        while (folder := tiers.step(tier, run, step)) is None or (folder == old and tier == "nvme"):
            now = time.monotonic()
            if self.process.poll() is not None or now > deadline:
                raise RuntimeError(f"no copy of step {step} to {tier} ever began (code {self.process.poll()})")
            if now - looked_at > LOOK_S:
                self.watch.look()
                looked_at = now
            time.sleep(POLL_S)
        return folder

    def last_words(self) -> str:
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-30:])

    def warnings(self) -> list[str]:
        """What stepwell's log said, without the script's own lines."""
        return [line for line in self.output.read_text(errors="replace").splitlines() if not line.startswith("[")]


def run_to_the_end(training: Training, attempt: int = 1) -> Attempt:
    """Raises RuntimeError if the training script fails."""
    with training.start(attempt) as child:
        code = child.wait()
    if code:
        raise RuntimeError(f"the training script ended with code {code}:\n{child.last_words()}")
    for line in child.warnings():
        training.console.print(f"  stepwell: {line}")
    return training.read(attempt)


def kill_in_save(training: Training, attempt: int, step: int, save_s: float, dice: random.Random) -> Attempt:
    """Starts the script and kills it at a random moment of the save of `step`, which takes about `save_s`.

    A save is under way from when its folder is on the disk until its manifest.json is. If the manifest came first
    after all, `killed` is empty: the killed run has that checkpoint, and the caller tries again with a later step.
    """
    with training.start(attempt) as child:
        folder = child.wait_for_folder(training.tiers, "nvme", training.run, step)
        seen = time.monotonic()
        time.sleep(dice.uniform(0, 0.7) * save_s)
        child.kill()
        after_s = time.monotonic() - seen
    done = training.read(attempt)
    if not (folder / "manifest.json").exists():
        names = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
        moment = f"{after_s * 1000:.0f} ms into the save of step {step}"
        done.killed = f"{moment}: its folder on nvme holds {names}, and no manifest.json"
    return done


def kill_in_flush(training: Training, attempt: int, step: int, until: int, dice: random.Random) -> Attempt:
    """Starts the script, which trains to step `until`, and kills it at a random moment of the flush of `step`.

    `cut` says what was on the pfs then. If that was nothing or all, `killed` is empty, as in `kill_in_save`.
    """
    tiers = training.tiers
    with training.start(attempt, until) as child:
        folder = child.wait_for_folder(tiers, "pfs", training.run, step)
        time.sleep(dice.uniform(0.3, 0.6) * tiers.flush_s)
        child.kill()
    done = training.read(attempt)
    if not (folder / "manifest.json").exists():
        done.cut = cut = _cut(tiers, training.run, step)
        if 0 < cut.there_bytes < cut.total_bytes:
            done.killed = (
                f"in the flush of step {step} to the pfs: {cut.there_bytes / 1e6:.1f} of "
                f"{cut.total_bytes / 1e6:.1f} MB are there, and no manifest.json; nvme has step {done.committed_step}"
            )
    return done


def _cut(tiers: Tiers, run: str, step: int) -> Cut:
    flushed = max(tiers.committed("pfs", run), default=0)
    sizes: dict[int, tuple[int, int]] = {}
    for other, original in tiers.committed("nvme", run).items():
        if other > flushed:  # older ones are passed over
            sizes[other] = (shard_bytes(original), good_bytes(tiers.folder("pfs", run) / original.name, original))
    waiting, there = (sum(size[i] for size in sizes.values()) for i in (0, 1))
    return Cut(step, *sizes.get(step, (0, 0)), waiting, there)  # zeros: the kill came too late, all is on the pfs
