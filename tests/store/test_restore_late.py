"""Restores from tiers that do not answer in time."""

from __future__ import annotations

import errno
from pathlib import Path

import stepwell
from stepwell.tiers.wrap import Fault
from tests.store.helpers import disk, state


def test_a_tier_that_does_not_answer_in_time_has_no_bad_files(tmp_path: Path) -> None:
    """A process that stood still for long gives calls up that would have been answered."""
    with stepwell.open(run="run", tiers=[disk(tmp_path)]) as store:
        store.save(1, state(3.0)).wait()
    with stepwell.open(run="run", tiers=[disk(tmp_path, [Fault("lease", 1, errno=errno.ETIMEDOUT)])]) as store:
        target = state(0.0)
        found = store.restore(target)
        assert found is not None and found.healed == () and bool((target["model"]["w"] == 3).all())
