"""The writing side of a store: takes the run over, writes attempts, commits them, flushes them down."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from stepwell import native
from stepwell.catalog import Catalog
from stepwell.clock import Clock
from stepwell.commit import Committer, rank_record
from stepwell.epochs import Writership
from stepwell.errors import StepwellError, TierFull, TierUnavailable
from stepwell.format.names import RUN_FILE, Attempt, rank_file
from stepwell.format.records import Draft, FileRecord, RankRecord, Repair, Rewind, RunRecord, decode, encode
from stepwell.jobs import Job, wait_for
from stepwell.mover import Healing, Mover, ShardJob
from stepwell.saving import Order, Save, Turns
from stepwell.settings import Settings
from stepwell.tiers.base import CheckpointKey, RecordKey, Refused, Reservation, ShardKey, Tier
from stepwell.timeline import add_rewind, by_step

log = logging.getLogger("stepwell")


async def reserve(tier: Tier, shards: Sequence[tuple[ShardKey, int]]) -> list[Reservation]:
    """Room for all shards, or none: raises TierFull or TierUnavailable with the numbers."""
    answers = await asyncio.gather(*(tier.reserve(key, size) for key, size in shards), return_exceptions=True)
    granted = [answer for answer in answers if isinstance(answer, Reservation)]
    for answer in answers:
        if isinstance(answer, Reservation):
            continue
        for reservation in granted:
            await tier.abort(reservation)
        if isinstance(answer, Refused):
            kind = TierFull if answer.reason == "full" else TierUnavailable
            raise kind(
                f"no room for the checkpoint: {answer.detail}",
                todo="Older checkpoints are untouched. Free space and save again",
                tier=tier.info.name,
                needed_bytes=answer.needed_bytes or None,
                free_bytes=answer.free_bytes or None,
            )
        raise answer
    return granted


class RunWriter:
    """One run's writer. Lives on the event loop; the epoch is taken by the first save."""

    def __init__(
        self, run: str, tiers: Sequence[Tier], mover: Mover, catalog: Catalog, clock: Clock, settings: Settings
    ) -> None:
        self.run, self.tiers, self.mover, self.catalog = run, list(tiers), mover, catalog
        self.clock, self.settings = clock, settings
        self._ready: asyncio.Task[None] | None = None
        self._turns = Turns()
        self._to_mend: list[tuple[Mapping[tuple[str, ShardKey], str], RankRecord]] = []
        self._saving: set[asyncio.Future[Any]] = set()
        self._background: set[asyncio.Future[Any]] = set()
        self._flushing = asyncio.Lock()
        self._run_id = ""
        self._parent: str | None = None
        self._timeline = 0
        self._rewinds: list[Rewind] = []
        self.writership: Writership
        self.committer: Committer

    # -- one save ------------------------------------------------------------------------

    async def save(self, save: Save) -> None:
        """Carries a save out on every tier. Never raises: what goes wrong is the save's own."""
        order = save.take_order()
        before, mine = self._turns.take()
        task = asyncio.current_task()
        assert task is not None
        self._saving.add(task)
        task.add_done_callback(self._saving.discard)
        try:
            await self._save_first(save, order, before)
        except asyncio.CancelledError:
            save.fail(StepwellError("the save was abandoned", step=save.step))
            raise
        except Exception as error:
            log.error("saving step %d failed: %s", save.step, error)
            save.fail(error)
            return
        finally:
            mine.set_result(None)
        for tier in self.tiers[1:]:
            await self._flush_saved(save, order, tier)

    async def _save_first(self, save: Save, order: Order, before: asyncio.Future[None] | None) -> None:
        tier = self.tiers[0]
        epoch = await self.prepare(order.job)
        attempt = Attempt(epoch, order.call, order.step)
        save.checkpoint = attempt.folder
        key = CheckpointKey(self.run, attempt.folder)
        jobs = [
            ShardJob(ShardKey(key, shard.file), shard.size, order.snapshot.source(i))
            for i, shard in enumerate(order.snapshot.shards)
        ]
        reserved = await reserve(tier, [(job.key, job.size) for job in jobs])
        try:
            await self.mover.put(tier, jobs, save.mark_copied)
            if before is not None:
                await asyncio.shield(before)
            record = rank_record(order, attempt, jobs, self._draft(order, attempt))
            for name, data in order.files.items():
                await tier.commit(RecordKey(self.run, f"{attempt.folder}/{name}"), data)
            manifest = await self.committer.publish(tier, attempt, record, reserved)
        except BaseException:
            self._keep(self._give_up(tier, key, reserved, order.job))
            raise
        files = {job.key.name: job.size for job in jobs}
        self.catalog.add(attempt, tier, files, manifest)
        self._parent = attempt.folder
        save.mark_committed(tier.info.name, self.clock.monotonic() - order.began)

    async def _give_up(self, tier: Tier, key: CheckpointKey, reserved: Sequence[Reservation], job: Job) -> None:
        """Frees what a failed attempt took. Other ranks' files of it are theirs to free."""
        await self.mover.settled([reservation.shard for reservation in reserved])
        for reservation in reserved:
            await tier.abort(reservation)
        await tier.drop([key] if job.world == 1 else [RecordKey(key.run, f"{key.attempt}/{rank_file(job.rank)}")])

    def _draft(self, order: Order, attempt: Attempt) -> Draft:
        """The manifest's words. Called in the order of saves, so that each one's parent is the one before."""
        if order.rewind_to is not None:
            self._rewinds = add_rewind(self._rewinds, Rewind(order.rewind_to, attempt.epoch, attempt.call))
            self._timeline += 1
            bases = by_step(self.catalog.holdings, order.rewind_to, self.catalog.rewinds)
            self._parent = bases[0].folder if bases else None
        return Draft(
            run_id=self._run_id,
            files={name: FileRecord(len(data), native.crc32c(data)) for name, data in order.files.items()},
            metrics=order.metrics,
            tags=order.tags,
            parent=self._parent,
            timeline=self._timeline,
            rewinds=self._rewinds,
            made=order.made,
            seconds={
                "capture": round(order.capture_seconds, 6),
                "copied_and_written": round(self.clock.monotonic() - order.began, 6),
            },
        )

    # -- flush ---------------------------------------------------------------------------

    async def _flush_saved(self, save: Save, order: Order, tier: Tier) -> None:
        assert save.checkpoint is not None
        attempt = Attempt.parse(save.checkpoint)
        assert attempt is not None
        try:
            await self.flush(attempt, tier, order.job)
        except Exception as error:
            log.error("flushing step %d to %s failed: %s", save.step, tier.info.name, error)
            save.fail(error, [tier.info.name])
        else:
            save.mark_committed(tier.info.name, self.clock.monotonic() - order.began)

    async def flush(self, attempt: Attempt, tier: Tier, job: Job, parts: Sequence[str] | None = None) -> None:
        """Copies this rank's part of a checkpoint to `tier` and commits it there.

        parts: only those (the copy is partial); default all. What is committed there already stays.
        """
        async with self._flushing:
            held = self.catalog.holdings[attempt]
            if any(h.tier is tier for h in held):
                return
            sources = [h.tier for h in held if h.tier is not tier]
            name = f"{attempt.folder}/{rank_file(job.rank)}"
            data = await sources[0].fetch(RecordKey(self.run, name))
            if data is None:
                raise TierUnavailable("the rank's record is gone", tier=sources[0].info.name, step=attempt.step)
            record = decode(data, RankRecord, tier=sources[0].info.name, path=name)
            wanted = set(record.parts if parts is None else parts) & set(record.parts)
            files = {file for part in wanted for file in record.parts[part]}
            key = CheckpointKey(self.run, attempt.folder)
            shards = [shard for shard in record.shards if shard.file in files]
            reserved = await reserve(tier, [(ShardKey(key, shard.file), shard.size) for shard in shards])
            try:
                healing = Healing()
                for shard in shards:
                    await self.mover.copy(sources, tier, ShardKey(key, shard.file), shard.size, shard.crcs(), healing)
                for file in record.draft.files:
                    sidecar = await sources[0].fetch(RecordKey(self.run, f"{attempt.folder}/{file}"))
                    if sidecar is not None:
                        await tier.commit(RecordKey(self.run, f"{attempt.folder}/{file}"), sidecar)
                await self._write_run_record(tier)
                manifest = await self.committer.publish(
                    tier, attempt, data, reserved, absent=sorted(set(record.parts) - wanted)
                )
            except BaseException:
                self._keep(self._give_up(tier, key, reserved, job))
                raise
            self.catalog.add(attempt, tier, {shard.file: shard.size for shard in shards}, manifest)

    def repair(self, bad: Mapping[tuple[str, ShardKey], str], record: RankRecord) -> None:
        """Lets shards that were bad on a tier be written again, from a tier with good bytes.

        Only the run's writer may do that, so it is done once the run is taken over, by the first save.
        """
        self._to_mend.append((bad, record))
        if self._ready is not None and self._ready.done() and self._ready.exception() is None:
            self._keep(self._mend())

    async def _mend(self) -> None:
        while self._to_mend:
            bad, record = self._to_mend.pop(0)
            try:
                await self._write_again(bad, record)
            except StepwellError as error:
                log.error("could not repair %s: %s", ", ".join(f"{key} on {tier}" for tier, key in bad), error)

    async def _write_again(self, bad: Mapping[tuple[str, ShardKey], str], record: RankRecord) -> None:
        attempt = Attempt.parse(record.attempt)
        assert attempt is not None
        for (name, key), wrong in bad.items():
            target = next(tier for tier in self.tiers if tier.info.name == name)
            sources = [h.tier for h in self.catalog.holdings[attempt] if h.tier is not target]
            shard = next(s for s in record.shards if s.file == key.name)
            if target.info.read_only or not sources:
                continue
            # the bad file may hold the only good bytes of a block that is bad elsewhere: it goes only after
            # every block of the other copies was found good
            await self.mover.verify(sources, key, shard.size, shard.crcs())
            await target.drop([key])
            [reserved] = await reserve(target, [(key, shard.size)])
            try:
                await self.mover.copy(sources, target, key, shard.size, shard.crcs(), Healing())
                note = Repair(file=key.name, wrong=wrong, made=self.clock.wall())
                place = RecordKey(self.run, f"{attempt.folder}/repair-{uuid.uuid4().hex[:8]}.json")
                await target.commit(place, encode(note), shards=[reserved])
            except BaseException:
                await self.mover.settled([key])
                await target.abort(reserved)
                raise
            log.warning("%s on tier %s was bad and has been written again", key, name)

    # -- taking the run over -------------------------------------------------------------

    async def prepare(self, job: Job) -> int:
        """Takes the run over if that has not been done; returns the epoch."""
        if self._ready is None or (self._ready.done() and self._ready.exception() is not None):
            self._ready = asyncio.ensure_future(self._take_over(job))
        await asyncio.shield(self._ready)
        return self.writership.epoch

    async def _take_over(self, job: Job) -> None:
        """Once a process: the epoch, what counts of the older ones, and their debris."""
        authority = self.tiers[-1]
        self.writership = Writership(self.run, authority, job, self.clock)
        group = f"stepwell/{self.run}/{self.settings.open_number}/{job.restarts}"
        await self.catalog.refresh()
        if job.leader:
            await self.writership.acquire()
            await self.catalog.refresh()
            self.committer = self._committer(job, group)
            for attempt, tier in await self.committer.adopt(self.catalog):
                log.warning(
                    "step %d was complete on %s but not committed by its writer; committed it now", attempt.step, tier
                )
                await self.catalog.refresh()
            await self.writership.publish_seen([attempt.folder for attempt in self.catalog.holdings])
            job.store.put(f"{group}/epoch", str(self.writership.epoch).encode())
        else:
            epoch = await wait_for(
                job.store, f"{group}/epoch", self.settings.rank_timeout_seconds, "the leader's epoch"
            )
            self.writership.epoch = int(epoch)
            self.committer = self._committer(job, group)
        await self.committer.meet()
        newest = await self.catalog.newest_manifest()
        if newest is not None:
            self._timeline, self._rewinds, self._run_id = newest.timeline, list(newest.rewinds), newest.run_id
            current = self.catalog.newest_first()
            self._parent = current[0].folder if current else None
        self._run_id = self._run_id or uuid.uuid4().hex
        if job.leader:
            await self._write_run_record(self.tiers[0])
            self.writership.start_beating()
            self._keep(self._clean())
        self._keep(self._mend())

    def _committer(self, job: Job, group: str) -> Committer:
        return Committer(self.run, job, self.writership, group, self.settings.rank_timeout_seconds)

    async def _write_run_record(self, tier: Tier) -> None:
        await tier.commit(RecordKey(self.run, RUN_FILE), encode(RunRecord(run_id=self._run_id, made=self.clock.wall())))

    async def _clean(self) -> None:
        """Frees what killed saves left: attempts of older epochs, whose writers cannot come back."""
        for debris in self.catalog.debris:
            if debris.late or debris.attempt.epoch >= self.writership.epoch:
                continue
            tier = next(t for t in self.tiers if t.info.name == debris.tier)
            log.warning(
                "removing what is left of a save of step %d that was never committed (%s, %d bytes)",
                debris.attempt.step,
                debris.tier,
                debris.size_bytes,
            )
            await tier.drop([CheckpointKey(self.run, debris.attempt.folder)])

    # -- the end -------------------------------------------------------------------------

    def _keep(self, work: Awaitable[object]) -> None:
        """Holds on to background work until it is done; its errors are logged."""
        task = asyncio.ensure_future(work)
        self._background.add(task)

        def ended(done: asyncio.Future[Any]) -> None:
            self._background.discard(done)
            if not done.cancelled() and (error := done.exception()) is not None:
                log.error("background work failed: %s", error)

        task.add_done_callback(ended)

    async def close(self) -> None:
        """Waits for the saves under way and the background's work, then gives the run up."""
        while busy := [*self._saving, *self._background]:  # each may start more
            await asyncio.wait(busy)
        if (
            self._ready is not None
            and self._ready.done()
            and not self._ready.cancelled()
            and self._ready.exception() is None
        ):
            await self.writership.close()
