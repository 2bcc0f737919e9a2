"""Readers beside a writer that deletes: each restore is whole and right, or says that the checkpoint is gone.

One process saves as fast as it can, on a disk and on a shared tier, and each of them keeps the last two checkpoints:
the disk frees deleted files at once, the shared tier after a short grace. Another process opens the run for reading,
by both tiers or by one of them, and restores or loads the newest checkpoint, one that it has just seen listed, or one
that may never have been there. Every tensor tells its step in every byte.

    python -m tests.campaign.readers --rounds 1000 --seed 1 --dir SCRATCH
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

import stepwell
from stepwell.errors import CheckpointGone, CheckpointNotFound, NoGoodCheckpoint
from tests.campaign.command import command
from tests.campaign.kill9 import forked, same

#: elements of the large tensor: a checkpoint is several chunks in three shards, so that deletions fall between reads
SIZE = 2_500_000
#: the longest pause of a reader between its look at what is there and its restore
PAUSE_S = 0.06
#: what words tell that a checkpoint cannot be had because it was deleted, and not because it is bad
GONE = ("gone", "deleted", "no longer", "on no tier", "no checkpoint")

CONFIG = """
[[tier]]
name = "disk"
driver = "file"
path = "{folder}/disk"
retain = {{ last = 2 }}

[[tier]]
name = "pfs"
driver = "pfs"
path = "{folder}/pfs"
flush = [{{ every_steps = 1 }}]
retain = {{ last = 2 }}
delete_grace = "{grace}"
"""


def state_at(step: int) -> dict[str, object]:
    """A state that tells its step in every byte of its tensors."""
    ramp = torch.arange(SIZE, dtype=torch.int32)
    model = {"w": ramp + step, "b": torch.full((9,), float(step))}
    return {"model": model, "optimizer": {"m": ramp[: SIZE // 4] * step}, "step": step}


def blank() -> dict[str, object]:
    zeros = torch.zeros(SIZE, dtype=torch.int32)
    return {"model": {"w": zeros, "b": torch.zeros(9)}, "optimizer": {"m": zeros[: SIZE // 4].clone()}, "step": -1}


def write(config: Path, told: int) -> None:
    """Saves until SIGTERM."""
    going = True

    def stop(number: int, frame: object) -> None:
        nonlocal going
        going = False

    signal.signal(signal.SIGTERM, stop)
    deleted, step = Counter[str](), 0
    with stepwell.open(config, run="run") as store:
        store._writer.events.listeners.append(lambda entry: deleted.update([entry.tier] * (entry.what == "deleted")))
        while going:
            step += 1
            store.save(step, state_at(step)).wait("pfs", timeout=120)
            if step == 3:
                os.write(told, b"ready\n")
    os.write(told, json.dumps({"steps": step, **deleted}).encode())


@contextmanager
def writing(config: Path) -> Iterator[dict[str, int]]:
    """A writer at work; at the end, how many steps it saved and how often it deleted a checkpoint on each tier."""
    found: dict[str, int] = {}
    reading, told = os.pipe()
    pid = forked(lambda: write(config, told))
    os.close(told)
    try:
        assert os.read(reading, 64) == b"ready\n", "the writer died by itself"
        yield found
    finally:
        os.kill(pid, signal.SIGTERM)
        with open(reading, "rb") as pipe:
            said = pipe.read()
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "the writer failed"
    found.update(json.loads(said))


def one_round(store: stepwell.CheckpointStore, path: Path, rng: random.Random) -> str:
    """One restore, or one load from the run at `path`, and its outcome. Raises AssertionError if it is neither right
    nor gone."""
    known = [checkpoint.step for checkpoint in store.checkpoints()]
    assert known, "a run that always has a checkpoint had none"
    wanted = rng.choice([None, None, *known, *known, rng.randint(1, known[-1] + 1)])
    load = rng.random() < 0.25
    time.sleep(rng.random() * PAUSE_S)
    try:
        if load:
            state = stepwell.load(f"{path}@{'latest' if wanted is None else wanted}")
            step = int(state["step"])
        else:
            state = blank()
            found = store.restore(state, wanted)
            assert found is not None, "a run that always has a checkpoint had none"
            assert not found.healed, found.healed
            step = found.step
    except NoGoodCheckpoint as error:
        reasons = error.reasons or {0: str(error)}
        assert all(any(word in why for word in GONE) for why in reasons.values()), error
        return "all gone"
    except CheckpointGone:
        return "gone"
    except CheckpointNotFound:
        assert wanted is not None, "the newest checkpoint was not found"
        return "not found"
    assert wanted in (None, step), f"step {wanted} was asked for, {step} came"
    assert same(state, state_at(step)), f"step {step} holds other values"
    return "loaded" if load else "restored"


def read(config: Path, rounds: int, seed: int, told: int) -> None:
    """Restores so many times; tells the outcomes and what was wrong."""
    rng, outcomes, wrong = random.Random(seed), Counter[str](), list[str]()
    root = config.parent
    with ExitStack() as stack:
        paths = [root / tier / "run" for tier in ("disk", "pfs")]
        stores = [stack.enter_context(stepwell.open(path, mode="r")) for path in paths]
        places = list(zip(stores, paths, strict=True))
        places.append((stack.enter_context(stepwell.open(config, run="run", mode="r")), paths[1]))
        for number in range(rounds):
            try:
                outcomes[one_round(*rng.choice(places), rng)] += 1
            except (AssertionError, stepwell.StepwellError) as error:
                wrong.append(f"restore {number + 1}: {type(error).__name__}: {error}")
            if number % 100 == 99:
                print(f"restore {number + 1} of {rounds}: {dict(outcomes)}", file=sys.stderr)
    os.write(told, json.dumps({"outcomes": outcomes, "wrong": wrong[:20], "count": len(wrong)}).encode())


def run(folder: Path, rounds: int, seed: int, grace: str = "200ms") -> dict[str, object]:
    """All rounds; returns the totals."""
    began = time.monotonic()
    for tier in ("disk", "pfs"):
        (folder / tier).mkdir()
    config = folder / "tiers.toml"
    config.write_text(CONFIG.format(folder=folder, grace=grace))
    with writing(config) as deleted:
        reading, told = os.pipe()
        pid = forked(lambda: read(config, rounds, seed, told))
        os.close(told)
        with open(reading, "rb") as pipe:
            said = pipe.read()
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "the reader failed"
    found = json.loads(said)
    for line in found["wrong"]:
        print(f"WRONG: {line}", file=sys.stderr)
    return {
        "trial": "readers",
        "rounds": rounds,
        "seed": seed,
        "grace": grace,
        "wrong": found["count"],
        "outcomes": found["outcomes"],
        "steps_saved": deleted.pop("steps"),
        "deleted": deleted,
        "seconds": round(time.monotonic() - began, 1),
    }


if __name__ == "__main__":
    command(__doc__, run, count=40, grace="200ms")
