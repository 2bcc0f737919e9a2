"""Bugs that are put in on purpose: a simulation that does not find them would find no others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

from stepwell import promises, steering
from stepwell.catalog import Catalog, Holding
from stepwell.commit import Committer
from stepwell.deletion import Deleter
from stepwell.epochs import Writership
from stepwell.format.names import Attempt
from stepwell.memoryonly import MemoryOnly
from stepwell.mover import Mover
from stepwell.notes import Notes
from stepwell.ownership import Ownership
from stepwell.policies import flush, retain
from stepwell.policies.base import Cancel, CheckpointView, Drop, Event, Move, Pressure, View
from stepwell.policies.flush import DropBacklog, FlushNewest
from stepwell.policies.retain import Retain
from stepwell.savework import Saver
from stepwell.saving import Save
from stepwell.tiers.base import CheckpointKey, RecordKey, Reservation, ShardKey, Tier
from stepwell.verification import Verifier
from tests.sim.tier import SimTier

Mutation = Callable[[], contextlib.AbstractContextManager[object]]


def _manifest_before_shards() -> contextlib.AbstractContextManager[object]:
    """A commit that does not wait for its shards to be durable."""

    async def no_sync(self: SimTier, shards: Sequence[Reservation]) -> None:
        for each in shards:
            self._open[each.shard].closed = True

    return mock.patch.object(SimTier, "_sync", no_sync)


def _early_release() -> contextlib.AbstractContextManager[object]:
    """A save that says that it has copied the state before it has."""
    put = Mover.put

    async def hasty(self: Mover, tier: Any, shards: Any, on_copied: Callable[[], None], **more: Any) -> None:
        on_copied()
        await put(self, tier, shards, on_copied, **more)

    return mock.patch.object(Mover, "put", hasty)


def _early_acknowledgement() -> contextlib.AbstractContextManager[object]:
    """A save that is told to be on its tiers as soon as it is copied."""
    mark_copied = Save.mark_copied

    def hasty(self: Save) -> None:
        mark_copied(self)
        for tier in self._infos:
            if self.error is None and not self.done(tier):
                self.mark_committed(tier, 0.0)

    return mock.patch.object(Save, "mark_copied", hasty)


def _no_list() -> contextlib.AbstractContextManager[object]:
    """A catalog that counts what a takeover has passed over."""

    async def none(self: Catalog, scans: Any) -> set[Any]:
        return set()

    return mock.patch.object(Catalog, "_late", none)


def _no_epoch_check() -> contextlib.AbstractContextManager[object]:
    """A writer that never looks whether the run is still its own."""

    async def always(self: Writership) -> bool:
        return True

    return mock.patch.object(Writership, "still_ours", always)


def _blind_takeover() -> contextlib.AbstractContextManager[object]:
    """A takeover that does not mind tiers that did not answer."""

    def never(self: Catalog, what: str) -> None:
        if "taken over" not in what:
            require(self, what)

    require = Catalog.require_all_tiers
    return mock.patch.object(Catalog, "require_all_tiers", never)


def _no_hidden_base() -> contextlib.AbstractContextManager[object]:
    """A writer that does not notice checkpoints that turned up after its restore."""
    return mock.patch.object(Ownership, "hidden_base", lambda self, step: None)


def _shards_first() -> contextlib.AbstractContextManager[object]:
    """A drop that deletes shards before the manifest."""
    drop = SimTier._drop

    async def backwards(self: SimTier, key: CheckpointKey | ShardKey | RecordKey) -> None:
        if isinstance(key, CheckpointKey):
            for each in reversed(self.medium.inside(key)):
                await self._weather.pass_time()
                self.medium.remove(each, durable=True)
        await drop(self, key)

    return mock.patch.object(SimTier, "_drop", backwards)


def _unverified_read() -> contextlib.AbstractContextManager[object]:
    """A restore that checks no checksums."""
    scatter = Mover._scatter

    async def trusting(self: Mover, reading: Any, read: Any, address: int, crcs: Any) -> Any:
        return await scatter(self, reading, read, address, None)

    return mock.patch.object(Mover, "_scatter", trusting)


def _no_last() -> contextlib.AbstractContextManager[object]:
    """Retention that may take the newest complete checkpoint, with promises that let it."""
    return _both(
        mock.patch.object(promises, "_is_last", lambda checkpoint, here, view: False),
        mock.patch.object(Retain, "_judged", lambda self, found, view: ((c, []) for c in found)),
    )


def _cancel_newest() -> contextlib.AbstractContextManager[object]:
    """Flushes that are taken back although nothing newer gets there."""
    return _both(
        mock.patch.object(View, "overtaken", lambda self, checkpoint, tier: True),
        mock.patch.object(DropBacklog, "decide", _cancel_all),
    )


def _cancel_all(self: DropBacklog, event: Event, view: View) -> list[Cancel]:
    return [Cancel(name, tier, "") for name, tier in view.promised] if isinstance(event, Pressure) else []


def _delete_before_flush() -> contextlib.AbstractContextManager[object]:
    """Deletions that do not mind flushes that are decided."""
    refusal = promises.refusal

    def hasty(move: Move, view: View, leased: frozenset[str] = frozenset()) -> str | None:
        return refusal(move, replace(view, promised={}) if isinstance(move, Drop) else view, leased)

    return mock.patch.object(steering, "refusal", hasty)


def _no_grace() -> contextlib.AbstractContextManager[object]:
    """Deletions that take files away at once from whoever has not opened them yet."""
    return mock.patch.object(Deleter, "_due", lambda self, copy: self._deleted_at[copy])


def _no_keeps() -> contextlib.AbstractContextManager[object]:
    """A writer that does not know what is kept."""
    return mock.patch.object(Notes, "kept", lambda self, attempt: False)


def _modulo() -> contextlib.AbstractContextManager[object]:
    """Windows for checkpoints at multiples of their length alone."""

    def windows(line: Sequence[CheckpointView], steps: int) -> dict[str, int]:
        return {c.name: 0 if c.step % steps else c.step // steps for c in line}

    return _both(mock.patch.object(flush, "of_steps", windows), mock.patch.object(retain, "of_steps", windows))


def _missing_is_worst() -> contextlib.AbstractContextManager[object]:
    """Retention of the best that takes those without the metric for bad ones."""
    nothing = retain._Rule("", lambda found, view: set(), said=False)
    return mock.patch.object(retain, "_missing", lambda metric: nothing)


def _unverified_deletion() -> contextlib.AbstractContextManager[object]:
    """Deletions of the last upper copy that do not ask whether the lower one is good."""

    async def trusting(self: Verifier, *what: Any) -> None:
        pass

    return mock.patch.object(Verifier, "check_below", trusting)


def _held_is_told_to_be_durable() -> contextlib.AbstractContextManager[object]:
    """A save that stays in memory, and is told to be on the first storage tier."""
    mark_held = Save.mark_held

    def boastful(self: Save) -> None:
        mark_held(self)
        self.mark_committed(list(self._infos)[1], 0.0)

    return mock.patch.object(Save, "mark_held", boastful)


def _newest_leaves_memory() -> contextlib.AbstractContextManager[object]:
    """Memory that is given back although it alone has the newest checkpoint."""
    return mock.patch.object(MemoryOnly, "_kept", lambda self: [])


def _alone_is_evictable() -> contextlib.AbstractContextManager[object]:
    """Chunks that may be evicted although no other tier has them."""
    commit_host = Saver._commit_host

    async def careless(self: Saver, save: Any, order: Any, attempt: Any, jobs: Any, *more: Any) -> bool:
        kept = await commit_host(self, save, order, attempt, jobs, *more)
        for job in jobs:
            self._chain.mover.arena.clean(job.key)
        return kept

    return mock.patch.object(Saver, "_commit_host", careless)


def _forgotten_at_the_end() -> contextlib.AbstractContextManager[object]:
    """Closing and drains that do not mind what memory alone has."""
    return _both(
        mock.patch.object(MemoryOnly, "newest", lambda self: None),
        mock.patch.object(FlushNewest, "decide", lambda self, event, view: []),
    )


def _last_of_a_window() -> contextlib.AbstractContextManager[object]:
    """Flush rules that send the last of a window that they know, not the first."""

    def lasts(found: Sequence[CheckpointView], windows: dict[str, int]) -> set[str]:
        return set({windows[c.name]: c.name for c in found}.values())

    return mock.patch.object(flush, "firsts", lasts)


def _grown_is_whole() -> contextlib.AbstractContextManager[object]:
    """A takeover that believes a copy to which more parts were coming to be whole."""

    async def nothing(self: Committer, tier: Tier, attempt: Attempt, holding: Holding) -> list[str]:
        return []

    return mock.patch.object(Committer, "_absent", nothing)


@contextlib.contextmanager
def _both(*patches: contextlib.AbstractContextManager[object]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


MUTATIONS: dict[str, Mutation] = {
    "manifest before shards": _manifest_before_shards,
    "early release of the state": _early_release,
    "early acknowledgement": _early_acknowledgement,
    "no list of what counts": _no_list,
    "no look at the epoch": _no_epoch_check,
    "blind takeover": _blind_takeover,
    "hidden base": _no_hidden_base,
    "unverified read": _unverified_read,
    "shards deleted first": _shards_first,
    "the last one may go": _no_last,
    "the newest is taken back": _cancel_newest,
    "deletion before the flush": _delete_before_flush,
    "no grace": _no_grace,
    "no keeps": _no_keeps,
    "windows by modulo": _modulo,
    "a missing metric is the worst": _missing_is_worst,
    "unverified deletion": _unverified_deletion,
}

#: of histories in which saves stay in memory
ALONE: dict[str, Mutation] = {
    "what stays is told to be durable": _held_is_told_to_be_durable,
    "the newest leaves memory": _newest_leaves_memory,
    "what is alone is evicted": _alone_is_evictable,
    "memory is forgotten at the end": _forgotten_at_the_end,
    "the last of a window goes": _last_of_a_window,
    "what was to grow is whole": _grown_is_whole,
}


@contextlib.contextmanager
def mutated(name: str) -> Iterator[None]:
    with {**MUTATIONS, **ALONE}[name]():
        yield
