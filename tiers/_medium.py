"""The bulk path of the file driver: which engines it uses, how, and what their answers mean.

Writing and reading have an engine each: they like different requests, and where buffered reading is faster
it wants threads, not a ring.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from stepwell.native import AsyncEngine, Engine, Job, Op
from stepwell.tiers import _folders
from stepwell.tiers._calls import PathCalls, settle
from stepwell.tiers._daemon import DaemonExecutor
from stepwell.tiers._files import OpenFile, set_direct
from stepwell.tiers._probe import Access, ReadSpeed, SpeedCache, SpeedProbe, probe_access, probe_reading

EngineName = Literal["auto", "io_uring", "threads"]
Reading = Literal["auto", "direct", "buffered"]


@dataclass(frozen=True, slots=True)
class Shape:
    """How an engine asks the medium."""

    request_bytes: int
    depth: int
    threads: int


WRITE = Shape(4 << 20, 8, 4)
READ_DIRECT = Shape(4 << 20, 4, 4)
READ_BUFFERED = Shape(1 << 20, 4, 4)

#: the measurement of reading needs a little room, and the cache file one answer within this time
MEASURE_FREE_BYTES_MIN = 1 << 30
CACHE_S = 1.0

log = logging.getLogger("stepwell")
_told: set[str] = set()


def _tell_once(reason: str) -> None:
    """Why this process has no io_uring: one line, however many tiers it opens."""
    if reason not in _told:
        _told.add(reason)
        log.warning("io_uring is not used, threads are: %s", reason)


class Medium:
    """Engines and modes of one root. Made on the loop that uses it, by `probe`."""

    def __init__(
        self,
        name: str,
        engine: EngineName,
        direct: bool | None,
        reading: Reading,
        request_bytes: int | None,
        depth: int | None,
    ) -> None:
        self._name = name
        self._engine = engine
        self._direct = direct
        self._reading = reading
        self._request_bytes = request_bytes
        self._depth = depth
        self._engines: list[tuple[Engine, AsyncEngine]] = []
        self.direct_write = self.direct_read = False
        self.writer: AsyncEngine
        self.reader: AsyncEngine

    @property
    def request_bytes(self) -> int:
        return self._request_bytes or WRITE.request_bytes

    @property
    def depth(self) -> int:
        return self._depth or WRITE.depth

    async def probe(self, calls: PathCalls, read_only: bool) -> tuple[Access, dict[str, str]]:
        """Finds out what the root takes and makes the engines; what was found, in words. Raises OSError."""
        root = calls.root
        if read_only:
            reading, why = await calls.call(probe_reading, root)
            access = Access(False, False, reading, f"opened for reading only; {why}")
        else:
            access = await calls.call(probe_access, root)
        allowed = self._direct is not False
        self.direct_write = access.direct_write and allowed
        self.writer = self._make("w", self._engine, WRITE)
        engine = self._engines[0][0]
        detail = {"access": access.why, "engine": f"{engine.kind}: {engine.reason}"}
        if engine.kind == "threads" and self._engine == "auto":
            _tell_once(engine.reason)
        direct_read = access.direct_read and allowed and self._reading != "buffered"
        self.reader = self._make("r", self._engine, READ_DIRECT if direct_read else READ_BUFFERED)
        detail["reading"] = "direct" if direct_read else "buffered"
        if direct_read and self._reading == "auto" and self._engine == "auto":
            speed = await self._measured(calls, measure=self.direct_write and access.deletes)
            if speed is not None:
                direct_read = not speed.buffered_is_faster
                detail["reading"] = f"{'direct' if direct_read else 'buffered'}: {speed}"
        if not direct_read and self._engine != "io_uring" and self._engines[-1][0].kind != "threads":
            self._drop_last()
            self.reader = self._make("r", "threads", READ_BUFFERED)
        self.direct_read = direct_read
        detail["writing"] = "direct" if self.direct_write else "buffered"
        return access, detail

    def _make(self, suffix: str, backend: EngineName, shape: Shape) -> AsyncEngine:
        engine = Engine(
            f"{self._name}-{suffix}",
            backend=backend,
            threads=shape.threads,
            depth=self._depth or shape.depth,
            request_bytes=self._request_bytes or shape.request_bytes,
        )
        bound = AsyncEngine(engine)
        self._engines.append((engine, bound))
        return bound

    def _drop_last(self) -> None:
        engine, bound = self._engines.pop()
        bound.close()
        engine.close(0.0)

    async def _measured(self, calls: PathCalls, *, measure: bool) -> ReadSpeed | None:
        cache = await calls.call(SpeedCache)
        key = await calls.call(cache.key, calls.root)
        known = await self._ask_cache(calls, cache.get, key)
        if not measure or (known is not None and known.settled):
            return known
        if (await calls.call(_folders.space, calls.root)).free_bytes < MEASURE_FREE_BYTES_MIN:
            return known
        probe = SpeedProbe(calls.root)
        buffered = self._make("p", "threads", READ_BUFFERED)
        try:
            await calls.call(probe.open)
            speed = await probe.measure(self.writer, self.reader, buffered)
        except OSError:
            return known  # full or odd: the next start tries again
        finally:
            self._drop_last()
            await calls.call(probe.remove)
        if speed is None:
            return known
        if known is not None:
            speed = speed.merged(known)
        await self._ask_cache(calls, cache.put, key, speed)
        return speed

    async def _ask_cache(
        self, calls: PathCalls, call: Callable[..., ReadSpeed | None], *args: object
    ) -> ReadSpeed | None:
        """The user's cache folder may lie on another, hung file system."""
        try:
            return await asyncio.wait_for(calls.call(call, *args), CACHE_S)
        except TimeoutError:
            return None

    async def transfer(self, calls: PathCalls, work: Sequence[tuple[Job, OpenFile]]) -> list[int]:
        """Runs reads or writes as one batch: bytes or -errno each. Files must be held by the caller.

        A file that takes direct I/O no longer (its trial passed) goes on buffered from here. The repeated job
        signals nobody: its ticket has failed already, and who waits for it must not see half of the truth.
        """
        jobs = [job for job, _ in work]
        results = await self._run(jobs)
        again = [index for index, result in enumerate(results) if result == -errno.EINVAL and jobs[index].direct]
        if again:
            for file in {id(work[index][1]): work[index][1] for index in again}.values():
                file.direct = False
                await calls.call(set_direct, file.fd, False)
            repeated = await self._run([replace(jobs[index], direct=False, after=None, signal=None) for index in again])
            for index, result in zip(again, repeated, strict=True):
                results[index] = result
        return results

    async def sync(self, descriptors: Sequence[int]) -> list[int]:
        """fdatasync of each: 0 or -errno."""
        return await self._run([Job(Op.SYNC, fd=fd) for fd in descriptors])

    async def allocate(self, fd: int, size_bytes: int) -> int:
        """fallocate; 0 or -errno, never an emulation that writes zeros."""
        return (await self._run([Job(Op.FALLOCATE, fd=fd, offset=0, length=size_bytes)]))[0]

    async def _run(self, jobs: list[Job]) -> list[int]:
        if not jobs:
            return []
        engine = self.reader if jobs[0].op is Op.READ else self.writer
        try:
            futures = engine.start(jobs)
        except (RuntimeError, OSError) as error:  # closed under us, or holding a million jobs
            for job in jobs:
                if job.signal is not None:
                    job.signal.fire(False)
            return [-(getattr(error, "errno", None) or errno.ECANCELED)] * len(jobs)
        dones = await settle(futures)
        return [-errno.ECANCELED if done is None else done.result for done in dones]

    async def close(self, timeout_s: float) -> None:
        """Stops the engines; jobs that hang are left to their threads."""
        engines, self._engines = self._engines, []
        closer = DaemonExecutor(f"{self._name}-close", 2)  # the tier's own threads may all hang
        await asyncio.gather(*(asyncio.wrap_future(closer.submit(engine.close, timeout_s)) for engine, _ in engines))
        await asyncio.sleep(0)  # the last results arrive
        for _, bound in engines:
            bound.close()
        closer.shutdown(wait=False)
