"""One writer a run: who holds it, and when another may take it.

The writer takes the next epoch by exclusive create of `epochs/0000007.json` on the run's last tier, and
rewrites a heartbeat beside it. A new writer takes over at once if the old one closed, is dead, or is an
earlier restart of the same scheduler job; else only once its heartbeat stood still for STILL_S of watching
(clocks of machines are never compared). What a writer had committed when it lost the run is listed in the
new epoch's `seen` file; a manifest of an older epoch that is not in there came too late and does not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import math
import os
import socket
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import psutil

from stepwell.clock import Clock
from stepwell.errors import RunBusy, StepwellError
from stepwell.format.names import EPOCHS, Attempt, epoch_file, epoch_of
from stepwell.format.records import Beat, EpochRecord, Seen, decode, encode
from stepwell.jobs import Job
from stepwell.tiers.base import RecordKey, Tier

#: a heartbeat that stood still for this long belongs to nobody
STILL_S = 60.0
#: between two heartbeats; several fit into STILL_S, so that one late write costs no run
BEAT_S = 10.0
#: between two looks at another writer's heartbeat
LOOK_S = BEAT_S / 4
#: for so long after a beat was begun the run is certainly its writer's: whoever wants it must first see it stand still
OURS_S = STILL_S - 5.0
#: how long work on another tier waits for the authority's word once that time is over: it may be stuck
DOUBT_S = 0.25

#: tokens of the epochs that stores of this process hold now
_held_here: set[str] = set()


def _read(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text().strip()
    return ""


def _pid_space() -> str:
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no name for this uid, as in many containers
        return str(os.getuid())


def describe_self(job: Job, wall: float) -> EpochRecord:
    """This process, as a writer."""
    return EpochRecord(
        token=uuid.uuid4().hex,
        user=user_name(),
        host=socket.gethostname(),
        boot=_read("/proc/sys/kernel/random/boot_id"),
        pid_space=_pid_space(),
        pid=os.getpid(),
        pid_started=psutil.Process().create_time(),
        job=job.name,
        restarts=job.restarts,
        made=wall,
    )


def _started(pid: int) -> float | None:
    """When the process with this id was started; None if there is none."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None


def judge(
    old: EpochRecord,
    beat: Beat | None,
    me: EpochRecord,
    *,
    started: Callable[[int], float | None] = _started,
    held_here: Callable[[str], bool] = _held_here.__contains__,
) -> Literal["take", "watch", "busy"]:
    """Whether the run of `old` may be taken by `me` now, only after watching it, or not at all."""
    if beat is not None and beat.token == old.token and beat.state == "closed":
        return "take"
    if old.job is not None and old.job == me.job and old.restarts < me.restarts:
        return "take"
    same_place = old.boot == me.boot != "" and old.pid_space == me.pid_space and old.host == me.host
    if not same_place:
        return "watch"
    if old.pid == me.pid and abs(old.pid_started - me.pid_started) < 1.0:
        return "busy" if held_here(old.token) else "take"
    alive = started(old.pid)
    return "watch" if alive is not None and abs(alive - old.pid_started) < 1.0 else "take"


