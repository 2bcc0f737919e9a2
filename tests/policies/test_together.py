"""All policies side by side, under a small core that does what they ask, late and not always."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stepwell.policies.base import CheckpointView, Closing, Event, Idle, Noted, Opened, Policy, Pressure, View
from stepwell.policies.flush import DropBacklog, FlushNewest, FlushRule
from stepwell.policies.retain import Best, Retain
from tests.policies.core import Core
from tests.policies.views import TIERS, views

BEST = [Best("acc", "max", 1)]
CONFIGS: dict[str, Callable[[], list[Policy]]] = {
    "all": lambda: [FlushRule("pfs"), Retain("nvme", last=2), Retain("pfs", last=3)],
    "two cadences": lambda: [
        FlushRule("pfs", every_steps=10, parts=["model"]), FlushRule("pfs", every_steps=40), Retain("nvme", last=2),
        Retain("pfs", last=2, every_steps=100, best=BEST),
    ],
    "newest wins": lambda: [
        FlushRule("pfs", newest_wins=True), FlushRule("pfs", every_steps=20, parts=["model"], newest_wins=True),
        DropBacklog(), Retain("nvme", last=1), Retain("pfs", last=2),
    ],
    "no room": lambda: [DropBacklog(), FlushRule("pfs"), Retain("nvme", last=1), Retain("pfs", best=BEST)],
    "idle": lambda: [
        FlushRule("pfs", every_s=100, idle=True), FlushRule("pfs", parts=["sched"], idle=True, newest_wins=True),
        Retain("nvme", last=1), Retain("pfs", newer_than_s=500, every_s=1000),
    ],
    "only the best of some parts": lambda: [
        FlushRule("pfs", parts=["model", "ema"]), Retain("nvme", last=1, tagged=True), Retain("pfs", best=BEST),
    ],
}  # fmt: skip


class Chain(RuleBasedStateMachine):
    """Saves go to host and nvme, flushes to pfs; host copies vanish at random, as eviction takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.core, self.step, self.closed = Core([]), 0, False
        self.newest_on: dict[str, int] = {}  # tier -> the newest complete step there since the last rewind

    @initialize(name=st.sampled_from(sorted(CONFIGS)))
    def configure(self, name: str) -> None:
        self.core = Core([*CONFIGS[name](), FlushNewest("pfs")])

    @rule(ahead=st.integers(1, 30), later=st.integers(-200, 200), acc=st.none() | st.integers(0, 3).map(float))
    def save(self, ahead: int, later: int, acc: float | None) -> None:
        self.step += ahead
        made = max((c.made for c in self.core.there.values()), default=1000.0) + later
        self.core.save(self.step, made=made, metrics={} if acc is None else {"acc": acc})

    @precondition(lambda self: self.core.promised)
    @rule(data=st.data(), how=st.sampled_from(["begins", "fails", "ends", "ends"]))
    def flush(self, data: st.DataObject, how: str) -> None:
        promise = data.draw(st.sampled_from(sorted(self.core.promised)))
        self.core.running.add(promise)
        if how == "ends":
            self.core.finish(*promise)
        elif how == "fails":
            self.core.running.discard(promise)
            self.core.promised.pop(promise)

    @precondition(lambda self: not self.core.promised)
    @rule()
    def idle(self) -> None:
        self.core.happen(Idle("pfs"))

    @rule()
    def no_room(self) -> None:
        self.core.happen(Pressure("nvme"))
        if any(isinstance(policy, DropBacklog) for policy in self.core.policies):
            here = {c.name for c in self.line() if "nvme" in c.parts_on}
            waiting = [key for key in self.core.promised if key[0] in here and key not in self.core.running]
            kinds = [self.core.promised[key] for key in waiting]
            assert len(kinds) == len(set(kinds)), "of each kind of flush only the newest waits"

    @precondition(lambda self: self.core.there)
    @rule(data=st.data(), acc=st.integers(0, 3), kept=st.booleans())
    def note(self, data: st.DataObject, acc: int, kept: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.core.there)))
        self.core.there[name] = replace(self.core.there[name], metrics={"acc": float(acc)}, kept=kept)
        self.core.happen(Noted(name))
        assert not kept or name in self.core.there

    @precondition(lambda self: any("host" in c.complete_on for c in self.core.there.values()))
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        found = sorted(c.name for c in self.core.there.values() if "host" in c.complete_on)
        self.core.evict(data.draw(st.sampled_from(found)))

    @precondition(lambda self: self.durable())
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        to = data.draw(st.sampled_from(self.durable()))
        for c in self.line():
            if c.step > to:
                self.core.there[c.name] = replace(c, abandoned=True)
        self.step = to
        self.newest_on.clear()

    @rule()
    def start_again(self) -> None:
        self.core.restart()

    def line(self) -> list[CheckpointView]:
        return self.core.view().line()

    def durable(self) -> list[int]:
        return [c.step for c in self.line() if c.complete_on & {"nvme", "pfs"}]

    @invariant()
    def the_newest_is_whole_and_lasts(self) -> None:
        if self.line():
            assert self.line()[-1].step == self.step
            assert self.line()[-1].complete_on & {"nvme", "pfs"}

    @invariant()
    def no_tier_loses_its_newest(self) -> None:
        safe = {"nvme": ("nvme", "pfs"), "pfs": ("pfs",)}
        for tier, places in safe.items():
            now = max((step for place in places for step in self.core.on(place)), default=None)
            assert tier not in self.newest_on or (now is not None and now >= self.newest_on[tier])
            if now is not None:
                self.newest_on[tier] = now

    @invariant()
    def what_is_promised_has_a_source(self) -> None:
        assert all(self.core.sources(*promise) for promise in self.core.promised)

    @invariant()
    def closing_now_would_bring_the_newest_down(self) -> None:
        if self.line():
            newest = self.line()[-1]
            asked = [move.checkpoint for move in FlushNewest("pfs").decide(Closing(), self.core.view())]
            promised = self.core.promised.get((newest.name, "pfs"), frozenset()) is None
            assert "pfs" in newest.complete_on or promised or asked == [newest.name]

    def teardown(self) -> None:
        """With every flush done there comes a rest, at which nothing more is asked for, and the newest is down."""
        for _ in range(20):
            moves = self.core.happen(Opened()) + self.core.happen(Idle("pfs"))
            self.core.finish_all()
            if not moves:
                break
        else:
            raise AssertionError("policies never come to rest: what one deletes the other sends again")
        self.core.happen(Closing())
        self.core.finish_all()
        if self.line():
            assert "pfs" in self.line()[-1].complete_on


TestChain = Chain.TestCase
TestChain.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


@given(views(), st.sampled_from(sorted(CONFIGS)), st.data())
def test_the_same_question_gets_the_same_answer_and_changes_nothing(seen: View, name: str, data: st.DataObject) -> None:
    events: list[Event] = [Opened(), Closing(), Idle("pfs"), Pressure("nvme")]
    event = data.draw(st.sampled_from([*events, *(Noted(c.name) for c in seen.checkpoints)]))
    before = copy.deepcopy(seen)
    for policy in [*CONFIGS[name](), *(FlushNewest(tier) for tier in TIERS)]:
        said = vars(policy).copy()
        assert policy.decide(event, seen) == policy.decide(event, seen)
        assert seen == before and vars(policy) == said
