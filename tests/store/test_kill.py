"""Twenty kills at random moments (`make campaign` does 500), in a process of its own that can fork."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kill_at_random_moments(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.campaign.kill9", "--rounds", "20", "--seed", "7", "--dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    assert result["rounds"] == 20 and result["wrong"] == 0
    assert result["kills_inside_a_save"] > 0, "no kill fell into a save: this trial shows nothing"
