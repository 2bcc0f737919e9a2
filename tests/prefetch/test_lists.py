"""Lists of prefetches: bounded by memory, going on as it is used, in order of urgency, each byte read once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stepwell
from stepwell.errors import ConfigError, StoreClosed, TierFull, WaitTimeout
from stepwell.tiers._index import name_of
from stepwell.tiers.host import HostTier
from stepwell.tiers.wrap import Fault
from stepwell.wanted import file_name
from tests.prefetch.helpers import MIB, check, check_books, here, hold, let_go, model, moved_bytes, state
from tests.store.helpers import ALWAYS, disk, eventually, host, release


@pytest.fixture
def memory() -> HostTier:
    return host(24)  # 21 chunks may stay


@pytest.fixture
def store(tmp_path: Path, memory: HostTier) -> Iterator[stepwell.CheckpointStore]:
    with stepwell.open(run="run", tiers=[memory, disk(tmp_path)], policies=[]) as opened:
        yield opened
        check_books(memory)


def arrivals(store: stepwell.CheckpointStore) -> list[str]:
    """Gets the name of each chunk's shard as the chunk arrives."""
    seen: list[str] = []
    arena = store.mover.arena
    filled = arena.filled

    def note(slot: Any) -> None:
        if slot.chunk is not None and not slot.filled:
            seen.append(slot.chunk.shard)
        filled(slot)

    arena.filled = note  # type: ignore[method-assign]
    return seen


def test_a_list_brings_what_fits_and_goes_on_as_it_is_used(
    store: stepwell.CheckpointStore, memory: HostTier, tmp_path: Path
) -> None:
    models = [model(tmp_path, number) for number in range(4)]
    handle = store.prefetch(models)
    eventually(lambda: handle.progress.waiting_bytes > 0)
    seen = handle.progress
    assert len(here(memory)) == memory.arena.kept_max == 21
    assert seen.done_bytes + seen.waiting_bytes == seen.total_bytes and seen.done_bytes > 20 * MIB
    assert not handle.done()
    for number, path in enumerate(models):
        check(path, number)
    handle.wait(20)
    assert handle.progress.done_bytes == handle.progress.total_bytes and handle.progress.waiting_bytes == 0
    assert moved_bytes(store) == handle.progress.total_bytes


def test_a_known_sequence_moves_no_more_than_the_optimum(
    store: stepwell.CheckpointStore, memory: HostTier, tmp_path: Path
) -> None:
    """Of a, b and c only two fit. Belady: b stays for its second use, and what is never used again makes room."""
    a, b, c = (model(tmp_path, number) for number in range(3))
    order = [(a, 0), (b, 1), (c, 2), (b, 1), (a, 0)]
    handle = store.prefetch([path for path, _ in order])
    eventually(lambda: handle.progress.waiting_bytes > 0)
    for path, number in order:
        check(path, number)
    handle.wait(20)
    size = handle.progress.total_bytes // 5
    assert moved_bytes(store) < 4 * size  # a, b, c, and of a again what had to give way to c: 27 - 21 chunks


def test_a_model_that_can_never_stay_is_refused_with_the_numbers(
    store: stepwell.CheckpointStore, tmp_path: Path
) -> None:
    small, big = model(tmp_path, 0, 3), model(tmp_path, 1, 22)
    with pytest.raises(TierFull, match=r"22.0 MiB do not fit into the host tier, which keeps 21.0 MiB"):
        store.prefetch([small, big]).wait(20)
    store.prefetch([small, big], max_bytes="9MiB").wait(20)


def test_max_bytes_takes_the_beginning_and_says_what_it_leaves_out(
    store: stepwell.CheckpointStore, memory: HostTier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "stepwell")
    one, two = model(tmp_path, 1), model(tmp_path, 2)
    handle = store.prefetch([one, one, two], max_bytes=12 * MIB).wait(20)
    assert len(here(memory)) == 12  # 9 of the first, counted once, and 3 of the second
    assert handle.progress.left_out_bytes == two.joinpath("model.safetensors").stat().st_size - 3 * MIB
    assert "leaves out 6.00 MiB: its max_bytes is 12.0 MiB" in caplog.text


def test_the_more_urgent_overtakes_at_the_next_chunk(
    store: stepwell.CheckpointStore, memory: HostTier, tmp_path: Path
) -> None:
    low, late, soon, high = (model(tmp_path, number, 4) for number in range(4))
    slots, seen = hold(store, 21), arrivals(store)
    handles = [
        store.prefetch(low),
        store.prefetch(late, priority=1),
        store.prefetch(soon, priority=1, deadline="1h"),
        store.prefetch(high, priority=2),
    ]
    eventually(lambda: all(handle.progress.total_bytes for handle in handles))
    let_go(store, slots[:1])
    eventually(lambda: len(seen) == 1)
    let_go(store, slots[1:])
    for handle in handles:
        handle.wait(20)
    order = list(dict.fromkeys(seen))
    names = [name_of(file_name(path / "model.safetensors")) for path in (high, soon, late, low)]
    assert order == names and len(seen) == 16


