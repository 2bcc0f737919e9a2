"""The shared host tier over the death of its owner: what the next one finds, and what it may be with other sizes."""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepwell.errors import TierError, TierUnavailable
from stepwell.tiers import _shm
from stepwell.tiers._index import SlotState, name_of
from stepwell.tiers._sharedindex import HEADER_BYTES, IndexView, Unusable
from stepwell.tiers.base import RecordKey
from stepwell.tiers.host import Priority
from stepwell.tiers.shared import SharedHostTier
from tests.contract.suite import get, put
from tests.mounts import tmpfs
from tests.tiers.helpers import on
from tests.tiers.processes import (
    CACHED,
    CHECKPOINT,
    KEPT,
    KEPT_BYTES,
    SLOT_BYTES,
    SLOTS,
    TORN,
    Child,
    arena_folder,
    data_of,
    fill,
    shared,
)

MANIFEST = RecordKey("run", f"{CHECKPOINT.attempt}/manifest.json")


def new_root() -> Path:
    return Path(tempfile.mkdtemp(dir=_shm.ROOT, prefix="stepwell-test-"))


@pytest.fixture
def root() -> Iterator[Path]:
    made = new_root()
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def killed() -> Iterator[Path]:
    """What an owner has left that was killed in the middle of all it did."""
    made = new_root()
    with Child("leave", made) as owner:
        owner.wait_for("left")
        owner.kill()
    yield made
    shutil.rmtree(made)


@pytest.fixture
def left(killed: Path, root: Path) -> Path:
    """A copy of it."""
    shutil.copytree(_shm.user_folder(killed), _shm.user_folder(root))
    return root


def held(tier: SharedHostTier, number: int) -> bytes:
    slot = tier.arena.find(CACHED, number)
    assert slot is not None
    data = ctypes.string_at(slot.address, SLOT_BYTES)
    tier.arena.release(slot)
    return data


async def check_kept(tier: SharedHostTier) -> None:
    assert tier.owned and tier.info.survives == "process" and not tier.why
    assert await tier.fetch(MANIFEST) == b'{"a": 1}'
    assert await get(tier, KEPT, KEPT_BYTES) == data_of(KEPT_BYTES, 1)


def nothing(root: Path) -> None:
    """Nothing of it is there for the next one."""

    async def scenario(tier: SharedHostTier) -> None:
        assert tier.owned and not tier.arena.chunks(KEPT) and await tier.fetch(MANIFEST) is None
        await fill(tier)

    on(shared(root), scenario)


# -- what the next one finds -------------------------------------------------------------


def test_the_next_one_has_what_was_committed_and_what_was_cached_and_nothing_else(left: Path) -> None:
    async def scenario(tier: SharedHostTier) -> None:
        await check_kept(tier)
        assert tier.arena.chunks(KEPT) == {0, 1, 2} and tier.arena.is_dirty(KEPT)
        assert held(tier, 0) == data_of(SLOT_BYTES, 3) and not tier.arena.is_dirty(CACHED)
        assert not tier.arena.has(CACHED, 1), "half filled"
        assert not tier.arena.chunks(TORN), "never committed, and on no other tier"
        assert tier.arena.cached_bytes == 4 * SLOT_BYTES
        assert [found.name async for found in tier.scan("run")].count(KEPT.name) == 1

    on(shared(left), scenario)
    on(shared(left), check_kept)  # and so has the one after that


def test_all_room_can_be_used_and_is_no_more_than_the_capacity(left: Path) -> None:
    async def scenario(tier: SharedHostTier) -> None:
        slots = [await tier.arena.acquire(Priority.RESTORE) for _ in range(SLOTS - 4)]
        assert len({slot.address for slot in slots}) == SLOTS - 4
        for slot in slots:
            tier.arena.view(slot, SLOT_BYTES)[:] = b"x" * SLOT_BYTES
            tier.arena.release(slot)
        await check_kept(tier)
        assert (arena_folder(left) / _shm.SLOTS).stat().st_blocks * 512 == SLOTS * SLOT_BYTES

    on(shared(left), scenario)


def test_what_a_dead_owners_devices_may_still_write_to_is_not_used_again(left: Path) -> None:
    view = IndexView(arena_folder(left))
    [torn] = [row.slot for row in map(view.look, range(view.count)) if row.state is SlotState.FILLING]
    view.close()
    slots = arena_folder(left) / _shm.SLOTS
    with slots.open("r+b") as file:
        before = slots.stat().st_blocks

        async def scenario(tier: SharedHostTier) -> None:
            taken = [await tier.arena.acquire(Priority.RESTORE) for _ in range(SLOTS - 4)]
            [again] = [slot for slot in taken if slot.index == torn]
            assert ctypes.string_at(again.address, SLOT_BYTES) == bytes(SLOT_BYTES), "the old page"
            for slot in taken:
                tier.arena.release(slot)

        on(shared(left), scenario)
        assert slots.stat().st_blocks >= before and file


