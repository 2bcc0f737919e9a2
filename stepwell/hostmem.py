"""How much host memory a process may take: what its cgroup allows, what is free, and its share of both.

Groups are nested and any of them may be the tightest, so the limits of all ancestors count. Version 2 is one
tree; of version 1 only the memory controller's tree is read. Where a container shows its own group as the
root, the paths in /proc/self/cgroup may name folders that are not there: their ancestors are looked at all the same.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")
PROC_CGROUP = Path("/proc/self/cgroup")

#: of the job's cgroup; the rest is for the training itself
LIMIT_SHARE = 0.25
#: of what is free; the page cache and the data loaders need the other half
FREE_SHARE = 0.5
#: of the state: the checkpoint being saved and the one before it, still on its way down
STATES_HELD = 2
#: below this an arena is too small to stream through at full speed, so no cap goes further down
BYTES_MIN = 64 << 20

#: how launchers tell the number of ranks on this node; the first that is set counts. torchrun's comes first: it is
#: often started once a node, by a scheduler that then counts one task
_LOCAL_RANKS = (
    "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_NTASKS_PER_NODE",
)  # fmt: skip
#: which of them a process is
_LOCAL_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
#: the number of ranks on all nodes together
_WORLD_RANKS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")


def host_budget_bytes(
    state_bytes: int,
    local_ranks: int = 1,
    *,
    limit_bytes: Callable[[], int] | None = None,
    free_bytes: Callable[[], int] | None = None,
) -> int:
    """The host memory that one rank may use when nobody said: at most 2 x its state, capped at its share of
    25 % of the cgroup's limit and of half of what is free. Larger states go in waves.

    limit_bytes, free_bytes: of the node; default `cgroup_limit_bytes` and `free_memory_bytes`.
    """
    limit = (limit_bytes or cgroup_limit_bytes)()
    free = (free_bytes or free_memory_bytes)()
    cap = min(int(limit * LIMIT_SHARE), int(free * FREE_SHARE)) // max(1, local_ranks)
    return min(STATES_HELD * state_bytes, max(cap, BYTES_MIN))


def cgroup_limit_bytes(root: Path = CGROUP_ROOT, proc: Path = PROC_CGROUP, physical_bytes: int | None = None) -> int:
    """The memory that this process's cgroups allow; the machine's, if they allow more or there are none."""
    physical = psutil.virtual_memory().total if physical_bytes is None else physical_bytes
    limits = [
        limit
        for folder, v2 in _groups(root, proc)
        for name in (("memory.max", "memory.high") if v2 else ("memory.limit_in_bytes",))
        if (limit := _number(folder / name)) is not None
    ]
    return min([physical, *(limit for limit in limits if limit > 0)])


def free_memory_bytes(root: Path = CGROUP_ROOT, proc: Path = PROC_CGROUP, available_bytes: int | None = None) -> int:
    """What could be allocated now: the machine's available memory, or less where a cgroup is fuller.

    A group's page cache that can be given back counts as free.
    """
    free = psutil.virtual_memory().available if available_bytes is None else available_bytes
    for folder, v2 in _groups(root, proc):
        limit = _number(folder / ("memory.max" if v2 else "memory.limit_in_bytes"))
        used = _number(folder / ("memory.current" if v2 else "memory.usage_in_bytes"))
        if limit is not None and used is not None:
            cache = _stat(folder / "memory.stat", "inactive_file" if v2 else "total_inactive_file")
            free = min(free, limit - (used - min(cache, used)))
    return max(0, free)


def local_ranks(environ: Mapping[str, str] | None = None) -> int:
    """How many ranks of the job share this node, as its launcher says; 1 if it says nothing."""
    return _told(_LOCAL_RANKS, environ)


def local_rank(environ: Mapping[str, str] | None = None) -> int:
    """Which of the node's ranks this process is, as its launcher says; 0 if it says nothing."""
    environ = os.environ if environ is None else environ
    told = (environ.get(name, "") for name in _LOCAL_RANK)
    return next((int(number) for number in told if number.isdecimal()), 0)


def world_ranks(environ: Mapping[str, str] | None = None) -> int:
    """How many ranks the job has, as its launcher says; at least those of this node."""
    return max(_told(_WORLD_RANKS, environ), local_ranks(environ))


def _told(names: Sequence[str], environ: Mapping[str, str] | None) -> int:
    environ = os.environ if environ is None else environ
    for name in names:
        # SLURM writes "4", or "4(x2),3" for nodes of several kinds: the fullest one is the careful answer
        counts = [int(number) for number in re.findall(r"(?<![x\d])\d+", environ.get(name, ""))]
        if counts and max(counts) > 0:
            return max(counts)
    return 1


def _groups(root: Path, proc: Path) -> Iterator[tuple[Path, bool]]:
    """(folder, is version 2) of this process's memory cgroups and all their ancestors that are there."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        v2 = number == "0" and not controllers
        if not v2 and "memory" not in controllers.split(","):
            continue
        base = root if v2 else root / "memory"
        inside = PurePosixPath(*(part for part in PurePosixPath(path).parts if part not in ("/", "..")))
        for part in (inside, *inside.parents):
            if (base / part).is_dir():
                yield base / part, v2


def _number(path: Path) -> int | None:
    """None for "max" and for a file that is not there or not readable."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _stat(path: Path, key: str) -> int:
    try:
        rows = (line.split() for line in path.read_text().splitlines())
        return next((int(row[1]) for row in rows if row[:1] == [key]), 0)
    except (OSError, ValueError, IndexError):
        return 0
