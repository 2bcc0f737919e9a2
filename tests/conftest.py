"""What all tests share."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import hypothesis
import pytest

from tests.fakecuda import FakeCuda, build

# on a busy machine any example may take long, and that is no fault of what is tested
hypothesis.settings.register_profile(
    "busy", hypothesis.settings.default, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy")


def pytest_collection_finish() -> None:
    """What is imported by now stays: full collections need not look through all of torch."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def _cache_of_our_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What stepwell remembers of disks and shared tiers goes to a folder of the tests, also in processes they start."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> FakeCuda:
    """A driver that stands for a GPU's; compiled when first asked for."""
    return FakeCuda(build(tmp_path_factory.mktemp("fakecuda")))
