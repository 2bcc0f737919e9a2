"""Engines of both kinds for one suite, and a way to wait for their jobs."""

from __future__ import annotations

import gc
import os
import select
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from stepwell.native import DeviceEngine, Done, Engine, Job, Region, probe_uring
from tests.fakecuda import GATHER, SCATTER, FakeCuda, build

WAIT_SECONDS = 100.0  # a hang is a failure, not a wait

Run = Callable[[Engine, Sequence[Job]], list[Done]]
MakeEngine = Callable[..., Engine]
MakeDevice = Callable[..., DeviceEngine]


def wait_all(engine: Engine, count: int) -> list[Done]:
    done: list[Done] = []
    while len(done) < count:
        assert select.select([engine.fileno()], [], [], WAIT_SECONDS)[0], f"{count - len(done)} jobs hang in {engine!r}"
        done += engine.reap()
    return done


@pytest.fixture
def wait() -> Callable[[Engine, int], list[Done]]:
    return wait_all


@pytest.fixture
def run() -> Run:
    """Runs jobs and returns what became of each, in the order of the jobs, whatever order they ended in."""

    def go(engine: Engine, jobs: Sequence[Job]) -> list[Done]:
        engine.submit(jobs)
        by_job = {id(done.job): done for done in wait_all(engine, len(jobs))}
        return [by_job[id(job)] for job in jobs]

    return go


@pytest.fixture(params=["io_uring", "threads"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "io_uring" and not probe_uring()[0]:
        pytest.skip(f"io_uring: {probe_uring()[1]}")
    return str(request.param)


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    made: list[Engine] = []

    def make(backend: str = "threads", **options: int) -> Engine:
        made.append(Engine("test", backend=backend, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    assert all([engine.close() for engine in made])


@pytest.fixture
def engine(backend: str, make_engine: MakeEngine) -> Engine:
    return make_engine(backend, threads=3, depth=4, request_bytes=64 << 10)


@pytest.fixture
def copier(make_engine: MakeEngine) -> Engine:
    return make_engine("threads")


@pytest.fixture
def region() -> Iterator[Region]:
    with Region(8 << 20) as region:
        yield region


@pytest.fixture
def open_file(tmp_path: Path) -> Iterator[Callable[..., int]]:
    opened: list[int] = []

    def open_(name: str = "file", *, direct: bool = False) -> int:
        try:
            fd = os.open(tmp_path / name, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0), 0o600)
        except OSError as error:
            pytest.skip(f"no direct I/O here: {error}")
        opened.append(fd)
        return fd

    yield open_
    for fd in opened:
        os.close(fd)


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build(tmp_path_factory.mktemp("fakecuda"))


@pytest.fixture
def fake(fake_library: str) -> Iterator[FakeCuda]:
    """The driver without a GPU. Whatever a test did, everything must have been given back at its end."""
    fake = FakeCuda(fake_library)
    fake.reset()
    before = fake.owned()
    yield fake
    fake.reset()
    if fake.owned() != before:
        gc.collect()
    assert fake.owned() == before
    assert fake.count("depth") == 0


@pytest.fixture
def make_device(fake: FakeCuda) -> Iterator[MakeDevice]:
    made: list[DeviceEngine] = []

    def make(device: int = 0, **options: int) -> DeviceEngine:
        made.append(DeviceEngine("gpu", device, library=fake.path, **options))
        return made[-1]

    yield make
    fake.reset()
    assert all([engine.close() for engine in made])
    made.clear()


@pytest.fixture
def gpu(make_device: MakeDevice) -> DeviceEngine:
    engine = make_device()
    engine.use_kernels(GATHER, SCATTER)
    return engine
