"""This process's place in its job."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from stepwell import jobs
from stepwell.jobs import current_job

NAMES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "TORCHELASTIC_RUN_ID")
RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*NAMES, *RESTARTS):
        monkeypatch.delenv(name, raising=False)
    jobs._scheduled.cache_clear()
    yield
    jobs._scheduled.cache_clear()


@pytest.mark.parametrize("name", [*NAMES, None])
@pytest.mark.parametrize("restarts", [*RESTARTS, None])
def test_the_scheduler_names_the_job(name: str | None, restarts: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if name is not None:
        monkeypatch.setenv(name, "4711")
    if restarts is not None:
        monkeypatch.setenv(restarts, "3")
    job = current_job()
    assert job.name == (None if name is None else "4711")
    assert job.restarts == (0 if restarts is None else 3)
    assert (job.rank, job.world) == (0, 1)


def test_the_environment_is_looked_at_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert current_job().name is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of a child")
    assert current_job().name is None
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert current_job().name == "of a child"


def test_each_look_gives_a_store_of_its_own() -> None:
    one, other = current_job(), current_job()
    one.store.put("key", b"value")
    assert other.store.poll("key") is None
