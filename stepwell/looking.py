"""What a store tells of its run, and what it notes of it: all that works for readers, too."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Literal, SupportsIndex, TypeVar

from stepwell import refs
from stepwell.catalog import Catalog, Debris
from stepwell.chain import Chain
from stepwell.checkpoint import Checkpoint, check_metrics
from stepwell.clock import Clock
from stepwell.describing import describe_all
from stepwell.ending import Ending
from stepwell.errors import CheckpointGone, ConfigError, NotPlanned, SaveFailed, StoreClosed, WaitTimeout
from stepwell.format.names import Attempt
from stepwell.marking import check_tags, mark
from stepwell.runtime import Runtime
from stepwell.saving import Save, SaveRecord, check_step
from stepwell.status import StoreStatus, status_of
from stepwell.tiers.base import Tier
from stepwell.units import parse_duration
from stepwell.watching import watch
from stepwell.writer import RunWriter

T = TypeVar("T")


class Looking:
    """The base of a store: its calls on the loop, and those of them that look, watch and note."""

    run: str
    tiers: tuple[Tier, ...]
    catalog: Catalog
    ending: Ending
    _pid: int
    _clock: Clock
    _runtime: Runtime
    _chain: Chain
    _writer: RunWriter
    _record: SaveRecord
    _saves: list[Save]

    def _wait(self, work: Coroutine[Any, Any, T], timeout: float | None = None, what: str = "the call") -> T:
        try:
            self._check_open()
        except StoreClosed:
            work.close()
            raise
        return self._runtime.run(work, timeout, what)

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise StoreClosed("this store was opened in the parent of this process", todo="Open it again", run=self.run)
        if self.ending.closed:
            raise StoreClosed("the store is closed", todo="Open it again", run=self.run)

    def _settle(self, timeout: float | None = None) -> None:
        """Waits until this store's own saves are on some tier, so that a look sees them; errors are their own."""
        deadline = None if timeout is None else self._clock.monotonic() + timeout
        for save in self._saves:
            for tier in self.tiers:
                left = None if deadline is None else max(0.0, deadline - self._clock.monotonic())
                with contextlib.suppress(NotPlanned):
                    with contextlib.suppress(SaveFailed, WaitTimeout):
                        save.wait(tier.info.name, timeout=left)
                    break

    def _named(self, name: str) -> Tier:
        """Raises ConfigError if there is no such tier."""
        for tier in self.tiers:
            if tier.info.name == name:
                return tier
        raise ConfigError(
            f"there is no tier {name!r}", todo=f"The tiers are {', '.join(t.info.name for t in self.tiers)}"
        )

    # -- looking -------------------------------------------------------------------------

    def checkpoints(
        self,
        *,
        tier: str | None = None,
        complete: bool | None = None,
        tag: str | None = None,
        kept: bool | None = None,
        abandoned: bool = False,
    ) -> list[Checkpoint]:
        """The run's checkpoints, by step; with `abandoned`, those that rewinds left behind, too.

        tier: only those that have a commit there. complete: only those of which some tier (or `tier`) holds every
        part; False: only the others. tag, kept: only those that have the tag; that are kept, or are not.
        """
        if tier is not None:
            self._named(tier)

        async def listed() -> list[Checkpoint]:
            await self.catalog.refresh()
            wanted = list(self.catalog.holdings) if abandoned else self.catalog.newest_first()
            return await describe_all(self.catalog, sorted(wanted, key=lambda a: (a.step, a)))

        return [
            c
            for c in self._wait(listed())
            if (tier is None or tier in c.tiers)
            and (complete is None or complete == bool(c.complete_on if tier is None else tier in c.complete_on))
            and (tag is None or tag in c.tags)
            and (kept is None or kept == c.kept)
        ]

    def latest(self, tier: str | None = None) -> Checkpoint | None:
        """The newest checkpoint, or the newest that `tier` holds; None if there is none."""
        return next(reversed(self.checkpoints(tier=tier)), None)

    def best(self, metric: str, mode: Literal["min", "max"] = "min", tier: str | None = None) -> Checkpoint | None:
        """The checkpoint with the smallest `metric`, or with mode="max" the largest; of equals the newer.

        NaN is never the best. None if no checkpoint (on `tier`) has that metric as a number.
        """
        if mode not in ("min", "max"):
            raise ConfigError(f"mode={mode!r}", todo="Use 'min' or 'max'")
        return next(reversed(refs.best(self.checkpoints(tier=tier), metric, mode)), None)

    def debris(self) -> list[Debris]:
        """What saves that are not committed have left on the tiers, one that is under way included.

        A writer removes it once its owner is certainly dead.
        """

        async def found() -> list[Debris]:
            await self.catalog.refresh()
            return [left for left in self.catalog.debris if not left.deleted]

        return self._wait(found())

    def status(self) -> StoreStatus:
        """Tiers, backlog, health, last errors, and the newest durable step of each tier, as of now. No I/O."""
        return self._wait(status_of(self._chain, self._writer, self._record))

    def watch(
        self,
        *,
        tier: str | None = None,
        after: SupportsIndex | None = None,
        poll: str | float = "10s",
        timeout: str | float | None = None,
    ) -> Iterator[Checkpoint]:
        """Each checkpoint that is committed on `tier` (default the last), or gets there later, once; whoever writes it.

        Those that are there already come first. after: only steps above this one, and what is saved anew after a
        rewind. poll: time between two looks; whoever has just got a checkpoint waits no longer for the next than that.
        timeout: time without news after which this ends; None: never. It ends, too, when the store is closed. Times
        are as in a config file, or seconds. One that retention deletes before its turn is left out.

        Raises TierUnavailable if the tier does not answer when `timeout` is over.
        """
        self._check_open()
        news = watch(
            self.catalog,
            self.tiers[-1] if tier is None else self._named(tier),
            after=None if after is None else check_step(after),
            poll_s=parse_duration(poll),
            timeout_s=None if timeout is None else parse_duration(timeout),
            ended=lambda: self.ending.closed,
        )
        return self._followed(news)

    def _followed(self, news: AsyncIterator[Checkpoint]) -> Iterator[Checkpoint]:
        async def following() -> Checkpoint | None:
            return await anext(news, None)

        with contextlib.suppress(StoreClosed):
            while (found := self._wait(following())) is not None:
                yield found

    # -- noting --------------------------------------------------------------------------

    def annotate(
        self,
        step: SupportsIndex | Checkpoint,
        metrics: Mapping[str, Any] | None = None,
        *,
        tags: str | Sequence[str] = (),
        remove: str | Sequence[str] = (),
    ) -> Checkpoint:
        """Adds metrics and tags to a checkpoint, and takes the tags `remove` away; returns it as it is then.

        Works in mode "r", while another process writes; all that it needs is permission to write in the folder
        `<run>/notes` on the last tier. Once it returns that is durable. Of two that say different things of one
        metric the later one counts. step: a step (its checkpoint on the current timeline), or a Checkpoint. Of a job
        of several ranks, one rank calls it.

        Raises CheckpointNotFound; TierError, which names the folder, without that permission; TierUnavailable.
        """
        return self._mark(step, metrics=check_metrics(metrics), tags=check_tags(tags, remove))

    def tag(self, step: SupportsIndex | Checkpoint, *tags: str, remove: str | Sequence[str] = ()) -> Checkpoint:
        """Gives a checkpoint tags, and takes those in `remove` away. As `annotate`."""
        return self._mark(step, tags=check_tags(tags, remove))

    def keep(self, step: SupportsIndex | Checkpoint, keep: bool = True) -> Checkpoint:
        """Keeps a checkpoint from being deleted by retention; with keep=False, no longer. As `annotate`.

        Raises CheckpointGone if it was deleted meanwhile. What others keep, such as a fork its parent, stays kept.
        """
        return self._mark(step, keep=bool(keep))

    def _mark(
        self,
        step: SupportsIndex | Checkpoint,
        *,
        metrics: Mapping[str, float | str | None] | None = None,
        tags: Mapping[str, bool] | None = None,
        keep: bool | None = None,
    ) -> Checkpoint:
        wanted = step if isinstance(step, Checkpoint) else check_step(step)
        self._check_open()
        self._settle()

        async def marked() -> Checkpoint:
            await self.catalog.refresh()
            attempt = self._attempt(wanted)
            checkpoint = await mark(self.catalog, attempt, metrics=metrics, tags=tags, keep=keep)
            await self._writer.noted(attempt)
            return checkpoint

        return self._wait(marked())

    def _attempt(self, wanted: int | Checkpoint) -> Attempt:
        if isinstance(wanted, int):
            return self.catalog.at_step(wanted)[0]
        attempt = Attempt.parse(wanted.name)
        if wanted.run != self.run or attempt is None:
            raise ConfigError(f"{wanted.name} is no checkpoint of this run", run=self.run)
        if attempt not in self.catalog.holdings:
            self.catalog.require_all_tiers("the checkpoint is on no tier that answers")
            raise CheckpointGone("the checkpoint has been deleted", run=self.run, step=wanted.step)
        return attempt
