"""Prefetches of a store whose shared memory belongs to another one: they are brought into that one's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import stepwell
from stepwell.errors import StepwellError
from stepwell.tiers.host import HostTier
from tests.prefetch.helpers import here, moved_bytes
from tests.store.helpers import eventually, sharing

SIZE = 6_000_000  # of 4 bytes: three chunks of 8 MiB


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Path]:
    with stepwell.open(tmp_path / "run") as store:
        store.save(3, {"model": {"w": torch.arange(SIZE, dtype=torch.int32)}}).wait()
    with sharing(tmp_path) as file:
        yield file


def test_a_client_s_prefetch_is_in_the_owner_s_memory_and_pins_are_refused(config: Path) -> None:
    with (
        stepwell.open(config, run="run", mode="r") as owner,
        stepwell.open(config, run="run", mode="r") as other,
    ):
        handle = other.prefetch(["@latest", 3]).wait(20)
        assert handle.progress.done_bytes == handle.progress.total_bytes > 8 * SIZE
        memory, own = owner.tiers[0], other.tiers[0]
        assert isinstance(memory, HostTier) and isinstance(own, HostTier)
        assert len(here(memory)) >= 3 and not here(own)
        into = {"model": {"w": torch.zeros(SIZE, dtype=torch.int32)}}
        assert other.restore(into) is not None and torch.equal(
            into["model"]["w"], torch.arange(SIZE, dtype=torch.int32)
        )
        assert moved_bytes(other) == 0
        with pytest.raises(StepwellError, match="belongs to another process"):
            other.pin(3)
        owner.pin(3).wait(20)
        eventually(lambda: memory.arena.in_use == 0)
