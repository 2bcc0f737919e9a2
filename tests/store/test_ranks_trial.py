"""Some jobs of two ranks under policies drawn at random (`make campaign` does 200), with faults and pauses."""

from pathlib import Path

import pytest

from tests.store.trials import run_trial


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_rank_waits_for_another_in_vain(tmp_path: Path) -> None:
    result = run_trial("ranks", tmp_path, "--jobs", "5", "--seed", "12")
    assert result["wrong"] == 0 and result["saves"] > 50
