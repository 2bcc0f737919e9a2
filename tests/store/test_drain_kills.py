"""A drain killed three times at random moments (`tests/campaign/drains.py` does twenty)."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepwell.tiers.base import CHUNK_BYTES
from tests.store.trials import run_trial


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_drain_writes_at_most_a_chunk_again(tmp_path: Path) -> None:
    """And 2 % of the checkpoint, however often it is killed; what arrives is what was saved."""
    result = run_trial("drains", tmp_path, "--kills", "3", "--seed", "5")
    assert result["wrong"] == 0
    assert result["written_again_bytes"] <= 0.02 * result["checkpoint_bytes"] + 3 * CHUNK_BYTES
    first, *_, last = result["by_process"]
    assert first > 0 and last < result["checkpoint_bytes"], "the last process began anew"
