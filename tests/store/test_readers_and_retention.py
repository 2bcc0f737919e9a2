"""Readers beside a writer whose retention deletes: 40 restores (`tests/campaign/readers.py` does 1,000)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.store.trials import run_trial


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_reader_sees_a_whole_checkpoint_or_hears_that_it_is_gone(tmp_path: Path) -> None:
    """From a tier that frees deleted files at once, from one that waits a moment, and from both."""
    result = run_trial("readers", tmp_path, "--rounds", "40", "--seed", "11")
    outcomes = result["outcomes"]
    assert result["wrong"] == 0 and sum(outcomes.values()) == 40
    assert outcomes["restored"] and outcomes["loaded"]
    assert result["deleted"]["disk"] and result["deleted"]["pfs"], "nothing was deleted: this trial shows nothing"
