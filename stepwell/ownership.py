"""Taking a run over, once a process: the epoch, what counts of the older ones, and what they left behind."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Collection

from stepwell.catalog import Debris
from stepwell.chain import Chain
from stepwell.commit import Committer
from stepwell.epochs import Writership
from stepwell.forking import Origin
from stepwell.format.names import MANIFEST, RUN_FILE, Attempt
from stepwell.format.records import Rewind, RunRecord, encode
from stepwell.jobs import Job, wait_for
from stepwell.tiers.base import CheckpointKey, RecordKey, Tier
from stepwell.timeline import add_rewind, by_step, current

log = logging.getLogger("stepwell")


def group_of(chain: Chain, job: Job) -> str:
    """Begins this store's keys in the job's store; the same on all ranks, used by no other store."""
    return f"stepwell/{chain.run}/{chain.settings.open_number}/{job.restarts}"


class Ownership:
    """The right to write a run, and the line of checkpoints that it goes on with. Lives on the event loop."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._ready: asyncio.Task[None] | None = None
        self.run_id = ""
        self.timeline = 0
        self.rewinds: list[Rewind] = []
        self.parent: str | None = None  # of the next save
        self.origin: Origin | None = None  # where the run begins, if it is a fork without a complete checkpoint
        self._before: dict[str, str | None] = {}  # saves under way -> the parent of each
        self.on_taken: Callable[[], object] = lambda: None
        self.job: Job
        self.writership: Writership
        self.committer: Committer

    @property
    def taken(self) -> bool:
        ready = self._ready
        return ready is not None and ready.done() and not ready.cancelled() and ready.exception() is None

    async def take(self, job: Job) -> int:
        """Takes the run over if that has not been done; returns the epoch. Raises RunBusy."""
        ready = self._ready
        if ready is None or (ready.done() and (ready.cancelled() or ready.exception() is not None)):
            self._ready = ready = asyncio.ensure_future(self._try_to_take_over(job))
            ready.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, if nobody waits any more
        await asyncio.shield(ready)
        return self.writership.epoch

    async def _try_to_take_over(self, job: Job) -> None:
        self.writership = Writership(self._chain.run, self._chain.authority, job, self._chain.clock)
        try:
            await self._take_over(job)
        except BaseException:
            await self.writership.close()  # else this process would be in its own way when it tries again
            raise

    async def _take_over(self, job: Job) -> None:
        chain, catalog = self._chain, self._chain.catalog
        self.job = job
        group = group_of(chain, job)
        timeout_s = chain.settings.rank_timeout_seconds
        self.committer = Committer(chain.run, job, self.writership, group, timeout_s)
        await catalog.refresh()
        if job.leader:
            await self.writership.acquire()
            await catalog.refresh()
            for attempt, tier in await self.committer.adopt(catalog):
                log.warning(
                    "step %d was complete on %s but not committed by its writer; committed it now", attempt.step, tier
                )
                await catalog.refresh()
            catalog.require_all_tiers("the run cannot be taken over")  # what is not on the list counts no more
            await self.writership.publish_seen(
                [attempt.folder for attempt in catalog.holdings], alone=len(chain.storage) == 1
            )
            job.store.put(f"{group}/epoch", str(self.writership.epoch).encode())
        else:
            self.writership.epoch = int(await wait_for(job.store, f"{group}/epoch", timeout_s, "the leader's epoch"))
        await self.committer.meet()
        newest = await catalog.newest_manifest()
        self.rewinds = list(catalog.rewinds)
        if newest is not None:
            self.timeline, self.run_id = newest.timeline, newest.run_id
            made = Attempt.parse(newest.attempt)
            assert made is not None
            self.timeline += sum(rewind.epoch > made.epoch for rewind in catalog.rewound)  # of these it knows nothing
        line = catalog.newest_first()
        self.parent = line[0].folder if line else self._begun_from
        self.run_id = await self._agreed_id(self.run_id or uuid.uuid4().hex)
        if self.committer.covered(chain.first)[0] == job.rank:
            await self.write_run_record(chain.first)
        if chain.host is not None and chain.host.info.survives != "nothing":
            await self.write_run_record(chain.host)
        if job.leader:
            if self.origin is not None:
                await self.origin.keep()
                self.origin.follow(catalog)
            self.writership.start_beating()
        self.on_taken()

    async def _agreed_id(self, mine: str) -> str:
        """The run's id as the leader has it: of a new run, each rank would make up another one."""
        job, key = self.job, f"{group_of(self._chain, self.job)}/run"
        if job.leader:
            job.store.put(key, mine.encode())
            return mine
        return (await wait_for(job.store, key, self._chain.settings.rank_timeout_seconds, "the run's id")).decode()

    async def write_run_record(self, tier: Tier) -> None:
        record = RunRecord(run_id=self.run_id, made=self._chain.clock.wall(), forked_from=self._begun_from)
        await tier.commit(RecordKey(self._chain.run, RUN_FILE), encode(record))

    @property
    def _begun_from(self) -> str | None:
        return self.origin.name if self.origin is not None else None

    def hidden_base(self, step: int) -> int | None:
        """The step to rewind to if a save of `step` would not be the newest: checkpoints that turned up after the
        caller had looked, because the takeover adopted them or another writer was faster. None if there are none."""
        steps = [attempt.step for attempt in current(self._chain.catalog.holdings, self.rewinds)]
        if not steps or steps[0] < step:
            return None
        return max((before for before in steps if before < step), default=-1)

    def rewind(self, to: int, attempt: Attempt) -> None:
        """From `attempt` on, later steps than `to` are abandoned."""
        self.rewinds = add_rewind(self.rewinds, Rewind(to, attempt.epoch, attempt.call))
        self.timeline += 1
        bases = by_step(self._chain.catalog.holdings, to, self._chain.catalog.rewinds)
        self.parent = bases[0].folder if bases else self._begun_from

    def next_parent(self, attempt: Attempt) -> str | None:
        """The parent of `attempt`, which is the next one's, unless it fails."""
        parent, self.parent = self.parent, attempt.folder
        self._before[attempt.folder] = parent
        return parent

    def failed(self, attempt: Attempt) -> None:
        """`attempt` is not committed: the next save goes on from the one before."""
        before = self._before.pop(attempt.folder, None)
        if self.parent == attempt.folder:
            self.parent = before

    def committed(self, attempt: Attempt) -> None:
        self._before.pop(attempt.folder, None)

    async def clean(
        self,
        busy: set[tuple[str, str]],
        wanted: Callable[[], Collection[tuple[str, str]]],
        waits: Callable[[Attempt, Tier], Awaitable[bool]],
    ) -> None:
        """Frees what killed saves left: attempts of older epochs, whose writers cannot come back.

        busy: (checkpoint, tier) of copies that are being deleted. wanted: tells of flushes that will go on from
        what is there. waits: whether it was deleted, also since it was looked for, and somebody may still be reading.
        """
        for debris in self._chain.catalog.debris:
            if self.writership.lost or not await self.writership.still_ours():
                return  # what is debris is for the next one to say
            copy = (debris.attempt.folder, debris.tier)
            if debris.late or debris.attempt.epoch >= self.writership.epoch or copy in busy or copy in wanted():
                continue
            if any(h.tier.info.name == debris.tier for h in self._chain.catalog.holdings.get(debris.attempt, [])):
                continue  # it has been committed there since
            busy.add(copy)
            try:
                await self._remove(debris, waits)
            finally:
                busy.discard(copy)

    async def _remove(self, debris: Debris, waits: Callable[[Attempt, Tier], Awaitable[bool]]) -> None:
        tier = self._chain.named(debris.tier)
        if await waits(debris.attempt, tier):
            return
        manifest = RecordKey(self._chain.run, f"{debris.attempt.folder}/{MANIFEST}")
        if not debris.late and await tier.fetch(manifest) is not None:
            return  # committed since, and the catalog may have lost sight of it: a tier does not always answer
        log.warning(
            "removing what is left of a save of step %d that was never committed (%s, %d bytes)",
            debris.attempt.step,
            debris.tier,
            debris.size_bytes,
        )
        await tier.drop([CheckpointKey(self._chain.run, debris.attempt.folder)])

    async def close(self) -> None:
        """Gives the run up, so that the next writer need not wait."""
        if self.taken:
            await self.writership.close()
        if self.origin is not None:
            await self.origin.close()
