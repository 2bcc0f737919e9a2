"""Twenty kills of owners and readers of shared memory (`make campaign` does 300), in a process that can fork."""

from pathlib import Path

import pytest

from tests.store.trials import run_trial


@pytest.mark.slow
@pytest.mark.parametrize("seed", [5, 6])
def test_kill_owners_and_readers_at_random_moments(tmp_path: Path, seed: int) -> None:
    result = run_trial("hosts", tmp_path, "--rounds", "5", "--seed", str(seed))
    assert result["rounds"] == 5 and result["wrong"] == 0 and result["left"] == []
    assert result["steps_acknowledged"] > 0, "nothing was ever in memory: this trial shows nothing"
