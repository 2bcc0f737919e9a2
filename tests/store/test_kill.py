"""Twenty kills at random moments (`make campaign` does 500), in a process of its own that can fork."""

from pathlib import Path

import pytest

from tests.store.trials import run_trial


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kill_at_random_moments(tmp_path: Path) -> None:
    result = run_trial("kill9", tmp_path, "--rounds", "12", "--seed", "7")
    assert result["rounds"] == 12 and result["wrong"] == 0
    assert result["kills_inside_a_save"] > 0, "no kill fell into a save: this trial shows nothing"
