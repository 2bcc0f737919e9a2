"""Starts the training script as a child process, and kills it with SIGKILL in the middle of a save."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CHILD_TIMEOUT_S = 600
POLL_S = 0.0005


@dataclass
class Attempt:
    """What one training process did, from its log."""

    losses: dict[int, str] = field(default_factory=dict)  # step -> loss.hex(): every bit of it
    saves: list[dict[str, Any]] = field(default_factory=list)
    restored: dict[str, Any] | None = None
    digests: dict[str, str] | None = None  # None: it did not come to its end
    killed: str = ""  # where, in words
    committed_step: int = 0  # the newest checkpoint that was committed when it ended

    @property
    def first_step(self) -> int:
        return min(self.losses)


@dataclass
class Training:
    """One run of the demo: its folder, and how its script is started."""

    name: str
    home: Path
    options: list[str]

    def start(self, attempt: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "examples.demo.train", "--run", str(self.home / self.name)]
        command += ["--log", str(self.log(attempt)), "--name", f"{self.name} {attempt}", *self.options]
        return subprocess.Popen(command, cwd=ROOT)

    def log(self, attempt: int) -> Path:
        return self.home / f"{self.name}.{attempt}.jsonl"

    def read(self, attempt: int) -> Attempt:
        done = Attempt()
        log = self.log(attempt)
        for line in log.read_text().splitlines() if log.exists() else []:
            record = json.loads(line)
            if record["kind"] == "loss":
                done.losses[record["step"]] = record["loss"]
            elif record["kind"] == "save":
                done.saves.append({**record, "bytes": self.step_bytes(record["step"])})
            elif record["kind"] == "restore":
                done.restored = {**record, "bytes": self.step_bytes(record["step"])}
            elif record["kind"] == "end":
                done.digests = record["digests"]
        return done

    def folders(self, step: int) -> list[Path]:
        return sorted((self.home / self.name).glob(f"step-{step:09d}.*"))

    def committed_step(self) -> int:
        """The newest step that has a manifest; 0 if none has."""
        manifests = (self.home / self.name).glob("step-*/manifest.json")
        return max((int(path.parent.name.split("-")[1].split(".")[0]) for path in manifests), default=0)

    def step_bytes(self, step: int) -> int:
        """Bytes of the files of the committed checkpoint of this step."""
        folders = [folder for folder in self.folders(step) if (folder / "manifest.json").exists()]
        return sum(path.stat().st_size for folder in folders[-1:] for path in folder.iterdir())


def run_to_the_end(training: Training, attempt: int = 1) -> Attempt:
    """Raises RuntimeError if the training script fails."""
    code = training.start(attempt).wait(CHILD_TIMEOUT_S)
    if code:
        raise RuntimeError(f"the training script ended with code {code}")
    return training.read(attempt)


def run_and_kill(training: Training, attempt: int, step: int, save_s: float, dice: random.Random) -> Attempt:
    """Starts the script and kills it at a random moment of the save of `step`, which takes about `save_s`.

    A save is under way from when its folder is there until its manifest.json is. If the manifest came first after all,
    `killed` is empty: the killed run has that checkpoint, and the caller tries again with a later step.
    """
    child = training.start(attempt)
    try:
        deadline = time.monotonic() + CHILD_TIMEOUT_S
        while not (folders := training.folders(step)):
            if child.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the training script never came to the save of step {step} (code {child.poll()})")
            time.sleep(POLL_S)
        seen = time.monotonic()
        time.sleep(dice.uniform(0, 0.7) * save_s)
        child.kill()
        after_s = time.monotonic() - seen
    finally:
        child.kill()
        child.wait()
    done = training.read(attempt)
    done.committed_step = training.committed_step()
    folder = folders[-1]
    if not (folder / "manifest.json").exists():
        names = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
        moment = f"{after_s * 1000:.0f} ms into the save of step {step}"
        done.killed = f"{moment}: its folder holds {names}, and no manifest.json"
    return done
