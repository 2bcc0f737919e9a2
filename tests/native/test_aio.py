"""The asyncio side: batches, cancellation, closing in either order."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import weakref
from collections.abc import Callable

import pytest

from stepwell.native import AsyncEngine, Engine, Job, Op, Region, Ticket


def test_runs_a_batch_in_order(engine: Engine, region: Region, open_file: Callable[..., int]) -> None:
    fd = open_file()
    os.pwrite(fd, bytes(range(200)), 0)

    async def main() -> None:
        aio = AsyncEngine(engine)
        jobs = [Job(Op.READ, fd, region.address + 10 * at, 10 * at, 10) for at in range(21)]
        done = await aio.run(jobs)
        assert [d.job for d in done] == jobs
        assert [d.result for d in done] == [10] * 20 + [0]
        assert await aio.run([]) == []
        assert [d.result for d in await asyncio.gather(*aio.start(jobs[:3]))] == [10] * 3
        aio.close()
        aio.close()

    asyncio.run(main())
    assert bytes(region.view(0, 200)) == bytes(range(200))


def test_failures_are_results(engine: Engine) -> None:
    async def main() -> None:
        aio = AsyncEngine(engine)
        assert [d.result for d in await aio.run([Job(Op.SYNC, -1)])] == [-errno.EBADF]
        aio.close()

    asyncio.run(main())


def test_cancelled_wait_leaves_the_job_and_its_memory_alone(
    engine: Engine, region: Region, open_file: Callable[..., int]
) -> None:
    class Owner:
        pass

    fd = open_file()
    os.pwrite(fd, b"came later", 0)

    async def main() -> None:
        aio = AsyncEngine(engine)
        gate, owner = Ticket(), Owner()
        alive = weakref.ref(owner)
        task = asyncio.create_task(aio.run([Job(Op.READ, fd, region.address, 0, 10, after=gate, keep=owner)]))
        del owner
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        gc.collect()
        assert alive() is not None
        gate.fire()
        assert [d.result for d in await aio.run([Job(Op.SYNC, fd)])] == [0]
        while alive() is not None:  # the cancelled job is reaped like any other
            await asyncio.sleep(0)
        aio.close()

    asyncio.run(asyncio.wait_for(main(), 60))
    assert bytes(region.view(0, 10)) == b"came later"


def test_a_job_is_not_started_twice_at_once(engine: Engine, open_file: Callable[..., int]) -> None:
    async def main() -> None:
        aio = AsyncEngine(engine)
        job = Job(Op.SYNC, open_file())
        first = aio.start([job])[0]
        other = Job(Op.SYNC, open_file())
        with pytest.raises(ValueError, match="in flight"):
            aio.start([other, job])
        assert (await first).result == 0
        assert [d.result for d in await aio.run([job, other])] == [0, 0]
        aio.close()

    asyncio.run(main())


def test_refused_jobs_leave_no_futures(engine: Engine) -> None:
    async def main() -> None:
        aio = AsyncEngine(engine)
        bad = Job(Op.GATHER)
        for _ in range(2):
            with pytest.raises(ValueError, match="malformed"):
                aio.start([bad])
        aio.close()
        with pytest.raises(RuntimeError, match="closed"):
            aio.start([bad])

    asyncio.run(main())


def test_engine_closed_under_a_waiter(backend: str) -> None:
    """Another thread closes the engine: whoever waits hears of the cancellation."""

    async def main() -> None:
        engine = Engine("closing", backend=backend)  # type: ignore[arg-type]
        aio = AsyncEngine(engine)
        waiting = aio.start([Job(Op.SYNC, -1, after=Ticket())])[0]
        assert await asyncio.to_thread(engine.close)
        assert (await waiting).result == -errno.ECANCELED
        aio.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_side_closed_first_cancels_its_futures(engine: Engine) -> None:
    async def main() -> None:
        aio = AsyncEngine(engine)
        gate = Ticket()
        waiting = aio.start([Job(Op.SYNC, -1, after=gate)])[0]
        aio.close()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        gate.fire()
        again = AsyncEngine(engine)  # another side, perhaps on another loop, goes on with the engine
        assert (await again.run([Job(Op.SYNC, -1)]))[0].result == -errno.EBADF
        again.close()

    asyncio.run(main())
