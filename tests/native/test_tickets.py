"""Chains of jobs across engines, linked without Python."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable

import numpy as np
import pytest

from stepwell.native import Done, Engine, Job, Op, PieceMap, Region, Ticket, crc32c

Wait = Callable[[Engine, int], list[Done]]


def test_copy_checksum_write_read_scatter(
    engine: Engine, copier: Engine, wait: Wait, region: Region, open_file: Callable[..., int]
) -> None:
    """The whole way down and up again, submitted back to front so that every link is really waited for."""
    data = np.random.default_rng(1).integers(0, 256, 1_500_000, dtype=np.uint8)
    target = np.zeros_like(data)
    fd = open_file(direct=True)
    crcs = np.zeros(2, np.uint32)
    filled, written, read = Ticket(), Ticket(), Ticket()
    n, there, back = data.size, region.address, region.address + (4 << 20)
    up = Job(
        Op.SCATTER,
        address=back,
        length=n,
        pieces=PieceMap(np.array([0, n], np.uint64), np.array([target.ctypes.data], np.uint64)),
        crcs=crcs,
        after=read,
    )
    copier.submit([up])
    engine.submit(
        [
            Job(Op.READ, fd, back, 0, n, direct=True, after=written, signal=read),
            Job(Op.WRITE, fd, there, 0, n, direct=True, after=filled, signal=written),
        ]
    )
    assert (filled.state, written.state, read.state) == ("pending",) * 3
    assert engine.reap() == copier.reap() == []
    down = Job(
        Op.GATHER,
        address=there,
        length=n,
        pieces=PieceMap(np.array([0, n], np.uint64), np.array([data.ctypes.data], np.uint64)),
        crcs=crcs,
        signal=filled,
    )
    copier.submit([down])
    assert {done.result for done in wait(engine, 2) + wait(copier, 2)} == {n}
    assert (filled.state, written.state, read.state) == ("done",) * 3
    assert np.array_equal(data, target)
    assert [int(c) for c in crcs] == [crc32c(data[: 1 << 20]), crc32c(data[1 << 20 :])]


def test_failure_cancels_the_rest_of_the_chain(engine: Engine, copier: Engine, wait: Wait, region: Region) -> None:
    tickets = [Ticket() for _ in range(4)]
    late = [
        Job(Op.SCATTER, address=region.address, length=10, after=tickets[0], signal=tickets[1]),
        Job(Op.SCATTER, address=region.address, length=10, after=tickets[2], signal=tickets[3]),
    ]
    copier.submit(late)
    engine.submit([Job(Op.SYNC, -1, after=tickets[1], signal=tickets[2])])
    engine.submit([Job(Op.READ, -1, region.address, 0, 10, signal=tickets[0])])
    results = sorted(done.result for done in wait(engine, 2))
    assert results == sorted([-errno.EBADF, -errno.ECANCELED])
    assert [done.result for done in wait(copier, 2)] == [-errno.ECANCELED] * 2
    assert {ticket.state for ticket in tickets} == {"failed"}


def test_read_short_of_its_length_fails_its_ticket(
    engine: Engine, copier: Engine, wait: Wait, region: Region, open_file: Callable[..., int]
) -> None:
    fd = open_file()
    os.pwrite(fd, b"short", 0)
    read = Ticket()
    engine.submit([Job(Op.READ, fd, region.address, 0, 6, signal=read)])
    copier.submit([Job(Op.SCATTER, address=region.address, length=6, after=read)])
    assert wait(engine, 1)[0].result == 5
    assert wait(copier, 1)[0].result == -errno.ECANCELED


@pytest.mark.parametrize("ok", [True, False])
def test_a_ticket_that_has_fired_is_not_waited_for(
    engine: Engine, wait: Wait, open_file: Callable[..., int], ok: bool
) -> None:
    ticket = Ticket()
    ticket.fire(ok)
    ticket.fire(not ok)  # only the first counts
    engine.submit([Job(Op.SYNC, open_file(), after=ticket)])
    assert wait(engine, 1)[0].result == (0 if ok else -errno.ECANCELED)


def test_a_very_long_chain(engine: Engine, copier: Engine, wait: Wait, region: Region) -> None:
    """Cancelling it is no recursion: this many frames would not fit a thread's stack."""
    count = 100_000
    tickets = [Ticket() for _ in range(count + 1)]
    copier.submit(
        [Job(Op.SCATTER, address=region.address, after=tickets[i], signal=tickets[i + 1]) for i in range(count)]
    )
    tickets[0].fire(False)
    assert tickets[-1].state == "failed"
    assert {done.result for done in wait(copier, count)} == {-errno.ECANCELED}


def test_a_chain_back_and_forth_ends_in_order(
    engine: Engine, copier: Engine, wait: Wait, open_file: Callable[..., int]
) -> None:
    count = 300
    tickets = [Ticket() for _ in range(2 * count + 1)]
    fd = open_file()
    engine.submit([Job(Op.SYNC, fd, after=tickets[2 * i], signal=tickets[2 * i + 1]) for i in range(count)])
    copier.submit([Job(Op.SCATTER, after=tickets[2 * i + 1], signal=tickets[2 * i + 2]) for i in range(count)])
    tickets[0].fire()
    done = wait(copier, count)
    assert [d.result for d in done] == [0] * count
    assert [d.job.after for d in done] == tickets[1::2]
    assert len(wait(engine, count)) == count


def test_collecting_a_pending_ticket_cancels(engine: Engine, wait: Wait, make_engine: Callable[..., Engine]) -> None:
    """Closing the waiting engine first, so that the ticket outlives the job that waits for it."""
    ticket = Ticket()
    waiting = make_engine("threads")
    waiting.submit([Job(Op.SCATTER, after=ticket)])
    assert waiting.close()
    del ticket
    gc.collect()
