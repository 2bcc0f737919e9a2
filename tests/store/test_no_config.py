"""What a store does when nobody has configured anything: memory it takes, words it says, steps it understands."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

import stepwell
from stepwell.tiers.host import KEEP_FIRST_BYTES
from tests.store.helpers import state

MIB = 1 << 20


def test_a_small_state_does_not_fill_memory_with_its_past(tmp_path: Path) -> None:
    small = {"w": torch.zeros(3 * MIB, dtype=torch.uint8)}
    with stepwell.open(tmp_path / "run") as store:
        for step in range(40):
            store.save(step, small).wait()
        assert 0 < store.status().tier("host").used_bytes <= KEEP_FIRST_BYTES
        assert 39 in [c.step for c in store.checkpoints() if "host" in c.tiers]


def test_a_larger_state_gets_room_for_two(tmp_path: Path) -> None:
    large = {"w": torch.zeros(100 * MIB, dtype=torch.uint8)}
    with stepwell.open(tmp_path / "run") as store:
        for step in range(4):
            store.save(step, large).wait()
        assert 100 * MIB < store.status().tier("host").used_bytes <= 2 * large["w"].nbytes + 8 * MIB


def test_the_first_save_says_how_many_more_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "stepwell"), stepwell.open(tmp_path / "run") as store:
        store.save(1, state()).wait()
        store.save(2, state()).wait()
    said = [record for record in caplog.records if "more of this size fit" in record.getMessage()]
    assert [record.levelno for record in said] == [logging.INFO]
    assert "step 1 is on disk" in said[0].getMessage()


def test_steps_of_numpy_are_steps(tmp_path: Path) -> None:
    with stepwell.open(tmp_path / "run") as store:
        store.save(np.int64(5), state()).wait()
        store.prefetch(np.int64(5)).wait(timeout=60)
        found = store.restore(state(0.0), np.int32(5))
        assert found is not None and found.step == 5
