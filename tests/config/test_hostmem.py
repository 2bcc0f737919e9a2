"""Memory limits read from made-up trees of cgroups."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from stepwell.hostmem import (
    BYTES_MIN,
    cgroup_limit_bytes,
    free_memory_bytes,
    host_budget_bytes,
    local_ranks,
    world_ranks,
)

GIB = 1 << 30
MACHINE = 512 * GIB
V1_UNLIMITED = 9223372036854771712


class Tree:
    """A made-up /proc/self/cgroup and /sys/fs/cgroup."""

    def __init__(self, folder: Path, lines: str) -> None:
        self.root, self.proc = folder / "cgroup", folder / "proc"
        self.root.mkdir()
        self.proc.write_text(lines)

    def put(self, group: str, **files: object) -> None:
        folder = self.root / group
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (folder / f"memory.{name}").write_text(f"{value}\n")

    def limit(self) -> int:
        return cgroup_limit_bytes(self.root, self.proc, MACHINE)

    def free(self, available: int = 100 * GIB) -> int:
        return free_memory_bytes(self.root, self.proc, available)


def test_v2_the_tightest_ancestor_counts(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/slurm/job7/step0\n")
    tree.put("slurm", max="max")
    tree.put("slurm/job7", max=64 * GIB)
    tree.put("slurm/job7/step0", max="max")
    assert tree.limit() == 64 * GIB
    tree.put("slurm/job7/step0", max=16 * GIB)
    assert tree.limit() == 16 * GIB


def test_v2_high_throttles_and_so_is_a_limit(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/job\n")
    tree.put("job", max=64 * GIB, high=48 * GIB)
    assert tree.limit() == 48 * GIB


def test_v2_max_is_the_machine(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/user.slice\n")
    tree.put("user.slice", max="max", high="max")
    assert tree.limit() == MACHINE
    tree.put("user.slice", max=2 * MACHINE)
    assert tree.limit() == MACHINE


def test_v2_inside_a_container(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/\n")
    tree.put(".", max=8 * GIB)
    assert tree.limit() == 8 * GIB


@pytest.mark.parametrize("path", ["/../../outside/job", "/docker/0123abcd/gone"])
def test_a_path_that_is_not_there_falls_back_to_the_root(tmp_path: Path, path: str) -> None:
    tree = Tree(tmp_path, f"0::{path}\n")
    tree.put(".", max=8 * GIB)
    tree.put("..", max=GIB)  # beside the tree, not in it
    assert tree.limit() == 8 * GIB


def test_v1_memory_controller_and_its_ancestors(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "12:cpu,cpuacct:/slurm\n9:memory:/slurm/uid_1/job_7\n1:name=systemd:/x\n0::/y\n")
    tree.put("memory", limit_in_bytes=V1_UNLIMITED)
    tree.put("memory/slurm/uid_1", limit_in_bytes=32 * GIB)
    tree.put("memory/slurm/uid_1/job_7", limit_in_bytes=V1_UNLIMITED)
    tree.put("cpu/slurm", limit_in_bytes=GIB)  # another controller's tree says nothing
    assert tree.limit() == 32 * GIB


def test_v1_without_a_limit_is_the_machine(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "9:memory:/\n")
    tree.put("memory", limit_in_bytes=V1_UNLIMITED)
    assert tree.limit() == MACHINE


@pytest.mark.parametrize("lines", ["", "nonsense\n", "0::/job\n", "9:cpu:/job\n", "1:memory\n"])
def test_without_groups_it_is_the_machine(tmp_path: Path, lines: str) -> None:
    assert Tree(tmp_path, lines).limit() == MACHINE


def test_without_proc_or_with_unreadable_numbers_it_is_the_machine(tmp_path: Path) -> None:
    assert cgroup_limit_bytes(tmp_path, tmp_path / "none", MACHINE) == MACHINE
    tree = Tree(tmp_path, "0::/job\n")
    tree.put("job", max="plenty", high="")
    assert tree.limit() == MACHINE


def test_free_is_what_the_fullest_group_leaves_and_page_cache_counts_as_free(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/job/step\n")
    tree.put("job", max=64 * GIB, current=60 * GIB, stat=f"anon 1\ninactive_file {20 * GIB}\nactive_file 5")
    tree.put("job/step", max="max", current=60 * GIB)
    assert tree.free() == 24 * GIB
    assert tree.free(available=3 * GIB) == 3 * GIB
    tree.put("job/step", max=50 * GIB, current=51 * GIB)
    assert tree.free() == 0


def test_free_under_v1(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "9:memory:/job\n")
    tree.put("memory/job", limit_in_bytes=8 * GIB, usage_in_bytes=7 * GIB, stat=f"total_inactive_file {2 * GIB}")
    assert tree.free() == 3 * GIB


def test_this_machine_has_numbers_that_make_sense() -> None:
    assert 0 < cgroup_limit_bytes() <= psutil.virtual_memory().total
    assert 0 < free_memory_bytes() <= psutil.virtual_memory().total
    assert 0 < host_budget_bytes(1 << 20) <= 2 << 20


@pytest.mark.parametrize(
    ("state", "ranks", "limit", "free", "budget"),
    [
        (GIB, 1, 64 * GIB, 60 * GIB, 2 * GIB),  # twice the state
        (100 * GIB, 1, 64 * GIB, 60 * GIB, 16 * GIB),  # a quarter of the limit
        (100 * GIB, 1, 64 * GIB, 20 * GIB, 10 * GIB),  # half of what is free
        (100 * GIB, 4, 64 * GIB, 60 * GIB, 4 * GIB),  # shared by the local ranks
        (100 * GIB, 4, 64 * GIB, 8 * GIB, GIB),  # so is what is free
        (100 * GIB, 8, GIB, 0, BYTES_MIN),  # never too small to stream through
        (1000, 8, GIB, 0, 2000),  # nor larger than a small state needs
    ],
)
def test_budget(state: int, ranks: int, limit: int, free: int, budget: int) -> None:
    assert host_budget_bytes(state, ranks, limit_bytes=lambda: limit, free_bytes=lambda: free) == budget


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8", "SLURM_NTASKS_PER_NODE": "1"}, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x16)"}, 2),
        ({"SLURM_NTASKS_PER_NODE": "6"}, 6),
        ({"LOCAL_WORLD_SIZE": "", "SLURM_NTASKS_PER_NODE": "6"}, 6),
        ({"LOCAL_WORLD_SIZE": "many"}, 1),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
    ],
)
def test_local_ranks(environ: dict[str, str], ranks: int) -> None:
    assert local_ranks(environ) == ranks


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({}, 1),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "SLURM_NTASKS": "2"}, 16),
        ({"SLURM_NTASKS": "64", "SLURM_STEP_NUM_TASKS": "32"}, 32),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, 4),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),  # there are at least those of this node
        ({"WORLD_SIZE": "none"}, 1),
    ],
)
def test_world_ranks(environ: dict[str, str], ranks: int) -> None:
    assert world_ranks(environ) == ranks
