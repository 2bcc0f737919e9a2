"""What a store brings up ahead of time: prefetches and pins, as its users ask for them."""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from typing import SupportsIndex

from stepwell.ahead import Ahead
from stepwell.errors import ConfigError
from stepwell.jobs import current_job
from stepwell.looking import Looking
from stepwell.mover import Mover
from stepwell.pinning import Pins
from stepwell.prefetching import Prefetch, Urgency
from stepwell.tracing import Trace
from stepwell.units import parse_size
from stepwell.wanted import Choice, Ref, is_own


class Warming(Looking):
    """The base of a store that prefetches and pins."""

    mover: Mover
    ahead: Ahead
    _trace: Trace

    def prefetch(
        self,
        refs: Ref | Sequence[Ref],
        to: str = "host",
        *,
        parts: str | Sequence[str] | None = None,
        keys: str | Sequence[str] = "*",
        priority: int = 0,
        deadline: str | float | None = None,
        max_bytes: str | int | None = None,
    ) -> Prefetch:
        """Brings checkpoints up before they are asked for; returns at once, with a handle for progress, wait, cancel.

        refs: one or several, the most urgent first: a step of this run, `@latest`, `@best:METRIC`, `@TAG` of it, or
        any path that `stepwell.load` takes. to: the host tier, where this store and `stepwell.load` then find the
        chunks in memory; or a storage tier or the gpu tier, for checkpoints of this run. parts: only these. keys: only
        tensors that match, as `stepwell.load` takes it, for the host tier; what comes are the chunks that hold them.

        Of several prefetches the one with the highest `priority` goes first, of equals the one with the earliest
        `deadline` ("30s", or seconds from now), else the older one; one that runs gives way. A deadline that is
        missed is said, by the handle and in the log. max_bytes: takes the longest beginning of what is asked for that
        is no larger ("20GiB", or bytes).

        A list may be larger than the host tier, and may name a checkpoint more than once: what fits comes, and
        the rest as soon as earlier references have been restored or loaded. What was announced leaves memory last.
        Raises ConfigError. Whatever else goes wrong, `wait` raises: TierFull if a single reference does not fit,
        CheckpointNotFound, KeyMismatch for parts and keys that are not there, CorruptData.
        """
        wanted = [refs] if isinstance(refs, SupportsIndex | str | os.PathLike) else list(refs)
        tier, choice = self._named(to), Choice.of(parts, keys)
        if tier is not self.mover.host and not choice.everything:
            raise ConfigError(f"tier {to} holds whole parts of checkpoints", todo="Leave keys out, or give parts")
        limit = None if max_bytes is None else parse_size(max_bytes)
        self._check_open()
        self._trace.prefetched(wanted, to, current_job())
        handle = Prefetch(Urgency.of(priority, deadline))
        handle.follow(self._runtime.start(self.ahead.bring(wanted, tier, handle, choice, limit, current_job())))
        return handle

    def pin(self, ref: Ref, *, parts: str | Sequence[str] | None = None, keys: str | Sequence[str] = "*") -> Prefetch:
        """Keeps a checkpoint, or parts of it, in host memory until `unpin`, or until the store is closed; what is not
        there is brought up, before all prefetches: the handle says how far that is.

        ref, parts, keys: as `prefetch` takes them. Saves and prefetches get what pins leave, so a pin may make saves
        go in waves, but never takes what is for staging. Raises TierFull, with the numbers, if it does not fit,
        ConfigError without a host tier, CheckpointNotFound, KeyMismatch.
        """
        choice = Choice.of(parts, keys)
        pins = self._pins()
        item = self._wait(self.ahead.item(ref, choice, current_job()))

        async def add() -> Prefetch:
            return pins.add(_name(ref), item)

        handle = self._wait(add())

        async def come() -> None:
            try:
                await self.ahead.lift_items([item], handle)
            except BaseException:
                pins.give_up(item)
                raise

        handle.follow(self._runtime.start(come()))
        return handle

    def unpin(self, ref: Ref) -> None:
        """Takes a pin back; ref: as it was given to `pin`. Raises StepwellError if nothing is pinned under it."""
        pins = self._pins()

        async def remove() -> None:
            pins.remove(_name(ref))

        self._wait(remove())

    def _pins(self) -> Pins:
        if self.ahead.pins is None:
            raise ConfigError(
                "there is no host tier", todo=f"The tiers are {', '.join(t.info.name for t in self.tiers)}"
            )
        return self.ahead.pins


def _name(ref: Ref) -> object:
    """Alike for references that are alike."""
    if isinstance(ref, SupportsIndex):
        return operator.index(ref)
    return ref if is_own(ref) else os.path.realpath(os.fspath(ref))