class Writership:
    """The right to write one run, once `acquire` has returned."""

    def __init__(self, run: str, tier: Tier, job: Job, clock: Clock) -> None:
        self.run, self.tier, self.clock = run, tier, clock
        self.epoch = 0
        self.lost = False  # another writer has taken the run, as far as the heartbeat has seen
        self._me = describe_self(job, clock.wall())
        self._beating: asyncio.Task[None] | None = None
        self._count = 0
        self._ours_until = math.inf  # monotonic; only who beats can lose the run by standing still
        self._looking: asyncio.Task[None] | None = None
        self._looking_since = 0.0

    async def acquire(self) -> int:
        """Takes the next epoch. Raises RunBusy if another live writer holds the run."""
        while True:
            self._ours_until = self.clock.monotonic() + OURS_S
            newest = await self._newest()
            if newest:
                await self._make_sure(newest)
            if await self.tier.commit(self._key(newest + 1), encode(self._me)):
                self.epoch = newest + 1
                _held_here.add(self._me.token)
                return self.epoch

    def start_beating(self) -> None:
        self._beating = asyncio.ensure_future(self._beat())

    async def publish_seen(self, attempts: list[str], *, alone: bool) -> None:
        """Fixes what counts of the older epochs. The first epoch has none.

        alone: this writer sees no other tier than the one where it is decided who writes.
        """
        if self.epoch == 1:
            return
        await self.tier.commit(self._key(self.epoch, "seen.json"), encode(Seen(attempts=sorted(attempts), alone=alone)))

    async def still_ours(self) -> bool:
        """Whether nobody has taken the run since."""
        return await self.tier.fetch(self._key(self.epoch + 1)) is None

    async def require(self, tier: Tier, step: int) -> None:
        """Raises RunBusy if another writer has taken the run; asked before anything is committed or removed on `tier`.

        On the tier where that is decided, it is looked up. Elsewhere the last heartbeat is enough while it is young;
        then the authority is asked, but not waited for when it is stuck: it must not hold up the tiers above it, and
        what is committed there too late is not on the next writer's list.
        """
        if not self.lost and tier is self.tier:
            self.lost = not await self.still_ours()
        elif not self.lost and self.clock.monotonic() >= self._ours_until:
            await self._look_for_a_moment()
        if self.lost:
            raise RunBusy(
                "another writer has taken this run over; nothing of this step is committed or removed any more",
                todo="Stop one of the two; restore in a new process to go on from what the other one saves",
                run=self.run, step=step, tier=tier.info.name,
            )  # fmt: skip

    async def _look_for_a_moment(self) -> None:
        now = self.clock.monotonic()
        if self._looking is None or self._looking.done():
            self._looking, self._looking_since = asyncio.ensure_future(self._look()), now
        patience_s = self._looking_since + DOUBT_S - now
        if patience_s > 0:
            await asyncio.wait([self._looking], timeout=patience_s)

    async def _look(self) -> None:
        with contextlib.suppress(StepwellError):
            self.lost = self.lost or not await self.still_ours()

    async def close(self) -> None:
        """Gives the run up, so that the next writer need not wait."""
        for task in (self._beating, self._looking):
            if task is not None:
                task.cancel()
        self._beating = self._looking = None
        if self.epoch:
            _held_here.discard(self._me.token)
            with contextlib.suppress(StepwellError):  # the next writer then finds out by itself
                await self._write_beat("closed")

    def _key(self, epoch: int, kind: str = "json") -> RecordKey:
        return RecordKey(self.run, epoch_file(epoch, kind))

    async def _newest(self) -> int:
        newest = saved = 0
        async for found in self.tier.scan(self.run):
            if found.attempt == EPOCHS:
                if (parsed := epoch_of(found.name)) and parsed[1] == "json":
                    newest = max(newest, parsed[0])
            elif (attempt := Attempt.parse(found.attempt)) is not None:
                saved = max(saved, attempt.epoch)
        return newest or saved  # step folders that were copied here without their epochs: what follows is newer

    async def _make_sure(self, epoch: int) -> None:
        """Returns once the holder of `epoch` is certainly gone; raises RunBusy if it is not."""
        data = await self.tier.fetch(self._key(epoch))
        if data is None:
            return
        try:
            old = decode(data, EpochRecord)
        except StepwellError:
            return  # never whole: its writer died while taking it
        beat = await self._read_beat(epoch)
        verdict = judge(old, beat, self._me)
        watched, last = 0.0, self.clock.monotonic()
        while verdict == "watch" and watched < STILL_S:
            await self.clock.sleep(LOOK_S)
            now = await self._read_beat(epoch)
            # a look that took long tells little: the medium hung, for the old writer, too, or this process stood still
            moment = self.clock.monotonic()
            watched, last = watched + min(moment - last, 2 * LOOK_S), moment
            if now is not None and now.token == old.token and now.state == "closed":
                return
            if (now and now.count) != (beat and beat.count):
                verdict = "busy"
        if verdict == "busy":
            job = f", job {old.job}" if old.job else ""
            raise RunBusy(
                f"another writer holds this run: user {old.user}, host {old.host}, pid {old.pid}{job}",
                todo="Stop it, or save under another run name; reading works with mode='r'",
                run=self.run,
                tier=self.tier.info.name,
            )

    async def _read_beat(self, epoch: int) -> Beat | None:
        data = await self.tier.fetch(self._key(epoch, "beat"))
        try:
            return decode(data, Beat) if data is not None else None
        except StepwellError:
            return None

    async def _write_beat(self, state: Literal["running", "closed"]) -> None:
        self._count += 1
        beat = Beat(token=self._me.token, count=self._count, state=state)
        await self.tier.beat(self._key(self.epoch, "beat"), encode(beat))

    async def _beat(self) -> None:
        while True:
            began = self.clock.monotonic()
            with contextlib.suppress(StepwellError):  # a stuck tier: others will see no heartbeat, rightly
                await self._write_beat("running")
                self.lost = self.lost or not await self.still_ours()
                self._ours_until = began + OURS_S
            await self.clock.sleep(BEAT_S)
