"""Kill -9 at random moments: what restore finds afterwards must be whole, right and the newest committed.

Each round forks a trainer that goes on from the newest checkpoint and saves step after step, reporting each
step once its save has been acknowledged; kills it at a random moment, in half of the rounds while it saves; then
forks a checker that restores. The run's folder stays from round to round, so what earlier kills left is taken over
and cleaned by later trainers.

    python -m tests.campaign.kill9 --rounds 500 --seed 1 --dir SCRATCH
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch

import stepwell
from tests.campaign.command import command

#: elements of the large tensor: a save takes some tens of milliseconds, so kills fall into all of its phases
SIZE = 6_000_000
#: about as long as that takes, at least
SAVE_S = 0.02


def state_at(step: int) -> dict[str, object]:
    """A state that tells its step in every byte of its tensors."""
    ramp = torch.arange(SIZE, dtype=torch.int32)
    return {
        "model": {"weight": ramp + step, "small": torch.full((7,), float(step))},
        "optimizer": {"m": (ramp[: SIZE // 3] * 3 + step).to(torch.float32)},
        "step": step,
    }


def blank() -> dict[str, object]:
    return {
        "model": {"weight": torch.zeros(SIZE, dtype=torch.int32), "small": torch.zeros(7)},
        "optimizer": {"m": torch.zeros(SIZE // 3)},
        "step": -1,
    }


def same(a: object, b: object) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    return a == b


def train(folder: Path, report: int) -> None:
    """Saves step after step until it is killed."""
    store = stepwell.open(folder)
    state = blank()
    found = store.restore(state)
    first = found.step + 1 if found else 1
    os.write(report, b"ready\n")
    for step in range(first, first + 1000):
        store.save(step, state_at(step)).wait()
        os.write(report, b"%d\n" % step)


def check(folder: Path, acknowledged: int) -> None:
    """Raises AssertionError unless the newest committed checkpoint comes back whole."""
    with stepwell.open(folder, mode="r") as store:
        state = blank()
        found = store.restore(state)
        if found is None:
            assert acknowledged == 0, f"step {acknowledged} was acknowledged, and nothing was found"
            return
        assert found.step >= acknowledged, f"step {acknowledged} was acknowledged, {found.step} was restored"
        assert not found.skipped, found.skipped
        assert found.step == store.checkpoints()[-1].step
        assert same(state, state_at(found.step)), f"step {found.step} holds other values"
        assert same(stepwell.load(f"{folder}@{found.step}", part="model"), state_at(found.step)["model"])


def forked(work: Callable[[], None]) -> int:
    """Runs `work` in a forked child and returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    _run_and_leave(work)


def _run_and_leave(work: Callable[[], None]) -> NoReturn:
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def one_round(folder: Path, rng: random.Random, window_s: float) -> dict[str, object]:
    """One kill and one check. Returns what happened; raises AssertionError if the check failed."""
    before = _unfinished(folder)
    reading, writing = os.pipe()
    pid = forked(lambda: train(folder, writing))
    os.close(writing)
    said = b""
    while b"ready" not in said:
        part = os.read(reading, 4096)
        assert part, "the trainer died by itself"
        said += part
    time.sleep(rng.random() * window_s)
    if rng.random() < 0.5:
        _await_save(folder, before)
        time.sleep(rng.random() * SAVE_S)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while select.select([reading], [], [], 0)[0] and (part := os.read(reading, 4096)):
        said += part
    os.close(reading)
    acknowledged = max((int(line) for line in said.split() if line.isdigit()), default=0)
    torn = _unfinished(folder) - before  # left by this kill, not by an earlier one
    _, status = os.waitpid(forked(lambda: check(folder, acknowledged)), 0)
    assert os.waitstatus_to_exitcode(status) == 0, f"the check after step {acknowledged} failed"
    _prune(folder)
    return {"acknowledged": acknowledged, "torn": bool(torn)}


def _await_save(folder: Path, before: set[str]) -> None:
    """Returns once a save is on its way to the disk: a slow machine spends little of its time in them."""
    until = time.monotonic() + 10
    while not _unfinished(folder) - before and time.monotonic() < until:
        time.sleep(0.0005)


def _unfinished(folder: Path) -> set[str]:
    """The step folders without a manifest."""
    return {path.name for path in folder.glob("step-*") if not (path / "manifest.json").exists()}


def _prune(folder: Path, keep: int = 3) -> None:
    """Keeps the disk small: the oldest committed steps go (as a user's rm would)."""
    committed = sorted(path.parent for path in folder.glob("step-*/manifest.json"))
    for old in committed[:-keep]:
        for file in [old / "manifest.json", *old.iterdir()]:
            file.unlink(missing_ok=True)
        old.rmdir()


def run(folder: Path, rounds: int, seed: int, window_s: float = 0.4) -> dict[str, object]:
    """All rounds; returns the totals."""
    rng, wrong, torn, steps = random.Random(seed), 0, 0, 0
    began = time.monotonic()
    for number in range(rounds):
        try:
            got = one_round(folder, rng, window_s)
        except AssertionError as error:
            wrong += 1
            print(f"round {number + 1} is WRONG: {error}", file=sys.stderr)
            continue
        torn += bool(got["torn"])
        steps = max(steps, int(str(got["acknowledged"])))
        if sys.stderr.isatty() or number % 50 == 49:
            print(f"round {number + 1} of {rounds}: {torn} kills fell into a save", file=sys.stderr)
    return {
        "trial": "kill -9",
        "rounds": rounds,
        "seed": seed,
        "wrong": wrong,
        "kills_inside_a_save": torn,
        "steps_acknowledged": steps,
        "seconds": round(time.monotonic() - began, 1),
    }


if __name__ == "__main__":
    command(__doc__, lambda scratch, rounds, seed: run(scratch / "run", rounds, seed))
