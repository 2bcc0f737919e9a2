"""One save, carried out: state -> host memory -> first storage tier, each with its commit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from stepwell import native
from stepwell.chain import Chain, Keep, reserve
from stepwell.commit import rank_record
from stepwell.errors import NotPlanned, SaveFailed, SaveSkipped, StepwellError, TierError, TierFull
from stepwell.format.names import Attempt, rank_file
from stepwell.format.records import Draft, FileRecord, Manifest
from stepwell.hostmem import host_budget_bytes, local_ranks
from stepwell.jobs import Job
from stepwell.mover import ShardJob
from stepwell.ownership import Ownership, group_of
from stepwell.reading import Healing, Reading
from stepwell.saving import Order, Save, Turns
from stepwell.tiers.base import CheckpointKey, RecordKey, Refused, Reservation, ShardKey, Tier
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
        #: waits until room was freed on a tier, at most so long; False if there is nothing to wait for
        self.make_room: Callable[[Tier, float], Awaitable[bool]]
        self.may_free: Callable[[Tier], Awaitable[bool]]
        self.last_error: TierError | None = None  # of the first storage tier
        self.failing = False  # until a save gets there again
        self._lost_rewind: tuple[int, int] | None = None  # of a save that failed before its draft: (line, step)
        self.under_way: list[Save] = []  # those that are not on the first tier yet
        self.holding: set[Save] = set()  # those that have room there, until it is decided what follows from them

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
            for _, mine in (drafts, commits):
                if not mine.done():
                    mine.set_result(None)

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
            ShardJob(ShardKey(key, shard.file), shard.size, order.snapshot.source(i))
            for i, shard in enumerate(order.snapshot.shards)
        ]
        sizes = [(job.key, job.size) for job in jobs]
        hosted = await self._reserve_host(save, order, jobs, drafted)
        reserved: list[Reservation] = []
        putting: asyncio.Task[None] | None = None
        publishing: asyncio.Task[Manifest] | None = None
        try:
            reserved += await self._reserve(save, order, sizes)
            self.holding.add(save)
            copied = asyncio.Event()

            def on_copied() -> None:
                save.mark_copied()
                copied.set()

            kept = hosted is not None
            putting = asyncio.ensure_future(chain.mover.put(first, jobs, on_copied, kept=kept))
            await _either(putting, copied)
            if save.failed:  # save() has left meanwhile: what was copied since need not be the state of its call
                raise SaveFailed("the save was given up while the state was being copied", step=order.step)
            if drafted is not None:
                await asyncio.shield(drafted)
            record = rank_record(order, attempt, jobs, self._draft(order, attempt))
            mine.set_result(None)
            order.let_go()  # a tier that hangs must not keep the state's memory
            if hosted is not None:
                kept = await self._commit_host(save, order, attempt, jobs, record, hosted)
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
        self, save: Save, order: Order, jobs: Sequence[ShardJob], before: asyncio.Future[None] | None
    ) -> list[Reservation] | None:
        """Room in host memory for all of the checkpoint; None if it only passes through."""
        host = self._chain.host
        if host is None:
            self._check_memory(save, order)
            return None
        if host.grows:
            host.grow(host_budget_bytes(order.snapshot.nbytes, local_ranks()))
        self._check_memory(save, order)
        granted = await _try_reserve(host, jobs)
        if isinstance(granted, Refused) and before is not None and host.fits([job.size for job in jobs]):
            await asyncio.shield(before)  # an earlier save is still being copied: its promise ends with that
            granted = await _try_reserve(host, jobs)
        if isinstance(granted, Refused):
            _not_hosted(save, host, granted.detail)
            return None
        return granted

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
            _not_hosted(save, host, str(error))
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


_SKIPPED = "The next save is tried again; on_pressure = 'block' waits for room instead"


def _not_hosted(save: Save, host: Tier, why: str) -> None:
    name = host.info.name
    save.not_planned(name, NotPlanned(
        f"the checkpoint does not stay in host memory: {why}",
        todo="Give the host tier more memory, or wait for another tier", step=save.step, tier=name,
    ))  # fmt: skip


async def _try_reserve(tier: Tier, jobs: Sequence[ShardJob]) -> list[Reservation] | Refused:
    granted: list[Reservation] = []
    for job in jobs:
        answer = await tier.reserve(job.key, job.size)
        if isinstance(answer, Refused):
            for reservation in granted:
                await tier.abort(reservation)
            return answer
        granted.append(answer)
    return granted


async def _either(task: asyncio.Task[None], event: asyncio.Event) -> None:
    """Returns once the event is set; raises the task's error if that comes first."""
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        if not event.is_set():
            task.result()
    finally:
        waiting.cancel()
