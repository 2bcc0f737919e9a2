"""The folders of shared memory: whose they are, who lives, what may be removed, and what is not trusted."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepwell.errors import TierError, TierUnavailable
from stepwell.tiers import _shm
from tests.tiers.processes import Child

NAME = "host.run.0.0123456789ab"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return _shm.user_folder(tmp_path) / NAME


@pytest.fixture
def lock(folder: Path) -> Iterator[_shm.Lock]:
    lock = _shm.try_to_lock(folder)
    assert lock is not None
    lock.tell(_shm.describe_owner("run", 4096, 1 << 20))
    yield lock
    lock.close()


def test_a_name_tells_tier_run_rank_and_place_apart_and_is_short() -> None:
    names = {
        _shm.arena_name(*each)
        for each in [
            ("host", "run", 0, "/a"),
            ("host", "run", 1, "/a"),
            ("host", "run", 0, "/b"),
            ("h", "run", 0, "/a"),
        ]
    }
    assert len(names) == 4 and all("/" not in name for name in names)
    long = [_shm.arena_name("host" * 50, "run" * 80 + end, 0, "/a") for end in "xy"]
    assert long[0] != long[1], "what is cut off still tells runs apart"
    assert len(str(_shm.user_folder() / long[0] / _shm.SOCKET)) <= 107


def test_an_arena_tells_who_owns_it_and_that_he_lives(folder: Path, lock: _shm.Lock, tmp_path: Path) -> None:
    (folder / _shm.SLOTS).write_bytes(bytes(8192))
    [found] = _shm.arenas(tmp_path)
    assert (found.name, found.alive, found.folder) == (NAME, True, folder)
    assert found.owner is not None and found.owner.pid == os.getpid() and found.owner.run == "run"
    assert found.size_bytes == sum(path.stat().st_blocks * 512 for path in folder.iterdir()) >= 8192
    assert f"pid {os.getpid()}" in str(found.owner)
    lock.close()
    [found] = _shm.arenas(tmp_path)
    assert not found.alive and found.owner is not None


def test_nobody_takes_what_has_an_owner_and_looking_takes_nothing(folder: Path, lock: _shm.Lock) -> None:
    assert _shm.try_to_lock(folder) is None
    with pytest.raises(TierError, match=f"live process.*pid {os.getpid()}") as refused:
        _shm.remove(folder)
    assert refused.value.errno == errno.EBUSY and folder.is_dir()
    lock.close()
    again = _shm.try_to_lock(folder)
    assert again is not None and again.held
    again.close()


def test_removing_takes_all_of_it_and_says_how_much(folder: Path, lock: _shm.Lock, tmp_path: Path) -> None:
    (folder / _shm.RECORDS).mkdir()
    (folder / _shm.RECORDS / "one").write_bytes(b"x")
    (folder / _shm.SLOTS).write_bytes(bytes(1 << 20))
    lock.close()
    assert _shm.remove(folder) >= 1 << 20
    assert not folder.exists() and _shm.arenas(tmp_path) == []


def test_memory_that_a_link_leads_to_goes_with_the_arena(folder: Path, lock: _shm.Lock, tmp_path: Path) -> None:
    away = tmp_path / "away.slots"
    away.write_bytes(bytes(1 << 20))
    (folder / _shm.SLOTS).symlink_to(away)
    lock.close()
    assert _shm.remove(folder) >= 1 << 20
    assert not away.exists()


def test_a_lock_on_a_file_that_was_removed_meanwhile_is_none(folder: Path, lock: _shm.Lock) -> None:
    held_back = os.open(folder / _shm.OWNER, os.O_RDWR)  # as one who opened it just before it was removed
    lock.close()
    _shm.remove(folder)
    anew = _shm.try_to_lock(folder)
    assert anew is not None and os.fstat(held_back).st_ino != (folder / _shm.OWNER).stat().st_ino
    os.close(held_back)
    anew.close()


def test_a_dead_owner_is_seen_although_its_children_live(tmp_path: Path) -> None:
    with Child("own_and_fork", tmp_path) as owner:
        owner.wait_for("forked")
        [found] = _shm.arenas(tmp_path)
        assert found.alive
        owner.kill()  # the forked child goes on
        [found] = _shm.arenas(tmp_path)
        assert not found.alive
        _shm.remove(found.folder)
        assert _shm.arenas(tmp_path) == []


def test_other_peoples_folders_are_not_used(tmp_path: Path, folder: Path) -> None:
    above = folder.parent
    assert _shm.arenas(tmp_path) == []
    above.symlink_to(tmp_path)
    with pytest.raises(TierUnavailable, match="is none"):
        _shm.arenas(tmp_path)
    above.unlink()
    above.mkdir(mode=0o755)
    with pytest.raises(TierUnavailable, match=r"others may enter.*mode 755"):
        _shm.try_to_lock(folder)
    above.rmdir()
    above.write_bytes(b"")
    with pytest.raises(TierUnavailable, match="is none"):
        _shm.try_to_lock(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder away")
def test_a_folder_of_another_user_is_not_used(tmp_path: Path, folder: Path) -> None:
    folder.parent.mkdir(mode=0o700)
    os.chown(folder.parent, 12345, 12345)
    with pytest.raises(TierUnavailable, match="another user.*12345"):
        _shm.try_to_lock(folder)


def test_what_an_owner_says_may_be_unreadable(folder: Path, lock: _shm.Lock, tmp_path: Path) -> None:
    (folder / _shm.OWNER).write_bytes(b"{")
    [found] = _shm.arenas(tmp_path)
    assert found.owner is None and found.alive
    lock.tell(_shm.describe_owner("a", 1, 2))
    lock.tell(_shm.describe_owner("b", 1, 2))
    assert (told := _shm.read_owner(folder)) is not None and told.run == "b"
