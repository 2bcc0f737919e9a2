"""The rows of the arena's index: a fixed layout, and a generation that tells one filling from another."""

from __future__ import annotations

import os

import numpy as np
import pytest

from stepwell.tiers._index import ROW, Index, SlotState, name_of


def test_the_layout_is_the_one_that_other_processes_will_read() -> None:
    fields = ROW.fields
    assert fields is not None and ROW.itemsize == 40
    assert {name: (str(kind[0]), kind[1]) for name, kind in fields.items()} == {
        "generation": ("uint64", 0),
        "shard": ("|V16", 8),
        "chunk": ("uint32", 24),
        "length": ("uint32", 28),
        "owner": ("uint32", 32),
        "state": ("uint8", 36),
        "dirty": ("uint8", 37),
        "pad": ("|V2", 38),
    }
    assert [state.value for state in SlotState] == [0, 1, 2]


def test_a_slot_passes_through_its_states_and_each_filling_has_a_generation() -> None:
    index = Index(2)
    for generation in (1, 2, 3):
        index.filling(1, name_of("shard"), 7, 100 + generation, dirty=generation < 3)
        row = index.rows[1]
        assert index.state(1) == SlotState.FILLING
        assert (row["generation"], row["chunk"], row["length"], row["owner"]) == (
            generation, 7, 100 + generation, os.getpid(),
        )  # fmt: skip
        assert bytes(row["shard"]).hex() == name_of("shard") and row["dirty"] == (generation < 3)
        index.filled(1)
        assert index.state(1) == SlotState.FILLED
        index.clean(1)
        assert not row["dirty"]
        index.free(1)
        assert index.state(1) == SlotState.FREE and index.rows[1]["generation"] == generation
    assert index.state(0) == SlotState.FREE and index.rows[0]["generation"] == 0


def test_only_a_slot_that_is_being_filled_can_be_filled() -> None:
    index = Index(1)
    with pytest.raises(AssertionError):
        index.filled(0)


def test_growing_keeps_the_rows_and_never_loses_any() -> None:
    index = Index(2)
    index.filling(1, name_of("shard"), 0, 1)
    before = index.rows.tobytes()
    index.grow(5)
    assert len(index.rows) == 5 and index.rows[:2].tobytes() == before
    assert not np.any(index.rows[2:]["state"])
    index.grow(3)
    assert len(index.rows) == 5


def test_names_tell_shards_apart() -> None:
    assert len({name_of(key) for key in ("a", "b", ("a", 1), "\udc80")}) == 4
    assert {len(name_of(key)) for key in ("", "x" * 1000)} == {32}
