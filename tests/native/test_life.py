"""Starting, refusing, closing: an engine never hangs, never leaks, never serves a forked child."""

from __future__ import annotations

import errno
import gc
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from stepwell.native import Done, Engine, Job, Op, Region, Ticket, probe_uring
from tests.resources import comes_back_to, describe_files, in_use
from tests.seccomp import FORBID_URING

Run = Callable[[Engine, list[Job]], list[Done]]

#: argv: errno, JSON of sys.path. Forbids io_uring_setup in itself, then writes and reads a file.
UNDER_SECCOMP = (
    FORBID_URING
    + """
import json, os, select
sys.path[:] = json.loads(sys.argv[2])
from stepwell.native import Engine, Job, Op, Region, probe_uring
answer = {"probe": probe_uring()}
try:
    Engine("no", backend="io_uring")
except OSError as error:
    answer["forced"] = str(error)
with Engine("fallback") as engine, Region(4096) as region:
    answer.update(kind=engine.kind, reason=engine.reason)
    region.view(0, 5)[:] = b"hello"
    fd = os.memfd_create("file")
    engine.submit([Job(Op.WRITE, fd, region.address, 0, 5)])
    select.select([engine.fileno()], [], [], 60)
    answer["result"] = engine.reap()[0].result
    answer["file"] = os.pread(fd, 10, 0).decode()
print(json.dumps(answer))
"""
)


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_forbidden_io_uring_falls_back_and_says_why(number: int) -> None:
    command = [sys.executable, "-c", UNDER_SECCOMP, str(number), json.dumps(sys.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["kind"] == "threads"
    assert (answer["result"], answer["file"]) == (5, "hello")
    assert answer["probe"] == [False, answer["reason"]]
    if answer["reason"] != "built without liburing":
        assert errno.errorcode[number] in answer["reason"] and "seccomp" in answer["reason"]
    assert answer["reason"] in answer["forced"]


def test_auto_takes_io_uring_where_it_works(make_engine: Callable[..., Engine]) -> None:
    works, reason = probe_uring()
    engine = make_engine("auto")
    assert (engine.kind, engine.reason) == ("io_uring" if works else "threads", reason)


@pytest.mark.parametrize(
    "options",
    [
        {"threads": 0},
        {"threads": 1000},
        {"depth": 0},
        {"depth": 5000},
        {"request_bytes": 5000},
        {"request_bytes": 2 << 30},
    ],
)
def test_options_out_of_range_are_refused(backend: str, options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Engine("bad", backend=backend, **options)  # type: ignore[arg-type]


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="backend"):
        Engine("bad", backend="aio")  # type: ignore[arg-type]


def test_io_uring_takes_no_copies(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine("auto")
    if engine.kind == "io_uring":
        with pytest.raises(ValueError, match="kind io_uring"):
            engine.submit([Job(Op.SCATTER)])


def test_closed_engine_refuses(backend: str) -> None:
    engine = Engine("done", backend=backend)  # type: ignore[arg-type]
    assert "0 jobs done" in repr(engine)
    assert engine.close() and engine.close()
    assert "closed" in repr(engine)
    for call in (engine.reap, engine.statistics, engine.fileno, lambda: engine.submit([Job(Op.SYNC)])):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_close_cancels_what_waits(backend: str) -> None:
    before, after = Ticket(), Ticket()
    engine = Engine("waits", backend=backend)  # type: ignore[arg-type]
    engine.submit([Job(Op.SYNC, -1, after=before, signal=after)])
    assert engine.close()
    assert after.state == "failed"
    before.fire()  # the job is gone; nothing to wake


def test_close_gives_up_on_what_hangs(region: Region) -> None:
    """A read from a pipe that nobody writes to stands for a hung file system."""
    if not probe_uring()[0]:
        pytest.skip("only io_uring can read a pipe at an offset")
    reading, writing = os.pipe()
    engine = Engine("hangs", backend="io_uring")
    job = Job(Op.READ, reading, region.address, 0, 10)
    engine.submit([job])
    while not engine.statistics().requests_in_flight:
        os.sched_yield()
    started = time.monotonic()
    assert not engine.close(timeout=0.05)
    assert time.monotonic() - started < 20  # the read never ends
    assert sys.getrefcount(job) > 2  # kept: the kernel may still write to its memory
    os.write(writing, b"0123456789")
    os.close(writing)
    os.close(reading)


def test_forked_child_is_refused(backend: str, make_engine: Callable[..., Engine], run: Run, region: Region) -> None:
    engine = make_engine(backend)
    fd = os.memfd_create("file")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is what is tested
        child = os.fork()
    if not child:
        refused = 0
        for call in (lambda: engine.submit([Job(Op.SYNC, fd)]), engine.reap, engine.statistics):
            try:
                call()
            except RuntimeError as error:
                refused += "forked" in str(error)
        engine.close()  # leaves the parent's engine alone
        own = Engine("own", backend=backend)  # type: ignore[arg-type]
        own.submit([Job(Op.SYNC, fd)])
        select.select([own.fileno()], [], [], 60)
        works = [done.result for done in own.reap()] == [0] and own.close()
        os._exit(0 if refused == 3 and works else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert run(engine, [Job(Op.WRITE, fd, region.address, 0, 4096), Job(Op.SYNC, fd)])[0].result == 4096
    os.close(fd)


def test_signals_disturb_nothing(engine: Engine, open_file: Callable[..., int], tmp_path: Path) -> None:
    caught = 0

    def handler(number: int, frame: object) -> None:
        nonlocal caught
        caught += 1

    data = os.urandom(1 << 20) * 16
    fd = open_file()
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        with Region(2 * len(data)) as region:
            region.view(0, len(data))[:] = data
            for job in (
                Job(Op.WRITE, fd, region.address, 0, len(data)),
                Job(Op.SYNC, fd),
                Job(Op.READ, fd, region.address + len(data), 0, len(data)),
            ):
                engine.submit([job])
                assert select.select([engine.fileno()], [], [], 60)[0]
                assert engine.reap()[0].result == job.length
            while caught < 5:
                signal.pause()
            assert region.view(len(data), len(data)) == data
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert (tmp_path / "file").read_bytes() == data


def test_a_thousand_engines_leave_nothing(backend: str, run: Run) -> None:
    fd = os.memfd_create("file")
    before = in_use()
    for number in range(1000):
        with Engine(f"e{number}", backend=backend, threads=2) as engine:  # type: ignore[arg-type]
            if number % 100 == 0:
                assert run(engine, [Job(Op.SYNC, fd)])[0].result == 0
    assert comes_back_to(before), describe_files()
    os.close(fd)


def test_a_dropped_engine_closes_itself_and_complains(backend: str) -> None:
    before = in_use()
    engine = Engine("dropped", backend=backend)  # type: ignore[arg-type]
    with pytest.warns(ResourceWarning, match="never closed"):
        del engine
        gc.collect()
    assert comes_back_to(before), describe_files()


def test_many_threads_share_an_engine(engine: Engine, region: Region, open_file: Callable[..., int]) -> None:
    """Submits race with reaps and with the close at the end; every job is answered once or refused."""
    fd = open_file()
    os.ftruncate(fd, 1 << 20)
    done: list[Done] = []
    submitted = [0] * 4

    def feed(index: int) -> None:
        for _ in range(50):
            slots = range(submitted[index], submitted[index] + 4)
            engine.submit([Job(Op.READ, fd, region.address + 8192 * (200 * index + slot), 0, 8000) for slot in slots])
            submitted[index] += 4
            done.extend(engine.reap())

    threads = [threading.Thread(target=feed, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    while len(done) < sum(submitted):
        assert select.select([engine.fileno()], [], [], 60)[0]
        done += engine.reap()
    assert {d.result for d in done} == {8000}
    assert len({id(d.job) for d in done}) == sum(submitted) == 800
