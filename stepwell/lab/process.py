"""One simulated process: the real writer, catalog, mover, arena and policies over tiers of the lab.

It does what `CheckpointStore` does around them, without its threads. A restart is a new one on the same places.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from stepwell.catalog import Catalog
from stepwell.chain import Chain
from stepwell.errors import CheckpointNotFound, CorruptData, StepwellError, TierError
from stepwell.jobs import Job
from stepwell.lab.loop import SimLoop
from stepwell.lab.memory import NOWHERE, Copier, Region, snapshot_of
from stepwell.lab.tier import LabTier, Place
from stepwell.mover import Mover
from stepwell.policies.base import Policy
from stepwell.policies.evict import LRU
from stepwell.prefetching import Prefetch
from stepwell.reader import OpenCheckpoint, open_checkpoint
from stepwell.reading import Reading
from stepwell.saving import Order, Save
from stepwell.settings import Settings, TierOptions
from stepwell.tiers.base import Tier
from stepwell.tiers.host import Arena, HostTier, Priority
from stepwell.tracing import TRACE_CHUNK_BYTES, Chunks
from stepwell.wanted import Choice, Item, item_of, own_attempt
from stepwell.writer import RunWriter

#: the run of models that are only loaded
MODELS = "models"
#: what clocks on walls show when a simulation begins
EPOCH_S = 1.7e9
#: as the store does: what background work gets at the end
_CLOSE_S = 3.0


class LoopClock:
    """The virtual time of the loop that asks."""

    def wall(self) -> float:
        return EPOCH_S + asyncio.get_running_loop().time()

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@dataclass(frozen=True, slots=True)
class Setup:
    """What all processes of a simulation have in common."""

    run: str
    names: tuple[str, ...]  # of the tiers, nearest first
    places: Mapping[str, Place]  # of the storage tiers
    make_host: Callable[[], HostTier] | None
    staging_bytes: int  # where there is no host tier
    settings: Settings
    options: Mapping[str, TierOptions]
    make_policies: Callable[[], Sequence[Policy]]
    copy_bytes_per_s: float
    models: Mapping[str, int] = field(default_factory=dict)  # by name: the step that stands for it in run `models`


@dataclass(frozen=True, slots=True)
class Brought:
    """What a restore or a load brought. sources: bytes by tier."""

    step: int | None
    sources: dict[str, int]
    error: str = ""


class Process:
    """Everything that it holds is gone when it is killed; places stay, and so does a host tier that is handed on."""

    def __init__(
        self, loop: SimLoop, setup: Setup, job: Job, rng: random.Random, host: HostTier | None = None,
        *, only: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        """host: of a process before. only: the tiers that are left, default all."""
        self.loop, self.setup, self.job = loop, setup, job
        names = [name for name in setup.names if only is None or name in only]
        self._storage = [LabTier(setup.places[name]) for name in names if name in setup.places]
        self.host = host
        if host is None and setup.make_host is not None and only is None:
            self.host = setup.make_host()
        self.tiers: list[Tier] = [*([self.host] if self.host is not None else []), *self._storage]
        if self.host is not None:
            arena = self.host.arena
        else:
            arena = Arena(setup.staging_bytes, LRU(), memory=Region, background=False)
        self.mover = Mover(Copier(setup.copy_bytes_per_s), arena, self.host)
        self.catalog = Catalog(setup.run, self.tiers)
        self.chain = Chain(
            setup.run, self.tiers, self.mover, self.catalog, LoopClock(), setup.settings, setup.options
        )  # fmt: skip
        self.writer = RunWriter(self.chain, setup.make_policies(), rng)
        self.models = Catalog(MODELS, [self._storage[-1]])
        self.saves: list[Save] = []
        self._calls = 0
        self._ahead: asyncio.Task[None] | None = None  # what policies bring up when a store is opened

    def __repr__(self) -> str:
        return f"<Process {self.loop.name}, {len(self.saves)} saves>"

    async def start(self) -> None:
        for tier in self.tiers:
            await tier.start()
        if self.writer.steering.looks_ahead:
            self._ahead = self.loop.create_task(self.writer.look_ahead(self.job))

    def kill(self) -> None:
        for tier in self._storage:
            tier.kill()
        self.loop.kill()

    # -- saving ------------------------------------------------------------------------------------

    async def save(self, step: int, parts: Mapping[str, int]) -> Save:
        """As `store.save`: returns when the state may change again, or the save was given up."""
        self._calls += 1
        loop, clock = self.loop, self.chain.clock
        began = clock.monotonic()
        order = Order(
            call=self._calls, step=step, job=self.job,
            snapshot=snapshot_of(parts, self.job.rank, self.job.world).as_snapshot(),
            metrics={}, tags=[], files={}, began=began, made=clock.wall(), capture_seconds=0.0, rewind_to=None,
        )  # fmt: skip
        save = Save(order, self.tiers)
        self.saves.append(save)
        running = loop.create_task(self.writer.save(save))
        await asyncio.wait([asyncio.wrap_future(save.copied)], timeout=self.setup.settings.block_timeout)
        if not save.copied.done():
            await self.writer.skip(save, clock.monotonic() - began)
            running.cancel()
        save.blocked_seconds = clock.monotonic() - began
        return save

    # -- reading -----------------------------------------------------------------------------------

    async def restore(self, step: int | None, parts: Sequence[str]) -> Brought:
        """The newest good checkpoint that holds the parts, or the one of `step`, as `store.restore` chooses it."""
        await self.catalog.refresh()
        try:
            found = self.catalog.newest_first() if step is None else self.catalog.at_step(step)
        except CheckpointNotFound:  # it was deleted here, or never there
            found = self.catalog.newest_first()
        error = "there is no checkpoint"
        for attempt in found:
            try:
                opened = await open_checkpoint(self.catalog, attempt, self.job.rank, self.job.world, parts or None)
            except (CorruptData, TierError, CheckpointNotFound) as raised:
                error = str(raised)
                continue
            if parts and not set(parts) <= set(opened.record.parts):
                self.loop.create_task(opened.close())
                error = f"step {attempt.step} does not hold all parts"
                continue
            return await self._read(opened, None)
        return Brought(None, {}, error)

    async def load(self, ref: str, chunks: Chunks | None) -> Brought:
        """As `stepwell.load` of a model; what the arena holds of it is taken from there."""
        return await self._read(await self._open_model(ref), chunks)

    async def _open_model(self, ref: str) -> OpenCheckpoint:
        await self.models.refresh()
        [attempt] = self.models.at_step(self.setup.models[ref])
        return await open_checkpoint(self.models, attempt, 0, 1)

    async def _read(self, opened: OpenCheckpoint, chunks: Chunks | None) -> Brought:
        try:
            asked = [self._read_shard(opened, at, chunks) for at in range(len(opened.held))]
            for answer in await asyncio.gather(*asked, return_exceptions=True):
                if isinstance(answer, BaseException):
                    raise answer
        except StepwellError as error:
            return Brought(None, dict(opened.healing.read_bytes), str(error))
        finally:
            self.loop.create_task(opened.close())
        return Brought(opened.attempt.step, dict(opened.healing.read_bytes))

    async def _read_shard(self, opened: OpenCheckpoint, index: int, chunks: Chunks | None) -> None:
        held = opened.held[index]
        size = held.shard.size
        reading = Reading(
            held.key, held.tiers, held.shard.crcs(), opened.healing, Priority.RESTORE, NOWHERE, caller=opened.caller,
            size=size, stays=True,
        )  # fmt: skip
        reads = self.mover.all_of(size)
        if chunks is not None:
            runs = next((runs for file, runs in chunks.items() if held.key.name == file), [])
            spans = [(first * TRACE_CHUNK_BYTES, (first + count) * TRACE_CHUNK_BYTES) for first, count in runs]
            reads = [read for read in reads if any(a < read.start + read.length and read.start < b for a, b in spans)]
        await self.mover.get(reading, reads)

    async def prefetch(self, refs: Sequence[str], to: str) -> str:
        """As `store.prefetch`, to its end; refs are models, or steps of the run. Returns what went wrong."""
        handle, choice = Prefetch(), Choice()
        try:
            if to in self.setup.places:
                tier = next(tier for tier in self.tiers if tier.info.name == to)
                steps = [int(ref) if ref.isdecimal() else ref for ref in refs]
                await self.writer.ahead.bring(steps, tier, handle, choice, None, self.job)
            else:
                await self.writer.ahead.lift_items([await self._item(ref, choice) for ref in refs], handle)
        except StepwellError as error:
            return str(error)
        return ""

    async def _item(self, ref: str, choice: Choice) -> Item:
        model = next((name for name in self.setup.models if ref in (name, name.rpartition("@")[0])), None)
        if model is not None:
            await self.models.refresh()
            [attempt] = self.models.at_step(self.setup.models[model])
            return await item_of(self.mover, self.models, attempt, 0, 1, choice)
        await self.catalog.refresh()
        attempt = await own_attempt(self.catalog, int(ref) if ref.isdecimal() else ref)
        return await item_of(self.mover, self.catalog, attempt, self.job.rank, self.job.world, choice)

    # -- the end -----------------------------------------------------------------------------------

    async def close(self) -> bool:
        """As `store.close`; whether all got down in time."""
        done = True
        try:
            async with asyncio.timeout(self.setup.settings.exit_timeout):
                await self.writer.finish()
        except TimeoutError:
            done = False
        await self.writer.close(_CLOSE_S)
        return done
