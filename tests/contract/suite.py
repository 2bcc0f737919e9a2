"""The conformance suite: what every driver must do, run against each of them.

For a driver of yours: write a `Place` for it, subclass `TierContract` with a fixture `place` that returns one,
and run pytest:

    from tests.contract.suite import Place, TierContract

    class MyPlace(Place):
        def make(self, *, capacity_bytes: int | None = None) -> Tier:
            return MyTier(capacity_bytes=capacity_bytes)
        ...  # peek, poke, remove, peek_record, reality

    class TestMine(TierContract):
        @pytest.fixture
        def place(self) -> Place:
            return MyPlace()

`TierInfo` and the place's fields choose the tests; nothing is skipped by a driver's name.
A place looks at the medium behind the driver's back, so that a writing bug and its matching reading bug
cannot hide each other. `test_memory_tier.py` has the shortest place. The modules beside this one hold the tests
by subject; import from here.
"""

from __future__ import annotations

import pytest

from tests.contract._books import BooksContract
from tests.contract._bytes import BytesContract
from tests.contract._commits import CommitContract
from tests.contract._ends import EndsContract
from tests.contract._place import (
    CHECKPOINT,
    LENGTHS,
    MANIFEST,
    NEW,
    NEW_MANIFEST,
    OTHER,
    SHARD,
    Memory,
    Place,
    chunks_of,
    data_of,
    found,
    get,
    perform,
    put,
    save,
)
from tests.contract._resume import ResumeContract

__all__ = [
    "CHECKPOINT",
    "LENGTHS",
    "MANIFEST",
    "NEW",
    "NEW_MANIFEST",
    "OTHER",
    "SHARD",
    "Memory",
    "Place",
    "TierContract",
    "chunks_of",
    "data_of",
    "found",
    "get",
    "perform",
    "put",
    "save",
]


class TierContract(BytesContract, CommitContract, BooksContract, ResumeContract, EndsContract):
    """Subclass it and give a fixture `place`."""

    @pytest.fixture
    def place(self) -> Place:
        pytest.fail("a subclass gives the place")