@pytest.mark.parametrize("slots", [8, 64])
def test_another_capacity_keeps_what_fits(left: Path, slots: int) -> None:
    async def scenario(tier: SharedHostTier) -> None:
        await check_kept(tier)
        assert tier.arena.count == slots
        for slot in [await tier.arena.acquire(Priority.RESTORE) for _ in range(slots - 4)]:
            tier.arena.release(slot)
        assert (arena_folder(left) / _shm.SLOTS).stat().st_blocks * 512 <= slots * SLOT_BYTES

    on(shared(left, slots), scenario)
    on(shared(left), check_kept)


def test_less_capacity_evicts_what_other_tiers_have_and_never_what_they_have_not(
    left: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(tier: SharedHostTier) -> None:
        await check_kept(tier)
        assert not tier.arena.chunks(CACHED)
        assert tier.arena.count == 5, "as many as the only copies need, and two for staging"
        tier.arena.clean(KEPT)

    on(shared(left, 4), scenario)
    assert "are nowhere else" in caplog.text

    async def cleaned(tier: SharedHostTier) -> None:
        assert tier.arena.count == 4 and tier.arena.cached_bytes == 2 * SLOT_BYTES
        assert await tier.fetch(MANIFEST) is None, "a part of it had to go"
        assert (arena_folder(left) / _shm.SLOTS).stat().st_blocks * 512 <= 4 * SLOT_BYTES

    on(shared(left, 4), cleaned)


def test_another_slot_size_begins_anew(left: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(tier: SharedHostTier) -> None:
        assert tier.owned and tier.empty

    on(shared(left, slot_bytes=2 * SLOT_BYTES), scenario)
    assert "slots have 8192 bytes, and now 16384 are wanted" in caplog.text


def damage_magic(folder: Path) -> None:
    with (folder / _shm.INDEX).open("r+b") as file:
        file.write(b"stepwall")


def damage_state(folder: Path) -> None:
    with (folder / _shm.INDEX).open("r+b") as file:
        file.seek(HEADER_BYTES + 36)
        file.write(b"\x07")


def cut_index(folder: Path) -> None:
    os.truncate(folder / _shm.INDEX, 100)


def cut_slots(folder: Path) -> None:
    os.truncate(folder / _shm.SLOTS, SLOT_BYTES)


def no_slots(folder: Path) -> None:
    (folder / _shm.SLOTS).unlink()


def older_version(folder: Path) -> None:
    with (folder / _shm.INDEX).open("r+b") as file:
        file.seek(8)
        file.write(struct.pack("<I", 0))


@pytest.mark.parametrize("damage", [damage_magic, damage_state, cut_index, cut_slots, no_slots, older_version])
def test_what_is_damaged_is_not_used(left: Path, caplog: pytest.LogCaptureFixture, damage: object) -> None:
    assert callable(damage)
    damage(arena_folder(left))
    nothing(left)
    assert "what was in shared memory is lost" in caplog.text


def test_a_damaged_record_ends_the_commit_of_its_checkpoint(left: Path, caplog: pytest.LogCaptureFixture) -> None:
    [record] = (arena_folder(left) / _shm.RECORDS).iterdir()
    record.write_bytes(record.read_bytes()[:-1] + b"!")
    nothing(left)
    assert "a record in shared memory is damaged" in caplog.text


def test_a_chunk_that_is_not_there_any_more_ends_the_commit(left: Path) -> None:
    folder = arena_folder(left)
    view = IndexView(folder)
    [slot] = [r.slot for r in map(view.look, range(view.count)) if (r.name, r.chunk) == (name_of(KEPT), 1)]
    view.close()
    with (folder / _shm.INDEX).open("r+b") as file:
        file.seek(HEADER_BYTES + slot * 40 + 36)
        file.write(bytes([SlotState.FREE]))
    nothing(left)


def test_the_eviction_policy_goes_on_from_where_it_was(root: Path) -> None:
    async def first(tier: SharedHostTier) -> None:
        await fill(tier)

    on(shared(root), first)
    assert name_of(KEPT) in (arena_folder(root) / _shm.EVICT).read_text()

    async def second(tier: SharedHostTier) -> None:
        assert [shard for shard, _ in tier.arena.eviction.state()["shards"]] == [name_of(KEPT), name_of(CACHED)]

    on(shared(root), second)
    (arena_folder(root) / _shm.EVICT).write_text("{")
    on(shared(root), check_kept)


# -- who owns it -------------------------------------------------------------------------


def test_a_second_one_is_told_whose_it_is_and_works_in_private(root: Path) -> None:
    async def scenario(tier: SharedHostTier) -> None:
        async def other(second: SharedHostTier) -> None:
            assert not second.owned and second.info.survives == "nothing"
            assert f"pid {os.getpid()}" in second.why and second.owner is not None and second.owner.run == "run"
            await fill(second)
            assert await get(second, KEPT, KEPT_BYTES) == data_of(KEPT_BYTES, 1)

        second = shared(root)
        await second.start()
        try:
            await other(second)
        finally:
            await second.close()
        assert tier.owned and tier.empty, "what the second one did was its own"

    on(shared(root), scenario)


def test_an_owner_hands_over_and_goes_on_in_private(root: Path) -> None:
    async def scenario(tier: SharedHostTier) -> None:
        await fill(tier)
        lost: list[object] = []
        tier.on_uncommitted = lost.append
        await put(tier, TORN, b"x")
        with pytest.raises(TierError, match="a save is under way"):
            await tier.release_ownership()
        await tier.drop([TORN])
        slot = await tier.arena.acquire(Priority.RESTORE)
        leaving = asyncio.ensure_future(tier.release_ownership())
        waiting = asyncio.ensure_future(tier.arena.acquire(Priority.RESTORE))
        await asyncio.sleep(0)
        assert tier.arena.find(KEPT, 0) is None and not waiting.done() and not leaving.done()
        tier.arena.release(slot)
        await leaving
        tier.arena.release(await waiting)
        assert not tier.owned and tier.empty and lost == [CHECKPOINT] and tier.info.survives == "nothing"
        next_one = shared(root)
        await next_one.start()
        await check_kept(next_one)
        await next_one.close()
        await fill(tier)  # into memory of its own
        assert await tier.try_to_own(), "and it may come back to it"

    on(shared(root), scenario)


def test_a_forked_child_holds_nothing_and_is_told(root: Path) -> None:
    with Child("leave", root) as owner:
        assert "open in the parent of this forked process only" in owner.wait_for("child False")
        assert owner.wait_for("maps") == "maps False files False"


# -- where it is -------------------------------------------------------------------------


def test_memory_is_only_shared_in_memory(tmp_path: Path, root: Path) -> None:
    for place, says in ((tmp_path, "not in memory"), (root / "nowhere", "No such file")):
        with pytest.raises(TierUnavailable, match=says):
            asyncio.run(shared(place).start())
    (_shm.user_folder(root)).symlink_to(tmp_path)
    with pytest.raises(TierUnavailable, match="is none"):
        asyncio.run(shared(root).start())
    _shm.user_folder(root).unlink()


def test_a_small_mount_is_used_or_not_and_that_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def half(tier: SharedHostTier) -> None:
        assert tier.owned and 500 * SLOT_BYTES > tier.arena.capacity_bytes >= 400 * SLOT_BYTES
        await fill(tier)

    async def private(tier: SharedHostTier) -> None:
        assert not tier.owned and "has room for 3 MiB, and the host tier wants 7 MiB" in tier.why
        await fill(tier)

    with tmpfs(tmp_path / "small", 4) as place, caplog.at_level(logging.WARNING):
        on(shared(place, 500), half)
        assert "docker run --shm-size" in caplog.text
        _shm.remove(arena_folder(place))
        on(shared(place, 1000), private)


def test_arenas_without_an_owner_make_room(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", 8) as place:
        locks = [lock for name in "ab" if (lock := _shm.try_to_lock(_shm.user_folder(place) / name)) is not None]
        for lock in locks:
            (lock.folder / _shm.SLOTS).write_bytes(bytes(3 << 20))
        locks[0].close()

        async def scenario(tier: SharedHostTier) -> None:
            assert tier.owned and tier.arena.capacity_bytes == 256 * SLOT_BYTES

        on(shared(place, 256), scenario)
        assert {found.name for found in _shm.arenas(place)} == {"b", arena_folder(place).name}
        locks[1].close()


def test_others_see_a_slot_change_under_their_hands(root: Path) -> None:
    async def scenario(tier: SharedHostTier) -> None:
        await fill(tier)
        view = IndexView(arena_folder(root))
        slot = tier.arena.find(KEPT, 0)
        assert slot is not None
        before = view.look(slot.index)
        assert (before.state, before.name, before.chunk) == (SlotState.FILLED, name_of(KEPT), 0)
        assert before.generation == tier.arena.generation(slot)
        tier.arena.release(slot)
        await tier.drop([CHECKPOINT])
        assert view.look(slot.index).state is SlotState.FREE
        await fill(tier)
        assert view.look(slot.index) != before
        view.close()

    on(shared(root), scenario)
    with pytest.raises(Unusable, match="only 4 bytes"):
        (arena_folder(root) / _shm.INDEX).write_bytes(b"none")
        IndexView(arena_folder(root))
    assert json.loads((arena_folder(root) / _shm.OWNER).read_text())["run"] == "run"
