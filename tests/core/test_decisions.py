"""What rank 0 has decided, on the other ranks: in its order, and never of what is not committed there yet."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell import decisions
from stepwell.decisions import Decisions
from stepwell.format.names import Attempt
from stepwell.jobs import Job, LocalStore
from stepwell.policies.base import Cancel, Flush
from tests.core.virtual import on_virtual_time, turns

NAMES = [Attempt(1, call, 10 * call).folder for call in (1, 2, 3)]


class Rank:
    """One rank's side, with saves that the test moves on."""

    def __init__(self, rank: int, store: Any, patience_s: float = 60.0, world: int = 2) -> None:
        chain: Any = SimpleNamespace(
            run="run", settings=SimpleNamespace(open_number=0, rank_timeout_seconds=patience_s)
        )
        chain.catalog = self
        writership = SimpleNamespace(epoch=1)
        owner: Any = SimpleNamespace(taken=True, job=Job(rank, world, store, None, 0), writership=writership)
        self.names: set[str] = set()
        self.moves: list[Flush | Cancel] = []
        self.saving: set[str] = set()
        self.committed: set[str] = set()
        self.decisions = Decisions(chain, owner, self.carry_out)
        self.decisions.saving, self.decisions.committed = lambda: self.saving, lambda: self.committed & self.saving
        self.decisions.begin()

    @property
    def holdings(self) -> set[Attempt]:
        return {attempt for name in self.committed if (attempt := Attempt.parse(name)) is not None}

    def carry_out(self, move: Flush | Cancel, name: str) -> None:
        assert name not in self.names, "each decision has a name of its own"
        self.names.add(name)
        assert move.checkpoint not in self.saving - self.committed
        self.moves.append(move)

    def end(self, name: str) -> None:
        self.saving.discard(name)
        self.decisions.ended(name)


flushes = st.builds(Flush, st.sampled_from(NAMES), st.just("far"), st.just("why"), st.sampled_from([None, ("model",)]))
cancels = st.builds(Cancel, st.sampled_from(NAMES), st.just("far"), st.just("why"))
told = st.tuples(st.just("tell"), flushes | cancels) | st.tuples(st.just("saved"), st.sampled_from(NAMES))
done = st.tuples(st.sampled_from(["save", "commit", "end", "turns"]), st.sampled_from(NAMES))


@given(st.lists(told | done, max_size=30))
@settings(max_examples=200, deadline=None)
def test_the_other_ranks_do_the_same_in_the_same_order(plan: list[tuple[str, Any]]) -> None:
    async def play() -> None:
        store = LocalStore()
        leader, other = Rank(0, store), Rank(1, store)
        sent: list[Flush | Cancel] = []
        said: set[str] = set()
        for what, which in plan:
            if what == "tell":
                leader.decisions.tell(which)
                sent.append(which)
            elif what == "saved":
                leader.decisions.tell_saved(which)
                said.add(which)
            elif what == "save" and which not in said:  # rank 0 commits nothing before all have begun it
                other.saving.add(which)
            elif what == "commit":
                other.committed.add(which)
            elif what == "end" and which in other.saving:
                other.end(which)
            await turns(10 if what == "turns" else 1)
        step = asyncio.ensure_future(other.decisions.in_step())
        await turns(20)
        assert step.done() == (other.committed & other.saving <= said)
        for name in NAMES:
            leader.decisions.tell_saved(name)
            other.end(name)
        await asyncio.wait_for(step, 5)
        await turns(20)
        for name in NAMES:
            assert [m for m in other.moves if m.checkpoint == name] == [m for m in sent if m.checkpoint == name]
        other.decisions.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decisions, "NEAR_S", 0.0)
        patch.setattr(decisions, "FAR_S", 0.0)
        on_virtual_time(play)


def test_rank_0_says_what_follows_of_a_save_that_failed_there() -> None:
    async def play() -> None:
        store = LocalStore()
        leader, other = Rank(0, store), Rank(1, store)
        for rank in (leader, other):
            rank.saving.add(NAMES[0])
        other.committed.add(NAMES[0])
        step = asyncio.ensure_future(other.decisions.in_step())
        await asyncio.sleep(0.1)
        assert not step.done()
        leader.end(NAMES[0])
        await asyncio.wait_for(step, 5)
        other.decisions.close()

    on_virtual_time(play)


def test_the_end_is_waited_for_once() -> None:
    async def play() -> None:
        store = LocalStore()
        leader, other = Rank(0, store), Rank(1, store)
        leader.decisions.tell_closing(NAMES[0])
        newest = Attempt.parse(NAMES[1])
        assert newest is not None
        end = asyncio.ensure_future(other.decisions.closing(newest))
        await asyncio.sleep(0.1)
        assert not end.done()  # an earlier drain's
        leader.decisions.tell_closing(NAMES[1])
        await asyncio.wait_for(end, 5)
        await asyncio.wait_for(other.decisions.closing(newest), 0.01)
        other.decisions.close()

    on_virtual_time(play)


def test_a_rank_0_that_is_closed_is_waited_for_no_more() -> None:
    async def play() -> None:
        store = LocalStore()
        leader, other = Rank(0, store), Rank(1, store)
        newest = Attempt.parse(NAMES[1])
        assert newest is not None
        leader.decisions.tell_closing(NAMES[0])
        leader.decisions.tell_closed()
        await asyncio.wait_for(other.decisions.closing(newest), 5)  # this rank has something that rank 0 has not
        other.decisions.close()

    on_virtual_time(play)


def test_a_rank_0_that_says_nothing_is_not_waited_for_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        caplog.set_level(logging.WARNING, "stepwell")
        other = Rank(1, LocalStore(), patience_s=0.1)
        other.saving.add(NAMES[0])
        other.committed.add(NAMES[0])
        await asyncio.wait_for(other.decisions.in_step(), 5)
        assert "rank 0 has not said" in caplog.text
        await asyncio.wait_for(other.decisions.in_step(), 0.05)  # nor again
        other.decisions.close()

    on_virtual_time(play)


def test_when_the_jobs_store_has_ended_nobody_waits() -> None:
    async def play() -> None:
        class Ended(LocalStore):
            def poll(self, key: str) -> bytes | None:
                raise RuntimeError("connection reset")

        other = Rank(1, Ended())
        other.saving.add(NAMES[0])
        other.committed.add(NAMES[0])
        await asyncio.wait_for(other.decisions.in_step(), 5)
        assert not other.decisions.follows

    on_virtual_time(play)


def test_a_world_of_one_tells_nobody() -> None:
    async def play() -> None:
        store = LocalStore()
        alone = Rank(0, store, world=1)
        alone.decisions.tell(Flush(NAMES[0], "far", "why"))
        alone.decisions.tell_saved(NAMES[0])
        assert not store._values and not alone.decisions.follows
        await asyncio.wait_for(alone.decisions.in_step(), 0.05)

    on_virtual_time(play)
