"""A small core that does what policies ask, late and not always, as far as the promises allow it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from stepwell.policies.base import Cancel, CheckpointView, Committed, Drop, Event, Flush, Move, Opened, Policy, View
from stepwell.promises import refusal
from tests.policies.views import PARTS, TIERS, checkpoint, view

FIRST = "nvme"  # where saves become durable


class Core:
    """Saves go to host and nvme; flushes are done when the test says so."""

    def __init__(self, policies: Sequence[Policy]) -> None:
        self.policies = policies
        self.there: dict[str, CheckpointView] = {}
        self.promised: dict[tuple[str, str], frozenset[str] | None] = {}  # in the order in which they were asked for
        self.running: set[tuple[str, str]] = set()
        self.arrived: list[tuple[int, str, frozenset[str]]] = []  # (step, tier, parts) of flushes that were done
        self.wall, self.made = 0.0, 0

    def view(self) -> View:
        idle = [tier for tier in TIERS if not any(there == tier for _, there in self.promised)]
        return view(*self.there.values(), promised=self.promised, running=self.running, idle=idle, wall=self.wall)

    def happen(self, event: Event) -> int:
        """Tells all policies, and does what they answer; returns how many moves that were."""
        done = 0
        for policy in self.policies:
            for move in policy.decide(event, self.view()):
                if refusal(move, self.view()) is None:
                    self._carry_out(move)
                    done += 1
        return done

    def _carry_out(self, move: Move) -> None:
        key = move.checkpoint, move.tier
        if isinstance(move, Cancel):
            del self.promised[key]
        elif isinstance(move, Flush):
            assert move.parts is None or move.parts == tuple(sorted(move.parts))
            before = self.promised.get(key, frozenset())
            self.promised[key] = None if move.parts is None or before is None else before | frozenset(move.parts)
        elif isinstance(move, Drop):
            promises = [promise for promise in self.promised if promise[0] == move.checkpoint]
            lasting = [promise for promise in promises if self.sources(*promise) - {"host"}]
            self.remove(*key)
            assert all(self.sources(*promise) - {"host"} for promise in lasting), "no source is left"

    def save(self, step: int, *, made: float = 0.0, metrics: Mapping[str, float] | None = None) -> str:
        self.made += 1
        self.wall = max(self.wall, made)
        saved = checkpoint(step, ["host", FIRST], name=f"{step}.{self.made}", made=made, metrics=metrics)
        self.there[saved.name] = saved
        self.happen(Committed(saved.name, FIRST))
        return saved.name

    def finish(self, name: str, tier: str) -> None:
        """A flush is done."""
        assert self.sources(name, tier), "no source is left"
        parts, c = self.promised.pop((name, tier)), self.there[name]
        self.running.discard((name, tier))
        now = c.parts if parts is None else c.parts_on.get(tier, frozenset()) | (parts & c.parts)
        whole = frozenset([tier]) if now == c.parts else frozenset()
        self.there[name] = replace(
            c, complete_on=c.complete_on | whole, partial_on=(c.partial_on | {tier}) - c.complete_on - whole,
            parts_on={**c.parts_on, tier: now},
        )  # fmt: skip
        self.arrived.append((c.step, tier, now))
        self.happen(Committed(name, tier))

    def sources(self, name: str, tier: str) -> set[str]:
        """The tiers from which a promised flush can be made."""
        c, parts = self.there[name], self.promised[name, tier]
        wanted = c.parts if parts is None else parts & c.parts
        return {other for other, there in c.parts_on.items() if other != tier and wanted <= there}

    def evict(self, name: str) -> None:
        """Host memory loses a copy; flushes that had no other source fail."""
        mine = [key for key in self.promised if key[0] == name]
        for key in [key for key in mine if self.sources(*key) == {"host"}]:
            del self.promised[key]
            self.running.discard(key)
        self.remove(name, "host")

    def finish_all(self) -> None:
        """All flushes, in the order in which they were asked for, and those that follow from them."""
        for _ in range(1000):
            if not self.promised:
                return
            self.finish(*next(iter(self.promised)))
        raise AssertionError("flushes follow from flushes without end")

    def remove(self, name: str, tier: str) -> None:
        c = self.there[name]
        left = {other: parts for other, parts in c.parts_on.items() if other != tier}
        gone = {tier}
        self.there[name] = replace(
            c, complete_on=c.complete_on - gone, partial_on=c.partial_on - gone, parts_on=left
        )  # fmt: skip
        if not left:
            del self.there[name]

    def restart(self) -> None:
        """The process dies: what is in its memory and in its queues is lost."""
        self.promised.clear()
        self.running.clear()
        for name, c in list(self.there.items()):
            if "host" in c.complete_on:
                self.remove(name, "host")
        self.happen(Opened())

    def on(self, tier: str) -> list[int]:
        """Steps of the complete ones that count."""
        return [c.step for c in self.view().on(tier)]

    def sent(self, tier: str, part: str) -> list[int]:
        """Steps whose flush has brought a part to a tier, in step order."""
        return sorted({step for step, there, parts in self.arrived if there == tier and part in parts})


assert set(PARTS) == checkpoint(1).parts