def test_two_prefetches_of_one_model_read_it_once(store: stepwell.CheckpointStore, tmp_path: Path) -> None:
    path = model(tmp_path, 1)
    slots = hold(store, 21)
    handles = [store.prefetch(path, priority=number) for number in range(3)]
    eventually(lambda: all(handle.progress.total_bytes for handle in handles))
    let_go(store, slots)
    for handle in handles:
        assert handle.wait(20).progress.done_bytes == handle.progress.total_bytes
    assert moved_bytes(store) == (path / "model.safetensors").stat().st_size


@pytest.mark.parametrize("first", ["prefetch", "restore"])
def test_a_prefetch_and_a_restore_read_each_byte_once(tmp_path: Path, first: str) -> None:
    saved = state(3.0)
    tier = disk(tmp_path)
    with stepwell.open(run="run", tiers=[tier], policies=[]) as store:
        store.save(1, saved).wait()
    memory, tier = host(24), disk(tmp_path)
    with stepwell.open(run="run", tiers=[memory, tier], policies=[], mode="r") as store:
        tier.plan = [Fault("read", 1, "stall", times=ALWAYS)]
        into = {part: {key: torch.zeros_like(value) for key, value in one.items()} for part, one in saved.items()}
        if first == "prefetch":
            handle = store.prefetch(1)
            eventually(lambda: any(edge.in_flight_bytes for edge in store.status().edges))
        tier.plan = []
        release(tier)
        restored = store.restore(into)
        assert restored is not None and bool((into["model"]["second"] == -3).all())
        if first == "restore":
            handle = store.prefetch(1)
        handle.wait(20)
        size = handle.progress.total_bytes
        assert moved_bytes(store) <= size
        assert len(here(memory)) >= size // MIB - 1  # but for the header, which only whole restores read
        check_books(memory)


def test_a_restore_that_overtakes_consumes_what_was_announced(tmp_path: Path) -> None:
    """The chunks are neither brought afterwards nor kept from giving way."""
    memory = host(24)
    with stepwell.open(run="run", tiers=[memory, disk(tmp_path)], policies=[]) as store:
        paths = [model(tmp_path, number) for number in range(3)]
        slots = hold(store, 21)
        handle = store.prefetch(paths)
        eventually(lambda: handle.progress.waiting_bytes > 0)
        check(paths[0], 0)
        let_go(store, slots)
        eventually(lambda: handle.done())
        assert moved_bytes(store) == handle.progress.total_bytes
        check_books(memory)


def test_a_deadline_that_is_missed_is_said_and_is_no_error(
    store: stepwell.CheckpointStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = model(tmp_path, 1)
    slots = hold(store, 21)
    calm, handle = store.prefetch(path, deadline="1h"), store.prefetch(path, deadline=0.05)
    eventually(lambda: handle.late)
    eventually(lambda: "has missed its deadline of 50 ms: 0 B of" in caplog.text)
    assert handle.progress.on_time is False and not calm.late
    let_go(store, slots)
    handle.wait(20)
    assert calm.wait(20).progress.on_time is True and handle.late and handle.progress.on_time is False
    assert store.prefetch(path).progress.on_time is None


def test_closing_the_store_ends_what_waits_for_room(tmp_path: Path) -> None:
    memory = host(24)
    with stepwell.open(run="run", tiers=[memory, disk(tmp_path)], policies=[]) as store:
        handle = store.prefetch([model(tmp_path, number) for number in range(3)])
        eventually(lambda: handle.progress.waiting_bytes > 0)
        with pytest.raises(WaitTimeout, match="for room"):
            handle.wait(0.01)
    with pytest.raises(StoreClosed, match="store was closed"):
        handle.wait(20)


def test_what_cannot_be_asked_for_is_said_at_once(store: stepwell.CheckpointStore, tmp_path: Path) -> None:
    path = model(tmp_path, 1)
    wrong: list[dict[str, Any]] = [
        {"priority": 1.5}, {"deadline": "soon"}, {"max_bytes": "-1"}, {"parts": []}, {"keys": [1]},
    ]  # fmt: skip
    for each in wrong:
        with pytest.raises(ConfigError):
            store.prefetch(path, **each)
    with pytest.raises(ConfigError, match="no tier 'tape'"):
        store.prefetch(path, to="tape")
    with pytest.raises(ConfigError, match="whole parts"):
        store.prefetch(1, to="disk", keys="*.weight")
