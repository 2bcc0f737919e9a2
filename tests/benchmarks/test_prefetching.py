"""The prefetching benchmark on tiny models, so that it cannot rot; and its optimum."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import prefetching
from benchmarks.prefetching import MIB, optimum_bytes


def test_a_tiny_sequence_is_replayed_and_cleaned_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--dir", str(tmp_path), "--models", "3", "--mib", "16", "--loads", "5", "--share", "0.5", "--seeds", "1"]
    assert prefetching.main(options) == 0
    text = capsys.readouterr().out
    assert "| at once | 1." in text and "| paced | 1." in text
    assert not list(tmp_path.iterdir())


def test_the_optimum_knows_the_future() -> None:
    sizes = [2 * MIB, 2 * MIB, MIB + 5]
    assert optimum_bytes(sizes, [0, 0, 0], 2) == 2 * MIB
    assert optimum_bytes(sizes, [0, 1, 0, 1], 4) == 4 * MIB
    assert optimum_bytes(sizes, [0, 1, 0], 2) == 4 * MIB  # 1 passes: what it would push out is used again
    assert optimum_bytes(sizes, [0, 2, 0], 2) == 3 * MIB + 5
    assert optimum_bytes(sizes, [0, 1, 0, 1], 2) == 6 * MIB
