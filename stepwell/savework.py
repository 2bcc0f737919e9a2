"""One save, carried out: state -> host memory -> first storage tier, each with its commit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from stepwell import native
from stepwell.chain import Chain, Keep, reserve
from stepwell.commit import rank_record
from stepwell.errors import SaveFailed, StepwellError, TierError, TierFull
from stepwell.format.names import Attempt, rank_file
from stepwell.format.records import Draft, FileRecord, Manifest
from stepwell.groups import either
from stepwell.hosting import no_memory, not_hosted
from stepwell.jobs import Job, wait_for
from stepwell.ownership import Ownership, group_of
from stepwell.packing import Packing, pack
from stepwell.reading import Crcs, Healing, Reading
from stepwell.saveroom import SaveRoom, given_up
from stepwell.saving import Order, Save, Turns
from stepwell.shardjob import ShardJob
from stepwell.state import Snapshot
from stepwell.tiers.base import CheckpointKey, RecordKey, Reservation, ShardKey
from stepwell.tiers.gpu import GpuTier
from stepwell.tiers.host import Priority

log = logging.getLogger("stepwell")

#: pauses before a write that failed is tried again from host memory; together below a collective's patience
RETRY_S = (0.2, 1.0, 5.0)
#: how long a failed save waits until what it took is free again; a stuck tier frees nothing
GIVE_UP_S = 5.0
#: how often a rank looks whether another one has given the save up
ABORT_POLL_S = 0.25


class Saver:
    """Carries out the saves of one run. Lives on the event loop."""

    def __init__(self, chain: Chain, owner: Ownership, keep: Keep) -> None:
        """keep: holds on to background work until it is done."""
        self._chain, self._owner, self._keep = chain, owner, keep
        self._drafts, self._commits = Turns(), Turns()
        self.on_named: Callable[[Save, Attempt], object] = lambda save, attempt: None
        #: whether policies want a checkpoint on the first storage tier: (its name, step, bytes, parts)
        self.goes_down: Callable[[Attempt, int, Sequence[str], Callable[[], Sequence[Save]]], Awaitable[bool]] = _always
        self._deciding = asyncio.Lock()  # about one after the other: a window sends down the first in it
        self.all_have: Callable[[Job, int], Awaitable[None]]  # waits until all ranks have a save in memory
        self.on_gpu: Callable[[Attempt, Snapshot, list[Crcs]], object] = lambda attempt, snapshot, crcs: None
        self.last_error: TierError | None = None  # of the first storage tier
        self.failing = False  # until a save gets there again
        self._lost_rewind: tuple[int, int] | None = None  # of a save that failed before its draft: (line, step)
        self.under_way: list[Save] = []  # those that are not on the first tier yet
        self.room = SaveRoom(chain, owner, self.under_way)
        self.holding: set[Save] = set()  # those that have room there, until it is decided what follows from them

    def _decided(self) -> list[Save]:
        return [save for save in self.under_way if save.held is not None]

    def going_down(self) -> set[tuple[str, str]]:
        """(checkpoint, tier) of the saves under way that write to the first storage tier, or may."""
        first = self._chain.first.info.name
        return {(s.checkpoint, first) for s in self.under_way if s.checkpoint is not None and s.held is False}

    async def save(self, save: Save) -> Attempt:
        """Returns once the checkpoint is committed on the first storage tier. Raises what went wrong."""
        order = save.take_order()
        drafts, commits = self._drafts.take(), self._commits.take()
        self.under_way.append(save)
        try:
            if order.job.world == 1:
                return await self._carry_out(save, order, drafts[0], commits[0], drafts[1])
            return await self._together(save, order, drafts[0], commits[0], drafts[1])
        except TierError as error:
            self._note(error)
            raise
        finally:
            self.under_way.remove(save)
            if not drafts[1].done() and order.rewind_to is not None:  # the next one is the first after the rewind
                self._lost_rewind = order.line, order.rewind_to
            _pass_on(None, drafts[1])
            _pass_on(commits[0] if save.held else None, commits[1])

    async def _together(
        self,
        save: Save,
        order: Order,
        drafted: asyncio.Future[None] | None,
        committed: asyncio.Future[None] | None,
        mine: asyncio.Future[None],
    ) -> Attempt:
        """As one with the other ranks: if one of them gives up, all do, and each frees what it took."""
        key = given_up(self._chain, order.job, order.call)
        store = order.job.store
        work = asyncio.ensure_future(self._carry_out(save, order, drafted, committed, mine))
        try:
            while not work.done():
                await asyncio.wait([work], timeout=ABORT_POLL_S)
                if not work.done() and (reason := store.poll(key)) is not None:
                    work.cancel()
                    await asyncio.wait([work])
                    raise SaveFailed(f"another rank gave this save up: {reason.decode()}", step=order.step)
            return work.result()
        except BaseException as error:
            work.cancel()
            if store.poll(key) is None:
                store.put(key, f"rank {order.job.rank}: {error or type(error).__name__}".encode())
            raise

    def give_up(self, call: int, job: Job, why: BaseException) -> None:
        """Tells the other ranks that this one takes no part in a save."""
        job.store.put(given_up(self._chain, job, call), f"rank {job.rank}: {why or type(why).__name__}".encode())

    async def _carry_out(
        self,
        save: Save,
        order: Order,
        drafted: asyncio.Future[None] | None,
        committed: asyncio.Future[None] | None,
        mine: asyncio.Future[None],
    ) -> Attempt:
        chain, first = self._chain, self._chain.first
        attempt = Attempt(await self._owner.take(order.job), order.call, order.step)
        save.checkpoint = attempt.folder
        self.on_named(save, attempt)
        key = CheckpointKey(chain.run, attempt.folder)
        jobs = [
            ShardJob(
                ShardKey(key, shard.file),
                shard.size,
                order.snapshot.source(i),
                None if order.cover is None else order.cover.chunks(i),
                order.marks,
            )
            for i, shard in enumerate(order.snapshot.shards)
        ]
        sizes = [(job.key, job.size) for job in jobs]
        packing: Packing | None = None
        reserved: list[Reservation] = []
        putting: asyncio.Task[None] | None = None
        publishing: asyncio.Task[Manifest] | None = None
        try:
            if chain.gpu is not None:
                packing = await self._pack(save, chain.gpu, jobs)
            save.held = not await self._is_wanted_down(save, order, attempt)
            hosted = await self.room.in_memory(save, order, jobs, drafted, committed)
            if not save.held:
                reserved += await self.room.on_storage(save, order, sizes)
                self.holding.add(save)
            whole = asyncio.Event()
            kept = hosted is not None
            if order.marks:
                await chain.mover.gpus.pin(chain.mover.arena)
            target = None if save.held else first
            putting = asyncio.ensure_future(
                chain.mover.put(
                    target, jobs, save.mark_copied, on_captured=save.mark_captured, on_whole=whole.set, kept=kept
                )
            )
            await either(putting, whole)
            if save.failed:  # save() has left meanwhile: what was copied since need not be the state of its call
                why = f"the save was given up while the state was being copied: {save.error}"
                raise SaveFailed(why, step=order.step)
            if drafted is not None:
                await asyncio.shield(drafted)
            record = rank_record(order, attempt, jobs, self._draft(order, attempt))
            mine.set_result(None)
            order.let_go()  # a tier that hangs must not keep the state's memory
            if packing is not None:
                await self._commit_gpu(save, order, attempt, jobs, record, packing)
                packing = None
            if hosted is not None:
                if save.held:
                    await putting
                    await self.all_have(order.job, order.call)
                kept = await self._commit_host(save, order, attempt, jobs, record, hosted)
                if kept and chain.gpu is not None:
                    chain.gpu.clean(key)
            if save.held:
                if not kept:
                    raise no_memory(order.step)
                self._owner.committed(attempt)
                return attempt
            await self._written(putting, jobs, reserved, kept)
            if committed is not None:
                await asyncio.shield(committed)
            for name, data in order.files.items():
                await first.commit(chain.record(attempt, name), data)
            publishing = asyncio.ensure_future(
                self._owner.committer.publish(
                    first, attempt, record, reserved, given_up=given_up(chain, order.job, order.call)
                )
            )
            manifest = await asyncio.shield(publishing)
        except BaseException:
            self._owner.failed(attempt)
            if putting is not None:
                putting.cancel()
                putting.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen: this one counts
            undo = self._keep(self._give_up(key, reserved, order.job, [job.key for job in jobs], publishing, packing))
            await asyncio.wait([undo], timeout=GIVE_UP_S)
            raise
        chain.catalog.add(attempt, first, {job.key.name: job.size for job in jobs}, manifest)
        for job in jobs:
            chain.mover.arena.clean(job.key)
        if chain.gpu is not None:
            chain.gpu.clean(key)
        self._owner.committed(attempt)
        self.failing = False
        save.mark_committed(first.info.name, chain.clock.monotonic())
        if hosted is not None:  # the next save finds memory beside this one's, and need not wait until it is ready
            chain.mover.arena.expect(sum(job.size for job in jobs))
        return attempt

    async def _is_wanted_down(self, save: Save, order: Order, attempt: Attempt) -> bool:
        """Whether the checkpoint goes to the first storage tier at once; else it stays in memory. With several ranks
        the leader decides for all."""
        job, snapshot = order.job, order.snapshot
        if not self.room.may_hold:
            return True
        key = f"{group_of(self._chain, job)}/call-{order.call}/down"
        if not job.leader:
            patience_s = self._chain.settings.rank_timeout_seconds
            return await wait_for(job.store, key, patience_s, "the leader's decision") == b"1"
        try:
            async with self._deciding:
                wanted = await self.goes_down(attempt, snapshot.nbytes, list(snapshot.part_bytes), self._decided)
                save.held = not wanted
        except Exception:  # a policy's own: what it would have said of it must not cost the checkpoint
            log.exception("policies could not be asked about step %d: it goes down", order.step)
            wanted = True
        if job.world > 1:
            job.store.put(key, b"1" if wanted else b"0")
        return wanted

    async def _pack(self, save: Save, gpu: GpuTier, jobs: Sequence[ShardJob]) -> Packing | None:
        """A copy within GPU memory first, if there is room for it."""
        packing = await pack(gpu, jobs, self._chain.mover.arena.slot_bytes)
        if why := packing if isinstance(packing, str) else packing.why_not:
            not_hosted(save, gpu, why)
        return None if isinstance(packing, str) else packing

    async def _commit_gpu(
        self, save: Save, order: Order, attempt: Attempt, jobs: Sequence[ShardJob], record: bytes, packing: Packing
    ) -> None:
        """All is in host memory: the copy in GPU memory is committed there, or goes."""
        chain, gpu, reserved = self._chain, self._chain.gpu, packing.reserved
        assert gpu is not None
        if reserved is None or packing.why_not:
            not_hosted(save, gpu, packing.why_not)
            await packing.undo()
            return
        packing.whole()
        for name, data in order.files.items():
            await gpu.commit(chain.record(attempt, name), data)
        manifest = await self._owner.committer.publish(gpu, attempt, record, reserved)
        chain.catalog.add(attempt, gpu, {job.key.name: job.size for job in jobs}, manifest)
        self.on_gpu(attempt, order.snapshot, [job.crcs for job in jobs])
        save.mark_committed(gpu.info.name, chain.clock.monotonic())

    async def _commit_host(
        self,
        save: Save,
        order: Order,
        attempt: Attempt,
        jobs: Sequence[ShardJob],
        record: bytes,
        reserved: Sequence[Reservation],
    ) -> bool:
        """False if the system gave less memory than was promised: then the checkpoint has only passed through."""
        chain, host = self._chain, self._chain.host
        assert host is not None
        for name, data in order.files.items():
            await host.commit(chain.record(attempt, name), data)
        try:
            manifest = await self._owner.committer.publish(host, attempt, record, reserved)
        except TierFull as error:
            await host.drop([CheckpointKey(chain.run, attempt.folder)])
            not_hosted(save, host, str(error))
            return False
        chain.catalog.add(attempt, host, {job.key.name: job.size for job in jobs}, manifest)
        save.mark_committed(host.info.name, chain.clock.monotonic())
        return True

    async def _written(
        self, putting: asyncio.Task[None], jobs: Sequence[ShardJob], reserved: list[Reservation], kept: bool
    ) -> None:
        """Returns once all is written; what host memory keeps is tried again if the tier fails."""
        chain, first = self._chain, self._chain.first
        try:
            await asyncio.shield(putting)
            return
        except TierError as error:
            if not kept or isinstance(error, TierFull):
                raise
            failure = self._note(error)
        assert chain.host is not None
        for pause in RETRY_S:
            log.warning("writing to %s failed, again in %.1f s: %s", first.info.name, pause, failure)
            await chain.clock.sleep(pause)
            try:
                while reserved:
                    await first.abort(reserved[-1])
                    del reserved[-1]
                reserved += await reserve(first, [(job.key, job.size) for job in jobs])
                for job in jobs:
                    reading = Reading(
                        job.key, [chain.host], job.crcs, Healing(), Priority.SNAPSHOT, target=first.info.name
                    )
                    await chain.mover.copy(reading, first, job.size)
                return
            except TierFull:
                raise
            except TierError as error:
                failure = self._note(error)
        raise failure

    async def _give_up(
        self,
        key: CheckpointKey,
        reserved: Sequence[Reservation],
        job: Job,
        shards: Sequence[ShardKey],
        publishing: asyncio.Future[Manifest] | None,
        packing: Packing | None,
    ) -> None:
        """Frees what a failed attempt took. Other ranks' files of it are theirs to free."""
        chain = self._chain
        await chain.mover.settled(shards)
        if packing is not None:
            await packing.undo()
        if publishing is not None:  # a commit that was begun goes on, and must not land in what was removed
            await asyncio.wait([publishing])
            if not publishing.cancelled() and publishing.exception() is None:
                return
        attempt = Attempt.parse(key.attempt)
        assert attempt is not None
        self._owner.committer.withdraw(chain.first, attempt)
        for tier in (chain.gpu, chain.host):
            if tier is not None:
                chain.catalog.remove(attempt, tier)
                await tier.drop([key])
        if not reserved:
            return
        try:
            for reservation in reserved:
                await chain.first.abort(reservation)
        except StepwellError as error:
            self._stays(error)
            return
        # it asks the last tier first, which may be stuck, and the next save waits
        self._keep(self._drop_rest(key, job, reserved))

    async def _drop_rest(self, key: CheckpointKey, job: Job, reserved: Sequence[Reservation]) -> None:
        """What a failed attempt has left on the first tier: of several ranks, this one's record, and the shards that
        were committed with it."""
        first, record = self._chain.first, RecordKey(key.run, f"{key.attempt}/{rank_file(job.rank)}")
        try:
            if self._owner.writership.lost or not await self._owner.writership.still_ours():
                return  # the next writer may count on it already
            await first.drop([key] if job.world == 1 else [record, *(each.shard for each in reserved)])
        except StepwellError as error:
            self._stays(error)

    def _stays(self, error: StepwellError) -> None:
        log.warning("what a failed save left on %s stays there: %s", self._chain.first.info.name, error)

    def _note(self, error: TierError) -> TierError:
        self.last_error, self.failing = error, True
        return error

    def _draft(self, order: Order, attempt: Attempt) -> Draft:
        """The manifest's words. Called in the order of saves, so that each one's parent is the one before."""
        owner = self._owner
        rewind_to, lost, self._lost_rewind = order.rewind_to, self._lost_rewind, None
        if rewind_to is None and lost is not None and lost[0] == order.line:
            rewind_to = lost[1]
        if rewind_to is None:
            rewind_to = owner.hidden_base(order.step)
        if rewind_to is not None:
            owner.rewind(rewind_to, attempt)
        parent = owner.next_parent(attempt)
        return Draft(
            run_id=owner.run_id,
            files={name: FileRecord(len(data), native.crc32c(data)) for name, data in order.files.items()},
            metrics=order.metrics,
            tags=order.tags,
            parent=parent,
            timeline=owner.timeline,
            rewinds=owner.rewinds,
            made=order.made,
            seconds={
                "capture": round(order.capture_seconds, 6),
                "copied": round(self._chain.clock.monotonic() - order.began, 6),
            },
        )


async def _always(*of: object) -> bool:
    return True


def _pass_on(before: asyncio.Future[None] | None, mine: asyncio.Future[None]) -> None:
    """The next save's turn comes, now or once that of the save before has come."""
    if before is not None and not before.done():
        before.add_done_callback(lambda done: _pass_on(None, mine))
    elif not mine.done():
        mine.set_result(None)
