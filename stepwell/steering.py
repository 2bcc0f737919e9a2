"""Policies at work: events go in, moves come out, and those that no promise forbids are carried out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from stepwell.chain import Chain, Keep
from stepwell.deletion import Deleter
from stepwell.errors import StepwellError, StoreClosed
from stepwell.events import Outlook
from stepwell.flushing import Flusher, Goal
from stepwell.format.names import Attempt
from stepwell.policies.base import (
    Cancel,
    CheckpointView,
    Closing,
    Committed,
    Drop,
    Event,
    Evicted,
    Flush,
    Found,
    Idle,
    Move,
    Policy,
    Prefetch,
    Pressure,
    Read,
    View,
)
from stepwell.promises import refusal
from stepwell.saving import Save
from stepwell.tiers.base import CheckpointKey, ShardKey, Tier
from stepwell.verification import Verifier
from stepwell.viewing import Views

log = logging.getLogger("stepwell")

#: brings parts of a checkpoint (None: all) to host memory; returns how many bytes they are
Bring = Callable[[Attempt, Sequence[str] | None], Awaitable[int]]


class Steering:
    """Asks the policies of one run. Lives on the event loop."""

    def __init__(
        self,
        chain: Chain,
        policies: Sequence[Policy],
        flushers: dict[str, Flusher],
        deleter: Deleter,
        verifier: Verifier,
        keep: Keep,
    ) -> None:
        self._chain, self._policies, self.flushers, self._keep = chain, policies, flushers, keep
        self._deleter, self._verifier, self._events, self.busy = deleter, verifier, deleter.events, deleter.busy
        self.views = Views(chain.catalog, chain.tiers, chain.clock, flushers)
        self.may_drop: Callable[[str], bool] = lambda tier: True  # whether this rank deletes on that tier
        self.decides = True  # whether this rank says what is flushed, and what is not after all; else `told` does
        self.wanted: Callable[[Flush], str] = lambda move: ""  # tells the other ranks; the decision's name
        self.cancelled: Callable[[Cancel], object] = lambda move: None
        self.in_step: Callable[[], Awaitable[None]] = _at_once  # waits for what is decided elsewhere
        self.leaving = self.views.leaving
        self.bring: Bring | None = None
        self._bringing: dict[tuple[str, str], asyncio.Task[None]] = {}  # (checkpoint, tier) of prefetches under way
        self._idle: set[str] = set()
        self._held_by_readers: set[str] = set()  # checkpoints that policies let go, and somebody reads
        self._deciding: set[asyncio.Task[list[Goal]]] = set()
        for tier in (chain.host, chain.gpu):
            if tier is not None:
                tier.on_uncommitted = partial(self._evicted, tier)

    async def on(self, event: Event) -> list[Goal]:
        """Tells the policies; returns the flushes that follow."""
        if not self._policies:
            return []
        await self.in_step()
        view = await self.views.look()
        goals: list[Goal] = []
        for policy in self._policies:
            for move in policy.decide(event, view):
                made, goal = self._carry_out(move, view)
                goals += [goal] if goal is not None else []
                if made:  # each move is judged by what those before it have changed
                    view = self.views.now()
        return goals

    def soon(self, event: Event) -> None:
        """As `on`, without waiting for what it comes to."""
        deciding = self._keep(self.on(event))
        self._deciding.add(deciding)
        deciding.add_done_callback(self._deciding.discard)

    @property
    def looks_ahead(self) -> bool:
        """Whether some policy prefetches."""
        return any(getattr(policy, "looks_ahead", False) for policy in self._policies)

    async def look_ahead(self, event: Found | Evicted) -> None:
        """Tells the policies that prefetch; also where the run is not this process's to write."""
        view = await self.views.look()
        for policy in self._policies:
            if getattr(policy, "looks_ahead", False):
                for move in policy.decide(event, view):
                    if isinstance(move, Prefetch) and self._carry_out(move, view)[0]:
                        view = self.views.now()

    async def foresee(self, attempt: Attempt, size_bytes: int, parts: Iterable[str]) -> set[str]:
        """The tiers that a checkpoint will be sent to, whole, once it is committed on the first one."""
        return await self._sent_to(attempt, size_bytes, parts, self._chain.first.info.name, calm=True)

    async def goes_down(
        self, attempt: Attempt, size_bytes: int, parts: Sequence[str], before: Callable[[], Sequence[Save]]
    ) -> bool:
        """Whether a checkpoint that is about to be saved goes to the first storage tier, whole, at once. before: saves
        under way, of which that is decided; they may not be anywhere yet."""
        first, host = self._chain.first.info.name, self._chain.tiers[0].info.name
        return first in await self._sent_to(attempt, size_bytes, parts, host, calm=False, before=before)

    async def _sent_to(
        self, attempt: Attempt, size_bytes: int, parts: Iterable[str], tier: str, *, calm: bool,
        before: Callable[[], Sequence[Save]] = tuple,
    ) -> set[str]:  # fmt: skip
        """What policies would do with a checkpoint that has just been committed on a tier. calm: once all else on its
        way has got there."""
        # training may wait for a save that has not begun to copy: no tier is asked what others say of older ones
        view, names = await self.views.look(notes=calm), frozenset(parts)
        known = {checkpoint.name for checkpoint in view.checkpoints}
        beside = [
            _as_on(tier, save.checkpoint or "", save.step, save.nbytes, frozenset(save.parts), view.wall)
            for save in before()
            if save.checkpoint not in known
        ]
        there = _as_on(tier, attempt.folder, attempt.step, size_bytes, names, view.wall)
        tiers = tuple(replace(each, idle=True) for each in view.tiers) if calm else view.tiers
        view = replace(view, tiers=tiers, checkpoints=(*view.checkpoints, *beside, there))
        moves = [move for policy in self._policies for move in policy.decide(Committed(attempt.folder, tier), view)]
        return {
            move.tier
            for move in moves
            if isinstance(move, Flush) and move.checkpoint == attempt.folder and not move.parts
        }

    def _carry_out(self, move: Move, view: View) -> tuple[bool, Goal | None]:
        """Whether it is made, or begun; and the flush's goal."""
        attempt, copy = Attempt.parse(move.checkpoint), (move.checkpoint, move.tier)
        why_not = self._why_not(move, view)
        if attempt is None or why_not is not None:
            log.debug("%s is not done: %s", move, why_not)
            if attempt is not None and isinstance(move, Drop):
                self._events.add("not done", attempt, move.tier, f"{move.reason}; but {why_not}")
            return False, None
        if copy in self.busy:
            return False, None  # it is asked for again at the next event
        if isinstance(move, Flush):
            return (True, self._want(move, attempt)) if self.decides else (False, None)
        if isinstance(move, Prefetch):
            return self._prefetch(move, attempt), None
        if isinstance(move, Cancel):
            return self.decides and self._cancel(move, attempt), None
        if copy in view.promised or not self._chain.catalog.notes.known:
            return False, None  # more of it is on its way there; or nobody knows what is kept
        if not self.may_drop(move.tier):
            return False, None
        self.busy.add(copy)
        self.leaving.add(copy)  # the next move must not count on it
        self._keep(self._drop(move, attempt, self._chain.named(move.tier)))
        return True, None

    def _want(self, move: Flush, attempt: Attempt, name: str | None = None) -> Goal:
        """name: what other ranks know the decision by; None: it is this one's."""
        flusher = self.flushers[move.tier]
        known = len(flusher.goals)
        goal = flusher.want(attempt, move.parts)
        goal.asks.add(self.wanted(move) if name is None else name)
        if len(flusher.goals) > known:
            what = "" if move.parts is None else f" ({', '.join(move.parts)})"
            self._events.add("planned", attempt, move.tier, move.reason + what)
        return goal

    def told(self, move: Flush | Cancel, name: str) -> None:
        """Carries out what another rank has decided, by the name of that."""
        attempt = Attempt.parse(move.checkpoint)
        if attempt is not None and isinstance(move, Flush):
            self._want(move, attempt, name)
        elif attempt is not None:
            self.flushers[move.tier].take_back(attempt, move.reason)

    def _prefetch(self, move: Prefetch, attempt: Attempt) -> bool:
        if self.bring is None:
            return False
        for (_, tier), older in self._bringing.items():
            if tier == move.tier:
                older.cancel()  # this one is wanted now
        copy = (move.checkpoint, move.tier)
        self.views.brought.add(copy)
        self._bringing[copy] = self._keep(self._bring(move, attempt, self.bring))
        return True

    async def _bring(self, move: Prefetch, attempt: Attempt, bring: Bring) -> None:
        copy, began, there = (move.checkpoint, move.tier), self._chain.clock.monotonic(), False
        try:
            size_bytes = await bring(attempt, move.parts)
            took, there = self._chain.clock.monotonic() - began, True
            self._events.add("prefetched", attempt, move.tier, move.reason, size_bytes=size_bytes, seconds=took)
        except StoreClosed:
            pass
        except StepwellError as error:
            self._events.add("not done", attempt, move.tier, f"{move.reason}; but {error}")
        finally:
            if not there:
                self.views.brought.discard(copy)
            if self._bringing.get(copy) is asyncio.current_task():
                del self._bringing[copy]

    def lost(self, shard: Hashable) -> None:
        """Host memory has lost a chunk of a shard."""
        if not isinstance(shard, ShardKey) or self._chain.host is None:
            return
        copy = (shard.checkpoint.attempt, self._chain.host.info.name)
        if copy in self.views.brought and copy not in self._bringing:
            self.views.brought.discard(copy)
            self._keep(self.look_ahead(Evicted(*copy)))

    def _cancel(self, move: Cancel, attempt: Attempt) -> bool:
        if not self.flushers[move.tier].cancel(attempt, move.reason):
            return False
        self.cancelled(move)
        self._events.add("cancelled", attempt, move.tier, move.reason)
        log.warning("step %d does not go to %s: %s", attempt.step, move.tier, move.reason)
        return True

    async def _drop(self, move: Drop, attempt: Attempt, tier: Tier) -> None:
        catalog = self._chain.catalog
        manifest = catalog.known_manifest(attempt, tier)
        try:
            await self._verifier.check_below(attempt, tier)
            self.leaving.discard((move.checkpoint, move.tier))
            if self._why_not(move, self.views.now()) is not None:  # since it was asked for
                return
            with catalog.deleting(attempt, tier):
                await self._deleter.delete(attempt, tier, manifest, move.reason)
        except StepwellError as error:  # it is debris now, or is found again by the next scan; training goes on
            log.warning("deleting step %d from %s failed: %s", attempt.step, move.tier, error)
        finally:
            self.leaving.discard((move.checkpoint, move.tier))
            self.busy.discard((move.checkpoint, move.tier))
        await self._verifier.repair()  # not before: while the good copy is to go, nothing may be read from it

    def _evicted(self, tier: Tier, checkpoint: CheckpointKey) -> None:
        """Memory has lost a part of it: nothing may count on that copy any more."""
        attempt = Attempt.parse(checkpoint.attempt)
        if checkpoint.run == self._chain.run and attempt is not None:
            self._chain.catalog.remove(attempt, tier)

    def _why_not(self, move: Move, view: View) -> str | None:
        """As `refusal`. What stays because it is read is asked about again when it is not."""
        leased = frozenset(attempt.folder for attempt in self._chain.catalog.reading)
        why_not = refusal(move, view, leased)
        if why_not is not None and isinstance(move, Drop) and move.checkpoint in leased:
            self._held_by_readers.add(move.checkpoint)
        return why_not

    def _waits_for_readers(self, move: Drop, view: View) -> bool:
        return self._why_not(move, view) is not None and move.checkpoint in self._held_by_readers

    def was_read(self, attempt: Attempt) -> None:
        """Nobody here reads the checkpoint any more."""
        if attempt.folder in self._held_by_readers:
            self._held_by_readers.discard(attempt.folder)
            self.soon(Read(attempt.folder))

    @property
    def promised(self) -> frozenset[tuple[str, str]]:
        """(checkpoint, tier) of all flushes that are decided and not done."""
        return frozenset((goal.attempt.folder, name) for name, f in self.flushers.items() for goal in f.goals)

    async def look_for_idle(self) -> None:
        """Tells the policies of tiers that have become idle since the last look."""
        idle = {name for name in self.flushers if self.views.idle(name)}
        new, self._idle = idle - self._idle, idle
        for name in sorted(new):
            await self.on(Idle(name))

    async def may_free(self, tier: Tier) -> bool:
        """Whether policies let something go on `tier`: it is going, or will as soon as promises and readers allow."""
        name = tier.info.name
        view = await self._settled()
        if any(there == name for _, there in self.busy):
            return True
        moves = [move for policy in self._policies for move in policy.decide(Pressure(name), view)]
        drops = [move for move in moves if isinstance(move, Drop) and move.tier == name]
        promised = {checkpoint for checkpoint, _ in view.promised}
        return any(move.checkpoint in promised or self._waits_for_readers(move, view) for move in drops)

    async def _settled(self) -> View:
        """A view in which what has just been flushed either is promised still, or what follows from it has begun."""
        while True:
            view = await self.views.look()
            if not self._deciding:
                return view
            await asyncio.wait(self._deciding)

    def outlook(self) -> list[Outlook]:
        """What will happen next with each copy, as policies tell it."""
        view = self.views.now()
        found = [
            Outlook(a.step, a.folder, goal_tier, f"waits for its turn{f': {goal.error}' if goal.error else ''}")
            for goal_tier, flusher in self.flushers.items()
            for goal in flusher.goals
            if (a := goal.attempt)
        ]
        for policy in self._policies:
            explain = getattr(policy, "explain", None)
            if explain is not None:
                for checkpoint, words in explain(view).items():
                    if (attempt := Attempt.parse(checkpoint)) is not None:
                        found.append(Outlook(attempt.step, checkpoint, getattr(policy, "tier", ""), words))
        return found

    async def would_flush(self, event: Event) -> bool:
        """Whether policies ask for a flush that is not on its way."""
        await self.in_step()
        view = await self.views.look()
        moves = [move for policy in self._policies for move in policy.decide(event, view)]
        return any(isinstance(move, Flush) and refusal(move, view) is None for move in moves)

    async def closing(self) -> None:
        """Asks what must still get down, and lets the queues hurry."""
        for goal in await self.on(Closing()):
            log.debug("%s must get down before the store is closed", goal)
        for flusher in self.flushers.values():
            flusher.hurry()


async def _at_once() -> None:
    pass


def _as_on(tier: str, name: str, step: int, size_bytes: int, parts: frozenset[str], made: float) -> CheckpointView:
    """A checkpoint that is on one tier, as policies see it."""
    return CheckpointView(name, step, size_bytes, frozenset([tier]), parts=parts, parts_on={tier: parts}, made=made)
