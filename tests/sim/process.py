"""One simulated process: the real writer, catalog, mover and policies over simulated tiers, and a training loop.

It does what `CheckpointStore` does around them, without its threads: a crash may come between any two callbacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from stepwell.catalog import Catalog
from stepwell.chain import Chain
from stepwell.errors import CheckpointNotFound, CorruptData, NotPlanned, SaveFailed, StepwellError, TierError
from stepwell.format.names import Attempt
from stepwell.format.records import EpochRecord
from stepwell.jobs import Job, LocalStore
from stepwell.lab.loop import SimLoop
from stepwell.mover import Mover
from stepwell.native import PieceMap
from stepwell.policies.evict import LRU
from stepwell.policies.prefetch import PrefetchNewest
from stepwell.reader import OpenCheckpoint, open_checkpoint
from stepwell.reading import Reading
from stepwell.saving import Order, Save
from stepwell.settings import Settings
from stepwell.tiers._paced import Paced
from stepwell.tiers._retrying import Retrying
from stepwell.tiers._timed import Timed
from stepwell.tiers.base import CheckpointKey, Tier
from stepwell.tiers.host import Arena, HostTier, Priority
from stepwell.writer import RunWriter
from tests.sim.medium import Medium, Token
from tests.sim.memory import NOTHING, Copier, Memory, Tokens, blocks_of
from tests.sim.model import FakeSnapshot, Saved, make_snapshot, random_sizes
from tests.sim.rules import TAGS, Rules, policies_of
from tests.sim.tier import SimTier
from tests.sim.weather import Weather

RUN = "run"
CHUNK_BYTES = 2 << 20
#: as the store does: how long save() blocks, and what the last steps of closing may take
BLOCK_S, STOP_S = 120.0, 10.0
#: what clocks on walls show when a world begins
EPOCH_S = 1.7e9


@dataclass(frozen=True, slots=True)
class Setup:
    """What all processes of a world have in common."""

    kinds: tuple[str, ...]  # of tiers, nearest first: host, disk, nvme, pfs
    arena_bytes: int
    rules: Rules
    on_pressure: str = "block"
    timeout_s: float = 60.0  # of the pfs
    save_chunks_max: int | None = None  # of a checkpoint, each of its shards rounded up
    newest_ahead: bool = False  # the newest checkpoint comes up to host memory by itself


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore brought."""

    attempt: Attempt
    tokens: dict[str, list[Token]]
    skipped: dict[int, str] = field(default_factory=dict)


