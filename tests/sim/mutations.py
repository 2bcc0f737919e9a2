"""Bugs that are put in on purpose: a simulation that does not find them would find no others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from stepwell.catalog import Catalog
from stepwell.epochs import Writership
from stepwell.mover import Mover
from stepwell.ownership import Ownership
from stepwell.saving import Save
from stepwell.tiers.base import CheckpointKey, RecordKey, Reservation, ShardKey
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
}


@contextlib.contextmanager
def mutated(name: str) -> Iterator[None]:
    with MUTATIONS[name]():
        yield
