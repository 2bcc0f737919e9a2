"""Leaving the interpreter, again and again: every save is whole, and nothing is noisy, aborts or hangs.

python -m tests.campaign.exits --rounds 200 --dir SCRATCH
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

import stepwell
from tests.campaign.command import command
from tests.store.scripts import Scripts
from tests.store.test_exit import AGAIN, OPEN


def one_round(scripts: Scripts, folder: Path, way: str) -> float:
    """Seconds that the script took. Raises AssertionError if it ended in any other way than silently and whole."""
    folder.mkdir()
    ended = scripts.run(OPEN + AGAIN[way], folder)
    assert (ended.status, ended.err) == (0, ""), ended
    assert torch.equal(stepwell.load(folder / "run")["w"], torch.arange(3_000_000))
    return ended.seconds


def run(folder: Path, rounds: int) -> dict[str, object]:
    """All rounds of all ways; returns the totals."""
    scripts, wrong, longest_s, began = Scripts(folder), 0, 0.0, time.monotonic()
    for way in AGAIN:
        for number in range(rounds):
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                try:
                    longest_s = max(longest_s, one_round(scripts, Path(scratch) / "round", way))
                except AssertionError as error:
                    wrong += 1
                    print(f"{way}, round {number + 1} is WRONG: {error}", file=sys.stderr)
    scripts.close()
    return {
        "trial": "exits",
        "rounds": rounds * len(AGAIN),
        "wrong": wrong,
        "longest_s": round(longest_s, 2),
        "seconds": round(time.monotonic() - began, 1),
    }


if __name__ == "__main__":
    # whoever starts this in the background has SIGINT ignored, and so would the scripts that send it to themselves
    signal.signal(signal.SIGINT, signal.default_int_handler)
    command(__doc__, run, seeded=False)
