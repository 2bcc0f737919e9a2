"""Leaving the interpreter: whatever way a script ends, its newest save is whole and nothing is noisy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import stepwell

ROOT = Path(__file__).parents[2]

HEAD = """
import sys, atexit, threading, time
import torch, stepwell
store = stepwell.open(sys.argv[1])
state = {"w": torch.arange(3_000_000)}
"""

ENDS = {
    "the last line": ("store.save(1, state)", 0),
    "sys.exit": ("store.save(1, state); sys.exit(0)", 0),
    "sys.exit with a code": ("store.save(1, state); sys.exit(3)", 3),
    "an exception": ("store.save(1, state); raise ValueError('mine')", 1),
    "a with block left by an exception": ("with store:\n    store.save(1, state)\n    raise ValueError('mine')", 1),
    "another thread lives longer": (
        "threading.Thread(target=lambda: time.sleep(0.3)).start(); store.save(1, state)",
        0,
    ),
    "a save in an atexit handler": ("atexit.register(lambda: store.save(1, state))", 0),
    "the store is dropped": ("store.save(1, state); del store", 0),
    "closed and saved no more": ("store.save(1, state); store.close()", 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", ENDS)
def test_the_newest_save_outlives_the_script(tmp_path: Path, way: str) -> None:
    code, status = ENDS[way]
    done = subprocess.run(
        [sys.executable, "-c", HEAD + code, str(tmp_path / "run")], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == status, done.stderr
    if status == 1:  # the script's own exception and nothing else
        assert done.stderr.count("Traceback") == 1 and done.stderr.rstrip().endswith("ValueError: mine"), done.stderr
    else:
        assert done.stderr == ""
    assert torch.equal(stepwell.load(tmp_path / "run")["w"], torch.arange(3_000_000))
