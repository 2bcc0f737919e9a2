"""A shared tier is told from its bare mount point: nothing there is not cannot see it."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from stepwell.errors import TierError, TierFull, TierUnavailable
from stepwell.native import crc32c
from stepwell.tiers import _marker
from stepwell.tiers._marker import MARKER_NAME, Memory
from stepwell.tiers.base import RecordKey, Refused, Tier
from tests.contract.suite import CHECKPOINT, MANIFEST, NEW, SHARD, data_of, found, get, put, save
from tests.tiers.helpers import on, pfs, refusing, started, tree

BEAT = RecordKey("run", "epochs/1.beat")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without any cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


async def nothing(tier: Tier) -> None:
    pass


def use(root: Path) -> None:
    on(pfs(root), lambda tier: save(tier, SHARD, data_of(5000)))


def unmount(root: Path) -> None:
    """What a file system leaves behind."""
    shutil.move(root, root.with_name("elsewhere"))
    root.mkdir()


def test_what_it_is(root: Path) -> None:
    info = pfs(root, write_bytes_per_s=2e9, read_bytes_per_s=3e9).info
    assert (info.driver, info.scope, info.survives) == ("pfs", "shared", "node-loss")
    assert (info.write_bytes_per_s, info.read_bytes_per_s) == (2e9, 3e9)
    assert (pfs(root).info.write_bytes_per_s, pfs(root).info.read_bytes_per_s) == (None, None)
    for wrong in ({"write_bytes_per_s": 0}, {"read_bytes_per_s": -1.0}, {"timeout_s": 0}):
        with pytest.raises(ValueError, match="positive"):
            pfs(root, **wrong)


def test_the_limits_are_there_after_the_start_too(root: Path) -> None:
    async def scenario(tier: Tier) -> None:
        assert (tier.info.write_bytes_per_s, tier.info.driver) == (1e9, "pfs") and "writing" in tier.info.detail

    on(pfs(root, write_bytes_per_s=1e9), scenario)


def test_the_root_is_never_made(tmp_path: Path) -> None:
    with pytest.raises(TierUnavailable, match="not there.*[Mm]ount"):
        on(pfs(tmp_path / "absent" / "pfs"), nothing)
    with pytest.raises(TierUnavailable, match="not there.*[Mm]ount"):
        on(pfs(tmp_path / "absent"), nothing)
    assert tree(tmp_path) == set()


def test_the_first_write_leaves_a_sealed_marker(root: Path, home: Path) -> None:
    on(pfs(root), nothing)
    assert tree(root) == set() and not home.exists()
    use(root)
    data = (root / MARKER_NAME).read_bytes()
    marker = json.loads(data)
    assert re.fullmatch("[0-9a-f]{32}", marker["tier_id"]) and marker["format"] == 1
    unsealed = data.replace(marker["seal"].encode(), b"00000000")
    assert crc32c(unsealed) == int(marker["seal"], 16)
    on(pfs(root), lambda tier: save(tier, NEW, data_of(10)))
    assert (root / MARKER_NAME).read_bytes() == data


@pytest.mark.parametrize("first", ["reserve", "commit", "beat"])
def test_every_way_of_writing_marks(root: Path, first: str) -> None:
    async def scenario(tier: Tier) -> None:
        if first == "reserve":
            await tier.reserve(SHARD, 10)
        elif first == "commit":
            await tier.commit(RecordKey("run", "run.json"), b"{}")
        else:
            await tier.beat(BEAT, b"1")

    on(pfs(root), scenario)
    assert (root / MARKER_NAME).exists()


def test_many_first_writers_agree(root: Path) -> None:
    async def main() -> None:
        tiers = [pfs(root) for _ in range(4)]
        await asyncio.gather(*(tier.start() for tier in tiers))
        await asyncio.gather(*(tier.beat(RecordKey("run", f"epochs/{n}.beat"), b"") for n, tier in enumerate(tiers)))
        assert len({tier.files._tier_id for tier in tiers}) == 1
        for tier in tiers:
            await tier.close()

    asyncio.run(main())
    assert not [name for name in tree(root) if name.endswith(".tmp")]


@pytest.mark.parametrize("read_only", [False, True])
def test_a_bare_mount_point_is_an_error(root: Path, read_only: bool) -> None:
    use(root)
    unmount(root)
    with pytest.raises(TierUnavailable, match="bare mount point: is it mounted\\?") as caught:
        on(pfs(root, read_only=read_only), nothing)
    assert tree(root) == set() and caught.value.retry
    root.rmdir()
    shutil.move(root.with_name("elsewhere"), root)  # mounted

    async def scenario(tier: Tier) -> None:
        assert await get(tier, SHARD, 5000) == data_of(5000)

    on(pfs(root), scenario)


def test_a_start_that_failed_works_once_it_is_mounted(root: Path) -> None:
    use(root)
    unmount(root)

    async def main() -> None:
        tier = pfs(root)
        with pytest.raises(TierUnavailable):
            await tier.start()
        root.rmdir()
        shutil.move(root.with_name("elsewhere"), root)
        async with started(tier):
            assert await get(tier, SHARD, 5000) == data_of(5000)

    asyncio.run(main())


def test_an_emptied_folder_is_accepted_as_the_message_says(root: Path) -> None:
    use(root)
    unmount(root)
    with pytest.raises(TierUnavailable) as caught:
        on(pfs(root), nothing)
    command = re.search("rm '(.*)'", str(caught.value))
    assert command is not None
    os.unlink(command[1])
    use(root)
    on(pfs(root), nothing)


def test_another_tier_in_its_place_is_an_error(root: Path) -> None:
    use(root)
    unmount(root)
    (root / MARKER_NAME).write_bytes(_marker.encode("0" * 32))
    with pytest.raises(TierUnavailable, match="not the tier that it was"):
        on(pfs(root), nothing)


def test_another_machine_learns_the_marker_at_its_start(root: Path, home: Path) -> None:
    use(root)
    shutil.rmtree(home)
    on(pfs(root), nothing)
    unmount(root)
    with pytest.raises(TierUnavailable, match="bare"):
        on(pfs(root), nothing)


def test_readers_write_nothing_anywhere(root: Path, home: Path) -> None:
    use(root)
    shutil.rmtree(home)
    before = tree(root)

    async def scenario(tier: Tier) -> None:
        assert await get(tier, SHARD, 5000) == data_of(5000)
        assert isinstance(await tier.reserve(NEW, 10), Refused)
        with pytest.raises(TierError):
            await tier.beat(BEAT, b"1")

    on(pfs(root, read_only=True), scenario)
    assert tree(root) == before and not home.exists()


@pytest.mark.parametrize("damage", [b"", b"{", b'{"seal": "00000000"}', b"\xff" * 100])
def test_a_damaged_marker_is_still_no_bare_folder(root: Path, damage: bytes) -> None:
    use(root)
    (root / MARKER_NAME).write_bytes(damage)

    async def scenario(tier: Tier) -> None:
        assert await get(tier, SHARD, 5000) == data_of(5000)
        await save(tier, NEW, data_of(10))

    on(pfs(root), scenario)
    assert (root / MARKER_NAME).read_bytes() == damage


@pytest.mark.parametrize("memory", [b"", b"[]", b'{"tier_id": 5}', b"{", b"\xff"])
def test_a_broken_memory_protects_nobody_and_stops_nobody(root: Path, memory: bytes) -> None:
    use(root)
    Path(Memory(str(root)).path).write_bytes(memory)
    unmount(root)
    on(pfs(root), nothing)


def test_a_cache_folder_that_cannot_be_written(root: Path, home: Path) -> None:
    home.write_bytes(b"a file")
    use(root)
    on(pfs(root), nothing)


def test_a_marker_that_is_a_link_to_nothing_is_an_error(root: Path) -> None:
    (root / MARKER_NAME).symlink_to("nowhere")

    async def scenario(tier: Tier) -> None:
        for call in (tier.reserve(SHARD, 10), tier.commit(MANIFEST, b"{}"), tier.beat(BEAT, b"1")):
            with pytest.raises(TierError, match="link to nothing") as caught:
                await call
            assert caught.value.errno == errno.ELOOP

    on(pfs(root), scenario)
    assert tree(root) == {MARKER_NAME}


# -- unmounted while it is in use ----------------------------------------------------------------------


def test_what_is_not_mounted_any_more_is_neither_written_nor_taken_for_empty(root: Path) -> None:
    async def scenario(tier: Tier) -> None:
        await save(tier, SHARD, data_of(5000))
        reservation = await put(tier, NEW, data_of(10))
        unmount(root)
        other = RecordKey("run", "epochs/2.json")
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "reserve": lambda: tier.reserve(NEW, 10),
            "commit": lambda: tier.commit(other, b"{}", shards=[reservation]),
            "beat": lambda: tier.beat(BEAT, b"1"),
            "fetch": lambda: tier.fetch(other),
            "scan": lambda: found(tier),
            "lease": lambda: tier.lease([SHARD]),
        }
        for call in calls.values():
            with pytest.raises(TierUnavailable, match="bare mount point"):
                await call()
        assert tree(root) == set()

    async def sleep(seconds: float) -> None:
        pass

    on(pfs(root, sleep=sleep), scenario)


# -- a marker that cannot be made ----------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_no_room_for_the_marker(root: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(tier: Tier) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, "link", refusing(number))
            refused = await tier.reserve(SHARD, 10)
            assert isinstance(refused, Refused)
            assert refused.reason == ("read-only" if number == errno.EROFS else "full")
            with pytest.raises(TierError) as caught:
                await tier.commit(MANIFEST, b"{}")
            assert caught.value.errno == number and isinstance(caught.value, TierFull) == (number != errno.EROFS)
        assert tree(root) == set() and tier.usage().in_flight_bytes == 0
        await save(tier, SHARD, data_of(10))

    on(pfs(root), scenario)
    assert {MARKER_NAME, f"run/{CHECKPOINT.attempt}/manifest.json"} < tree(root)
