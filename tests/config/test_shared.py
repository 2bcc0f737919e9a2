"""What `config check` says of shared memory, and which of a node's ranks a process is."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepwell.hostmem import local_rank
from stepwell.inspecting import inspect
from tests.mounts import tmpfs

CONFIG = """
[[tier]]
name = "host"
driver = "host"
shared = true
{more}

[[tier]]
name = "disk"
driver = "file"
path = "{disk}"
"""


def config(folder: Path, more: str) -> Path:
    file = folder / "c.toml"
    file.write_text(CONFIG.format(disk=folder / "disk", more=more))
    return file


def test_what_a_file_leaves_out_is_told(tmp_path: Path) -> None:
    values = {value.key: (value.value, value.text) for value in inspect(config(tmp_path, ""), probe=False).values}
    assert values["tier[0].path"] == ("/dev/shm", "/dev/shm")
    assert values["tier[0].capacity"] == (None, "25% of the memory that this job may use")


def test_a_mount_is_looked_at(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", 4) as place:
        checked = inspect(config(tmp_path, f'path = "{place}"\ncapacity = "64MiB"'))
        assert checked.found is not None and checked.good
        [memory, room] = checked.found.paths[str(place)]
        assert (memory.key, memory.value, memory.grade) == ("memory", "tmpfs", "good")
        assert room.value == 4 << 20 and room.grade == "slow" and "64.0 MiB are wanted" in room.text
        assert "--shm-size" in room.todo
        assert not any(place.iterdir()), "a look changes nothing"


def test_a_disk_is_no_memory(tmp_path: Path) -> None:
    checked = inspect(config(tmp_path, f'path = "{tmp_path}"\ncapacity = "64MiB"'))
    assert checked.found is not None and not checked.good
    [memory] = checked.found.paths[str(tmp_path)]
    assert memory.grade == "bad" and "not in memory" in memory.text


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({}, 0),
        ({"LOCAL_RANK": "3", "SLURM_LOCALID": "1"}, 3),
        ({"SLURM_LOCALID": "2"}, 2),
        ({"LOCAL_RANK": "x", "OMPI_COMM_WORLD_LOCAL_RANK": "5"}, 5),
    ],
)
def test_which_rank_of_its_node_a_process_is(environ: dict[str, str], rank: int) -> None:
    assert local_rank(environ) == rank
