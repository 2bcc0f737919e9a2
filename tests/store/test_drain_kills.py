"""A drain killed three times at random moments (`tests/campaign/drains.py` does twenty)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stepwell.tiers.base import CHUNK_BYTES

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_drain_writes_at_most_a_chunk_again(tmp_path: Path) -> None:
    """And 2 % of the checkpoint, however often it is killed; what arrives is what was saved."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.campaign.drains", "--kills", "3", "--seed", "5", "--dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    assert result["wrong"] == 0
    assert result["written_again_bytes"] <= 0.02 * result["checkpoint_bytes"] + 3 * CHUNK_BYTES
    first, *_, last = result["by_process"]
    assert first > 0 and last < result["checkpoint_bytes"], "the last process began anew"
