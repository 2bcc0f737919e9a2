"""Flush and retention side by side, with a small core that does what they ask, late and not always.

Of what the real core checks before a drop, this one checks that no flush of the checkpoint is still promised.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stepwell.policies.base import CheckpointView, Closing, Committed, Drop, Event, Flush, Opened, Policy, View
from stepwell.policies.flush import FlushAll
from stepwell.policies.retain import KeepLast
from tests.policies.views import checkpoint, view

LAST_NVME, LAST_PFS = 2, 3


class Chain(RuleBasedStateMachine):
    """Saves go to host, flushes to nvme and pfs; host copies vanish at random, as eviction takes them."""

    def __init__(self) -> None:
        super().__init__()
        rules: list[Policy] = [
            FlushAll("nvme"),
            FlushAll("pfs"),
            KeepLast("nvme", LAST_NVME),
            KeepLast("pfs", LAST_PFS),
        ]
        self.policies = rules
        self.there: dict[str, CheckpointView] = {}
        self.promised: set[tuple[str, str]] = set()
        self.flushed: set[tuple[str, str]] = set()
        self.step = 0
        self.made = 0

    def view(self) -> View:
        return view(*self.there.values(), promised=self.promised)

    def happen(self, event: Event) -> None:
        for policy in self.policies:
            for move in policy.decide(event, self.view()):
                if isinstance(move, Flush):
                    assert (move.checkpoint, move.tier) not in self.promised
                    assert (move.checkpoint, move.tier) not in self.flushed, "flushed, deleted and flushed again"
                    self.promised.add((move.checkpoint, move.tier))
                else:
                    self.drop(move)

    def drop(self, move: Drop) -> None:
        there = self.there[move.checkpoint]
        assert move.tier in there.complete_on and not there.abandoned
        newest = max(self.view().on(move.tier), key=lambda c: c.step)
        assert newest.name != move.checkpoint
        if not any(name == move.checkpoint for name, _ in self.promised):
            self.place(move.checkpoint, there.complete_on - {move.tier})

    def place(self, name: str, on: frozenset[str]) -> None:
        self.there[name] = replace(self.there[name], complete_on=on)
        if not on:
            del self.there[name]

    @rule(ahead=st.integers(1, 100))
    def save(self, ahead: int) -> None:
        self.step, self.made = self.step + ahead, self.made + 1
        made = checkpoint(self.step, ["host"], name=f"{self.step}.{self.made}")
        self.there[made.name] = made
        self.happen(Committed(made.name, "host"))

    @precondition(lambda self: self.promised)
    @rule(data=st.data(), fails=st.booleans())
    def flush_ends(self, data: st.DataObject, fails: bool) -> None:
        name, tier = data.draw(st.sampled_from(sorted(self.promised)))
        self.promised.remove((name, tier))
        if not fails:
            self.flushed.add((name, tier))
            self.place(name, self.there[name].complete_on | {tier})
            self.happen(Committed(name, tier))

    def evictable(self) -> list[str]:
        return [c.name for c in self.there.values() if c.complete_on > {"host"}]

    @precondition(lambda self: self.evictable())
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.evictable()))
        self.place(name, self.there[name].complete_on - {"host"})

    def current(self) -> list[CheckpointView]:
        return [c for c in self.there.values() if not c.abandoned]

    @precondition(lambda self: self.current())
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        to = data.draw(st.sampled_from(self.current())).step
        for c in self.current():
            if c.step > to:
                self.there[c.name] = replace(c, abandoned=True)
        self.step = to
        self.flushed.clear()  # what was deleted as too old may be the newest again
        self.promised = {(name, tier) for name, tier in self.promised if not self.there[name].abandoned}

    @rule()
    def start_again(self) -> None:
        self.promised.clear()
        for name, c in list(self.there.items()):
            self.place(name, c.complete_on - {"host"})
        self.happen(Opened())

    @invariant()
    def closing_now_would_bring_the_newest_down(self) -> None:
        if self.current():
            newest = max(self.current(), key=lambda c: c.step)
            asked = [m.checkpoint for m in FlushAll("pfs").decide(Closing(), self.view())]
            assert "pfs" in newest.complete_on or (newest.name, "pfs") in self.promised or asked == [newest.name]

    def teardown(self) -> None:
        """With every flush done, nothing more is asked for and each tier holds what its rule says."""
        self.happen(Opened())
        while self.promised:
            name, tier = min(self.promised)
            self.promised.remove((name, tier))
            self.flushed.add((name, tier))
            self.place(name, self.there[name].complete_on | {tier})
            self.happen(Committed(name, tier))
        self.happen(Opened())
        assert not self.promised
        assert len(self.view().on("nvme")) <= LAST_NVME
        assert len(self.view().on("pfs")) <= LAST_PFS
        if self.current():
            assert "pfs" in max(self.current(), key=lambda c: c.step).complete_on


TestChain = Chain.TestCase
TestChain.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
