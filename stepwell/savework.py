"""One save, carried out: state -> host memory -> first storage tier, each with its commit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from stepwell import native
from stepwell.chain import Chain, Keep, reserve
from stepwell.commit import rank_record
from stepwell.errors import SaveFailed, SaveSkipped, StepwellError, TierError, TierFull
from stepwell.format.names import Attempt, rank_file
from stepwell.format.records import Draft, FileRecord, Manifest
from stepwell.groups import either
from stepwell.hosting import has_room, no_memory, not_hosted, said_of, try_reserve
from stepwell.hostmem import host_budget_bytes, local_ranks
from stepwell.jobs import Job, wait_for
from stepwell.ownership import Ownership, group_of
from stepwell.putting import ShardJob
from stepwell.reading import Healing, Reading
from stepwell.saving import Order, Save, Turns
from stepwell.tiers.base import CheckpointKey, RecordKey, Refused, Reservation, ShardKey, Tier
from stepwell.tiers.host import HostTier, Priority

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
        #: waits until room was freed on a tier, at most so long; False if there is nothing to wait for
        self.make_room: Callable[[Tier, float], Awaitable[bool]]
        self.may_free: Callable[[Tier], Awaitable[bool]]
        #: whether policies want a checkpoint on the first storage tier: (its name, step, bytes, parts)
        self.goes_down: Callable[[Attempt, int, Sequence[str], Callable[[], Sequence[Save]]], Awaitable[bool]] = _always
        self._deciding = asyncio.Lock()  # about one after the other: a window sends down the first in it
        #: lets go of a checkpoint in memory alone that a newer one has made superfluous; False: there is none
        self.let_older_go: Callable[[], Awaitable[bool]] = _never
        self.all_have: Callable[[Job, int], Awaitable[None]]  # waits until all ranks have a save in memory
        self.last_error: TierError | None = None  # of the first storage tier
        self.failing = False  # until a save gets there again
        self._lost_rewind: tuple[int, int] | None = None  # of a save that failed before its draft: (line, step)
        self.may_hold = False  # whether policies may keep a checkpoint from the first storage tier
        self.under_way: list[Save] = []  # those that are not on the first tier yet
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
        key = self._given_up(order.call, order.job)
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

    def _given_up(self, call: int, job: Job) -> str:
        return f"{group_of(self._chain, job)}/call-{call}/given-up"

    def give_up(self, call: int, job: Job, why: BaseException) -> None:
        """Tells the other ranks that this one takes no part in a save."""
        job.store.put(self._given_up(call, job), f"rank {job.rank}: {why or type(why).__name__}".encode())

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
        save.held = not await self._is_wanted_down(save, order, attempt)
        hosted = await self._reserve_host(save, order, jobs, drafted, committed)
        reserved: list[Reservation] = []
        putting: asyncio.Task[None] | None = None
        publishing: asyncio.Task[Manifest] | None = None
        try:
            if not save.held:
                reserved += await self._reserve(save, order, sizes)
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
            if hosted is not None:
                if save.held:
                    await putting
                    await self.all_have(order.job, order.call)
                kept = await self._commit_host(save, order, attempt, jobs, record, hosted)
            if save.held:
                if not kept:
                    raise no_memory(order.step)
                self._owner.committed(attempt)
                return attempt
            await self._written(putting, jobs, reserved, kept)
            if committed is not None:
                await asyncio.shield(committed)
            for name, data in order.files.items():
                await first.commit(RecordKey(chain.run, f"{attempt.folder}/{name}"), data)
            publishing = asyncio.ensure_future(self._owner.committer.publish(first, attempt, record, reserved))
            manifest = await asyncio.shield(publishing)
        except BaseException:
            self._owner.failed(attempt)
            if putting is not None:
                putting.cancel()
                putting.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen: this one counts
            undo = self._keep(self._give_up(key, reserved, order.job, [job.key for job in jobs], publishing))
            await asyncio.wait([undo], timeout=GIVE_UP_S)
            raise
        chain.catalog.add(attempt, first, {job.key.name: job.size for job in jobs}, manifest)
        for job in jobs:
            chain.mover.arena.clean(job.key)
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
        if not self.may_hold:
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

    def _check_memory(self, save: Save, order: Order) -> None:
        """Raises SaveSkipped if save() would have to wait until an earlier save is written, and may not."""
        host = self._chain.host
        if not self._skips(order) or self.under_way.index(save) == 0:
            return
        if host is None or host.arena.keepable_bytes < order.snapshot.nbytes:
            raise SaveSkipped(
                f"on_pressure = 'skip': an earlier save is not on {self._chain.first.info.name} yet, and host memory "
                "has no room for another one", todo=_SKIPPED, step=order.step,
            )  # fmt: skip

    def _skips(self, order: Order) -> bool:
        """Whether a save may be given up rather than wait; with several ranks only the leader decides that."""
        return self._chain.settings.on_pressure == "skip" and order.job.leader

    async def _reserve(self, save: Save, order: Order, sizes: Sequence[tuple[ShardKey, int]]) -> list[Reservation]:
        """Room on the first storage tier. While deletes or flushes will make some, save() blocks, or does what
        `on_pressure` says."""
        chain = self._chain
        until = order.began + chain.settings.block_timeout
        while True:
            try:
                return await reserve(chain.first, sizes)
            except TierFull as error:
                left = until - chain.clock.monotonic()
                if self._skips(order) and await self.may_free(chain.first):
                    raise SaveSkipped(f"on_pressure = 'skip': {error.what}", todo=_SKIPPED, step=order.step) from error
                if left <= 0 or not await self.make_room(chain.first, left):
                    raise

    async def _reserve_host(
        self,
        save: Save,
        order: Order,
        jobs: Sequence[ShardJob],
        before: asyncio.Future[None] | None,
        committed: asyncio.Future[None] | None,
    ) -> list[Reservation] | None:
        """Room in host memory for all of the checkpoint; None if it only passes through. before, committed: the save
        before this one has its draft, and has ended."""
        host = self._chain.host
        if host is None:
            self._check_memory(save, order)
            return None
        if host.grows:
            host.grow(host_budget_bytes(order.snapshot.nbytes, local_ranks()))
        self._check_memory(save, order)
        if save.held:
            return await self._reserve_alone(host, order, jobs, committed)
        if self.may_hold and not has_room(host, jobs):  # what is there alone will not make room by itself
            if committed is not None:
                await asyncio.shield(committed)
            await self.let_older_go()
            if not has_room(host, jobs):
                not_hosted(save, host, said_of(host, jobs))
                return None
        granted = await try_reserve(host, jobs)
        if isinstance(granted, Refused) and before is not None and host.fits([job.size for job in jobs]):
            await asyncio.shield(before)  # an earlier save is still being copied: its promise ends with that
            granted = await try_reserve(host, jobs)
        if isinstance(granted, Refused):
            not_hosted(save, host, granted.detail)
            return None
        return granted

    async def _reserve_alone(
        self, host: HostTier, order: Order, jobs: Sequence[ShardJob], committed: asyncio.Future[None] | None
    ) -> list[Reservation]:
        """Room for what stays in memory alone: there it stays, so nothing else may need that room."""
        while True:
            granted = await try_reserve(host, jobs) if has_room(host, jobs) else None
            if isinstance(granted, list):
                return granted
            if committed is not None and not committed.done():  # then the one before that is superfluous
                await asyncio.shield(committed)
            elif not await self.let_older_go():
                raise no_memory(order.step, said_of(host, jobs) if granted is None else granted.detail)

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
            await host.commit(RecordKey(chain.run, f"{attempt.folder}/{name}"), data)
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
    ) -> None:
        """Frees what a failed attempt took. Other ranks' files of it are theirs to free."""
        chain = self._chain
        await chain.mover.settled(shards)
        if publishing is not None:  # a commit that was begun goes on, and must not land in what was removed
            await asyncio.wait([publishing])
            if not publishing.cancelled() and publishing.exception() is None:
                return
        if chain.host is not None:
            attempt = Attempt.parse(key.attempt)
            assert attempt is not None
            chain.catalog.remove(attempt, chain.host)
            await chain.host.drop([key])
        if not reserved:
            return
        record = RecordKey(key.run, f"{key.attempt}/{rank_file(job.rank)}")
        try:
            for reservation in reserved:
                await chain.first.abort(reservation)
            if self._owner.writership.lost or not await self._owner.writership.still_ours():
                return  # the next writer may count on it already
            await chain.first.drop([key] if job.world == 1 else [record])
        except StepwellError as error:
            log.warning("what a failed save left on %s stays there: %s", chain.first.info.name, error)

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


async def _never() -> bool:
    return False


_SKIPPED = "The next save is tried again; on_pressure = 'block' waits for room instead"


def _pass_on(before: asyncio.Future[None] | None, mine: asyncio.Future[None]) -> None:
    """The next save's turn comes, now or once that of the save before has come."""
    if before is not None and not before.done():
        before.add_done_callback(lambda done: _pass_on(None, mine))
    elif not mine.done():
        mine.set_result(None)
