"""Ranges of steps in references, and what a reference to several checkpoints means where only one fits."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stepwell
from stepwell import refs
from stepwell.errors import CheckpointNotFound


@given(st.none() | st.integers(0, 10**12), st.none() | st.integers(0, 10**12))
def test_a_range_is_read_as_it_was_written(first: int | None, last: int | None) -> None:
    text = f"{'' if first is None else first}..{'' if last is None else last}"
    expected = None if first is None and last is None else (first or 0, last)
    assert refs.step_range(text) == expected


@given(st.text(alphabet="0123456789.-+ abc:"))
def test_what_is_no_range_is_none(text: str) -> None:
    head, dots, tail = text.partition("..")
    looks = bool(dots) and (head + tail).isdecimal()
    assert (refs.step_range(text) is not None) == looks


def test_load_wants_one_checkpoint(run: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="several"):
        stepwell.load(f"{run}@..5")


def test_only_a_reference_with_an_at_selects(run: Path) -> None:
    assert not refs.find(run).selected and refs.find(f"{run}@latest").selected