class LoopClock:
    """The virtual time of the loop that asks."""

    def wall(self) -> float:
        return EPOCH_S + asyncio.get_running_loop().time()

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Process:
    """An incarnation on `node`. Everything that it holds is gone when it is killed; the media stay."""

    def __init__(
        self,
        loop: SimLoop,
        pid: int,
        node: str,
        setup: Setup,
        places: dict[str, tuple[Medium, Weather]],
        rng: random.Random,
        *,
        reads_only: bool = False,
    ) -> None:
        self.loop, self.pid, self.node, self.setup, self.rng = loop, pid, node, setup, rng
        self.started = loop.time()
        self.reads_only = reads_only
        self.saves: list[Saved] = []
        self.ended = False
        self.ended_at = self.closing_at = float("inf")
        self.exit_s = 0.0
        self.paused_at = -1.0
        self.failure: StepwellError | None = None
        self.broken: Exception | None = None
        self._memory = Memory()
        self._sims: list[SimTier] = []
        self._calls = 0
        self._rewind_to: int | None = None
        self.last_step = -1
        self.host: HostTier | None = None
        self.tiers = [self._tier(kind, places) for kind in setup.kinds]
        self._assemble()

    def __repr__(self) -> str:
        return f"<Process {self.loop.name} on {self.node}, {len(self.saves)} saves>"

    # -- what it is made of --------------------------------------------------------------------------

    def _tier(self, kind: str, places: dict[str, tuple[Medium, Weather]]) -> Tier:
        if kind == "host":
            size = self.setup.arena_bytes
            self.host = HostTier(LRU(), size, chunk_bytes=CHUNK_BYTES, memory=self._memory.region, background=False)
            return self.host
        medium, weather = places[kind]
        shared = kind == "pfs"
        sim = SimTier(
            medium, self._memory, weather, self.rng, node=self.node,
            scope="shared" if shared else "node", survives="node-loss" if shared else "reboot",
        )  # fmt: skip
        self._sims.append(sim)
        if not shared:
            return sim

        async def names_of(checkpoint: CheckpointKey) -> Sequence[str]:
            return [found.name for found in medium.listing(checkpoint.run, checkpoint.attempt)]

        timed = Timed(sim, self.setup.timeout_s)
        return Paced(Retrying(timed, asyncio.sleep, self.rng.random), 0.02, names_of, asyncio.sleep)

    def _assemble(self) -> None:
        """As `CheckpointStore` does it."""
        if self.host is not None:
            self.arena = self.host.arena
        else:
            self.arena = Arena(
                self.setup.arena_bytes, LRU(), slot_bytes=CHUNK_BYTES, memory=self._memory.region, background=False
            )
        self.mover = Mover(Copier(self._memory, self.rng), self.arena, self.host)
        self.catalog = Catalog(RUN, self.tiers)
        rules = self.setup.rules
        options = {tier: mine.options for tier, mine in rules.items()}
        settings = Settings(on_pressure=self.setup.on_pressure)
        chain = Chain(RUN, self.tiers, self.mover, self.catalog, LoopClock(), settings, options)
        self.chain = chain
        policies = [] if self.reads_only else policies_of(rules, list(rules))
        if self.setup.newest_ahead and self.host is not None:
            policies = [*policies, PrefetchNewest("host")]
        self.writer = RunWriter(chain, policies, self.rng)
        self.job = Job(0, 1, LocalStore(), None, 0)

    def describe(self, job: Job, wall: float) -> EpochRecord:
        """Stands for `epochs.describe_self`."""
        return EpochRecord(
            token=uuid.uuid4().hex, user="sim", host=self.node, boot=self.node, pid_space="sim", pid=self.pid,
            pid_started=self.started, job=None, restarts=0, made=wall,
        )  # fmt: skip

    def kill(self) -> None:
        for sim in self._sims:
            sim.kill()
        self.ended, self.ended_at = True, min(self.ended_at, self.loop.time())
        self.loop.kill()

    def run(self, work: Callable[[Process], Coroutine[Any, Any, None]]) -> None:
        """Starts the process's main coroutine; `ended` and `failure` tell of its end."""

        async def main() -> None:
            try:
                await work(self)
            except StepwellError as error:
                self.failure = error
            except Exception as error:  # no error that a user should see
                self.broken = error
            finally:
                self.ended, self.ended_at = True, self.loop.time()

        with self.loop.running():
            self.loop.create_task(main())

    def knows(self, attempt: Attempt, tier: str) -> bool:
        """Whether its catalog has a copy there."""
        return any(holding.tier.info.name == tier for holding in self.catalog.holdings.get(attempt, []))

    def has_read(self, attempt: Attempt, tier: str) -> bool:
        """Whether its catalog has the manifest of the copy there."""
        return self.catalog.known_manifest(attempt, self.chain.named(tier)) is not None

    @property
    def wall(self) -> float:
        """What its clock shows."""
        return EPOCH_S + self.loop.time()

    @property
    def held(self) -> list[object]:
        """Slots and turns that somebody still has or waits for."""
        with self.loop.running():
            edges = [edge.statistics() for edge in self.mover.edges.all()]
        held: list[object] = [edge for edge in edges if edge.in_flight_bytes or edge.queued]
        return [self.arena, *held] if self.arena.in_use else held

    # -- what it can do ------------------------------------------------------------------------------

    async def start(self) -> None:
        for tier in self.tiers:
            await tier.start()
        if self.writer.steering.looks_ahead:
            self.loop.create_task(self._look_ahead())

    async def _look_ahead(self) -> None:
        with contextlib.suppress(StepwellError):
            await self.writer.look_ahead(self.job)

    async def restore(self) -> Restored | None:
        """The newest good checkpoint, as `stepwell.restoring` chooses it. Raises as `restore` does."""
        await self.catalog.refresh_patiently()
        candidates = self.catalog.newest_first()
        self._note_base(None)
        if not candidates:
            self.catalog.require_all_tiers("no checkpoint was found")
            return None
        skipped: dict[int, str] = {}
        for attempt in candidates:
            try:
                tokens = await self.read(attempt)
            except (CorruptData, TierError, CheckpointNotFound) as error:
                skipped[attempt.step] = str(error)
                continue
            self._note_base(attempt.step)
            return Restored(attempt, tokens, skipped)
        raise self.catalog.nothing_good(skipped)

    async def read(self, attempt: Attempt) -> dict[str, list[Token]]:
        """A checkpoint's content, whole. Raises as `load` does."""
        opened = await open_checkpoint(self.catalog, attempt, 0, 1)
        try:
            reading = (self._read_shard(opened, at) for at in range(len(opened.held)))
            found: dict[str, list[Token]] = {}
            for result in await asyncio.gather(*reading, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result
                found[result[0]] = result[1]
        finally:
            self.loop.create_task(opened.close())
        if opened.healing.bad and not self.reads_only:
            self.writer.repair(dict(opened.healing.bad), opened.record)
        return found

    async def _read_shard(self, opened: OpenCheckpoint, index: int) -> tuple[str, list[Token]]:
        held = opened.held[index]
        target = Tokens([NOTHING] * blocks_of(held.shard.size))
        reading = Reading(
            held.key,
            held.tiers,
            held.shard.crcs(),
            opened.healing,
            Priority.RESTORE,
            cast(PieceMap, target),
            caller=opened.caller,
            size=held.shard.size,
            stays=True,
        )
        await self.mover.get(reading, self.mover.all_of(held.shard.size))
        return held.key.name, target.tokens

    def _note_base(self, step: int | None) -> None:
        newest = max((a.step for a in self.catalog.newest_first()), default=-1)
        self.last_step, self._rewind_to = max(newest, self.last_step), step

    def save(self, number: int, step: int) -> tuple[Saved, FakeSnapshot]:
        """Starts a save, which goes on in the background."""
        rewind_to, self._rewind_to = self._rewind_to, None
        if rewind_to is not None and rewind_to >= self.last_step:
            rewind_to = None
        snapshot = make_snapshot(number, random_sizes(self.rng, CHUNK_BYTES, self.setup.save_chunks_max))
        self._calls += 1
        now = self.loop.time()
        files = {"tokenizer.json": b"{}" * 20} if self.rng.random() < 0.2 else {}
        metrics: dict[str, float | str | None] = {"loss": self.rng.random()} if self.rng.random() < 0.8 else {}
        tags = [self.rng.choice(TAGS)] if self.rng.random() < 0.1 else []
        order = Order(
            call=self._calls, step=step, job=self.job, snapshot=snapshot.as_snapshot(), metrics=metrics, tags=tags,
            files=files, began=now, made=self.wall, capture_seconds=0.0, rewind_to=rewind_to,
        )  # fmt: skip
        handle = Save(order, self.tiers)
        tokens = {file: list(content.tokens) for file, content in snapshot.contents.items()}
        sizes = {shard.file: shard.size for shard in snapshot.shards}
        saved = Saved(number, step, self.loop.name, tokens, sizes, rewind_to, handle, asked_at=now, made=self.wall)
        saved.undisturbed = self.writer.owner.taken
        self.saves.append(saved)
        self.last_step = step
        return saved, snapshot

    async def carry_out(self, saved: Saved, snapshot: FakeSnapshot) -> None:
        """What `store.save` does: blocks until the state may change again; and then it does change."""
        running = self.loop.create_task(self.writer.save(saved.handle))
        copied = asyncio.wrap_future(saved.handle.copied)
        await asyncio.wait([copied], timeout=BLOCK_S)
        if not copied.done():
            running.cancel()
            copied.cancel()
        else:
            snapshot.change()

    async def wait_durable(self, saved: Saved) -> None:
        """Returns once the save has come to an end, good or bad."""
        with contextlib.suppress(SaveFailed, NotPlanned):  # it may stay in memory
            await saved.handle

    def rewind(self, step: int) -> None:
        """Raises CheckpointNotFound if `step` has none."""
        self.catalog.at_step(step)
        self._note_base(step)

    async def close(self, exit_s: float) -> None:
        """As the store closes: the newest gets down, but nobody waits for ever."""
        self.closing_at, self.exit_s = self.loop.time(), exit_s
        try:
            async with asyncio.timeout(exit_s):
                await self.writer.finish()
        except TimeoutError:
            pass
        await self.writer.close(STOP_S)
        for tier in self.tiers:
            await tier.close()
