"""Stores with a shared host tier: what one has read the others find, and a writer gets the memory that a reader has.

Several stores of one process are to each other what stores of several processes are: an arena has one owner.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import save_file

import stepwell
from stepwell.tiers.shared import SharedHostTier
from tests.store.helpers import sharing

ROWS = 5000  # of 1024 floats: three chunks


def state(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((ROWS, 1024), value), "b": torch.arange(7)}}


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Path]:
    """A shared host tier over a disk where run `run` has step 3."""
    with stepwell.open(tmp_path / "run") as store:
        store.save(3, state(3.0)).wait()
    with sharing(tmp_path) as file:
        yield file


def opened(config: Path, mode: Literal["w", "r"] = "r") -> stepwell.CheckpointStore:
    return stepwell.open(config, run="run", mode=mode)


def host_of(store: stepwell.CheckpointStore) -> SharedHostTier:
    host = store.tiers[0]
    assert isinstance(host, SharedHostTier)
    return host


def moved(store: stepwell.CheckpointStore, source: str) -> int:
    """Bytes that have come from there."""

    async def look() -> int:
        return sum(edge.statistics().moved_bytes for edge in store.mover.edges.all() if edge.source == source)

    return store._runtime.run(look())


def test_what_the_owner_has_restored_others_take_from_its_memory(config: Path) -> None:
    with opened(config) as owner, opened(config) as other:
        assert host_of(owner).owned and not host_of(other).owned
        first, second = state(0.0), state(0.0)
        assert owner.restore(first) is not None and other.restore(second) is not None
        assert torch.equal(first["model"]["w"], second["model"]["w"]) and bool((second["model"]["w"] == 3.0).all())
        assert moved(other, "disk") == 0 and moved(other, "neighbour") >= ROWS * 4096


def test_what_a_client_wants_the_owner_reads(config: Path) -> None:
    with opened(config) as owner, opened(config) as other:
        mine = state(0.0)
        other.restore(mine)
        assert bool((mine["model"]["w"] == 3.0).all())
        assert moved(other, "disk") == 0 and moved(owner, "disk") >= ROWS * 4096


def test_loads_of_any_file_go_through_the_shared_memory(config: Path, tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    save_file({"v": torch.arange(3_000_000)}, tmp_path / "hub" / "model.safetensors")
    with opened(config) as owner:
        assert torch.equal(stepwell.load(tmp_path / "hub")["v"], torch.arange(3_000_000))
        there = host_of(owner).arena.cached_bytes
        assert there >= 3 * (8 << 20)
        assert torch.equal(stepwell.load(tmp_path / "hub")["v"], torch.arange(3_000_000))
        assert moved(owner, "host") >= 3_000_000 * 8 and host_of(owner).arena.cached_bytes == there


def test_a_reader_lets_a_writer_have_the_memory_with_all_that_is_in_it(config: Path) -> None:
    with opened(config) as reader:
        reader.restore(state(0.0))
        assert host_of(reader).owned
        with opened(config, "w") as writer:
            assert host_of(writer).owned and not host_of(reader).owned
            mine = state(0.0)
            assert writer.restore(mine) is not None and moved(writer, "disk") == 0
            writer.save(4, state(4.0)).wait()
            theirs = state(0.0)
            assert reader.restore(theirs) is not None
            assert bool((theirs["model"]["w"] == 4.0).all()) and moved(reader, "neighbour") >= ROWS * 4096


def test_a_second_writer_works_in_private_memory_and_says_so(config: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(config, "w") as first:
        with caplog.at_level(logging.WARNING, "stepwell"), opened(config, "w") as second:
            assert host_of(first).owned and not host_of(second).owned
            mine = state(0.0)
            second.restore(mine)
            assert bool((mine["model"]["w"] == 3.0).all())
    assert "another process owns the shared memory" in caplog.text


def test_who_is_left_by_the_owner_goes_on(config: Path) -> None:
    owner = opened(config)
    with opened(config) as other:
        other.restore(state(0.0))
        owner.close()
        mine = state(0.0)
        other.restore(mine)
        assert bool((mine["model"]["w"] == 3.0).all())
        with opened(config) as third:
            assert host_of(third).owned  # with what the first one left
            third.restore(mine)
            assert moved(third, "disk") == 0
