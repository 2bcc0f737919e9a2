"""`stepwell host ls` and `stepwell host free`: arenas with an owner, without one, and what is no arena."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stepwell import arenas
from stepwell.neighbouring import Neighbouring
from stepwell.tiers._committed import Records, Stored
from stepwell.tiers._shm import SLOTS, Lock, arena_name, describe_owner, try_to_lock, user_folder
from stepwell.tiers.base import RecordKey
from tests.cli.helpers import Cli
from tests.core.moving import MIB
from tests.neighbours.nearby import owning

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()


@contextmanager
def owned(root: Path, run: str) -> Iterator[Lock]:
    """An arena of a megabyte, with a checkpoint in it; without an owner once the context is left."""
    folder = user_folder(root) / arena_name("host", run, 0, "/ckpts")
    lock = try_to_lock(folder)
    assert lock is not None
    lock.tell(describe_owner(run, MIB, 4 * MIB))
    (folder / SLOTS).write_bytes(bytes(MIB))
    records = Records(folder)
    for name in ("manifest.json", "rank-00000.json"):
        records.put(Stored(RecordKey(run, f"step-000000007.1-1/{name}"), b"{}"))
    try:
        yield lock
    finally:
        lock.close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Shared memory of this test's own: one arena with an owner, `sft`, and one without, `base`."""
    with owned(tmp_path, "base"):
        pass
    return tmp_path


def test_what_is_there_is_listed(cli: Cli, root: Path) -> None:
    with owned(root, "sft"):
        document = cli("host", "ls", "--root", root, "--json").json
        said = cli("host", "ls", "--root", root)
    base, sft = document["arenas"]
    assert (base["run"], base["alive"], sft["run"], sft["alive"]) == ("base", False, "sft", True)
    assert sft["pid"] == os.getpid() and sft["capacity_bytes"] == 4 * MIB and sft["bytes"] >= MIB
    assert sft["checkpoints"] == ["step-000000007.1-1"] and sft["clients"] is None
    assert document["bytes"] == base["bytes"] + sft["bytes"]
    assert said.code == 0 and "1 has no owner any more" in said.out
    assert re.search(r"^host\.sft\S+ +sft +pid \d+ of .* step-000000007\.1-1 +\? *$", said.out, re.MULTILINE)
    assert re.search(r"^host\.base\S+ +base +pid \d+ of .*, dead ", said.out, re.MULTILINE)


def test_no_shared_memory_is_no_error(cli: Cli, tmp_path: Path) -> None:
    assert cli("host", "ls", "--root", tmp_path).out == "no host tier shares memory here\n"
    assert cli("host", "ls", "--root", tmp_path, "--json").json == {"arenas": [], "bytes": 0}
    assert cli("host", "free", "--dead", "--root", tmp_path).out == "nothing to free\n"


def test_the_dead_are_freed_and_the_living_stay(cli: Cli, root: Path) -> None:
    with owned(root, "sft") as lock:
        said = cli("host", "free", "--dead", "--root", root, "--json").json
        assert [arena["run"] for arena in said["freed"]] == ["base"] and said["bytes"] >= MIB
        assert [path.name for path in user_folder(root).iterdir()] == [lock.folder.name]
        assert cli("host", "free", "--dead", "--root", root).out == "nothing to free\n"
    assert cli("host", "free", "--dead", "--root", root).code == 0
    assert list(user_folder(root).iterdir()) == []


def test_one_with_an_owner_is_refused_by_name(cli: Cli, root: Path) -> None:
    with owned(root, "sft") as lock:
        said = cli("host", "free", lock.folder.name, "--root", root)
        assert said.code == 1 and f"pid {os.getpid()}" in said.err
        said = cli("host", "free", lock.folder.name, "--root", root, "--json")
        assert said.json["freed"] == [] and said.json["error"]["kind"] == "TierError"
        assert (lock.folder / SLOTS).stat().st_size == MIB
        assert cli("host", "free", lock.folder.name, "--dead", "--root", root).out == "nothing to free\n"


def test_one_is_freed_by_its_name(cli: Cli, root: Path) -> None:
    name = arena_name("host", "base", 0, "/ckpts")
    said = cli("host", "free", name, "--yes", "--root", root)
    assert said.code == 0 and said.out.startswith(f"{name}, ") and "1 freed" in said.out


def test_a_name_that_nobody_has_and_no_name_at_all(cli: Cli, root: Path) -> None:
    said = cli("host", "free", "host.other.0.1", "--root", root)
    assert said.code == 1 and "there is no arena 'host.other.0.1'" in said.err
    said = cli("host", "free", "--root", root)
    assert said.code == 1 and "--dead" in said.err


def test_a_folder_that_others_may_enter_is_not_trusted(cli: Cli, root: Path) -> None:
    user_folder(root).chmod(0o777)
    said = cli("host", "ls", "--root", root)
    assert said.code == 1 and "others may enter" in said.err


def test_the_config_says_where_else_to_look(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.toml"
    host = f'[[tier]]\nname = "host"\ndriver = "host"\nshared = true\npath = "{root}"\n'
    file.write_text(f'{host}[[tier]]\nname = "disk"\ndriver = "file"\npath = "{tmp_path}/ckpts"\n')
    monkeypatch.setenv("STEPWELL_CONFIG", str(file))
    assert arenas.roots_of(None) == [Path("/dev/shm"), root]
    assert arenas.roots_of(root) == [root]


def test_an_owner_says_how_many_use_its_arena(tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = user_folder(tmp_path) / "host.sft.0.1"
        folder.parent.mkdir(mode=0o700)
        async with owning(folder):
            client = Neighbouring(folder, MIB)
            await client.start()
            assert await arenas._clients(folder) == 1
            await client.close()

    asyncio.run(scenario())


def test_the_page_has_every_key(cli: Cli, root: Path) -> None:
    document = cli("host", "ls", "--root", root, "--json").json
    sections = dict(re.findall(r"^## stepwell host (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))

    def named(section: str) -> set[str]:
        first = re.findall(r"^\| (`[^|]+) \|", sections[section], re.MULTILINE)
        return {name for cell in first for name in re.findall(r"`([a-z_]+)`", cell)}

    assert named("ls") == {*document, *document["arenas"][0]}
    assert named("free") == set(cli("host", "free", "--dead", "--root", root, "--json").json)
