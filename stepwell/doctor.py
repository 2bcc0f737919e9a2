"""What this machine offers, what stepwell makes of it, and why. Imports no torch and makes no CUDA context."""

from __future__ import annotations

import errno
import os
import platform
import resource
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from stepwell import native
from stepwell.config import find_config, load_config
from stepwell.errors import StepwellError
from stepwell.hostmem import cgroup_limit_bytes, free_memory_bytes, host_budget_bytes, local_ranks
from stepwell.native import Job, Op
from stepwell.places import is_run, run_whole
from stepwell.runtime import Runtime
from stepwell.tiers._probe import ALIGNMENT_BYTES, direct_alignment, probe_path
from stepwell.tiers.file import FileTier
from stepwell.units import format_bytes

Grade = Literal["good", "slow", "bad", "plain"]

#: more than any state has: what is left of the host tier's size is its cap
_HUGE_BYTES = 1 << 62
#: a reader opens the files of a whole checkpoint; one of a thousand ranks has as many
_FILES_MIN = 4096
#: the file that fallocate is tried on
_TRIED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `key` is stable, `value` is for programs, `text` for people."""

    key: str
    value: str | int | bool | None
    text: str
    grade: Grade = "plain"  # good; slow: it works, with less speed; bad: it does not work; plain: just so
    todo: str = ""


@dataclass(slots=True)
class Diagnosis:
    """Findings about the machine, and about each path."""

    machine: list[Finding] = field(default_factory=list)
    paths: dict[str, list[Finding]] = field(default_factory=dict)


def examine(paths: list[Path]) -> Diagnosis:
    """Looks at the machine and, by really writing and reading a small file there, at each path."""
    machine = [find() for find in _MACHINE]
    return Diagnosis(machine, {str(path): _path(path.expanduser().absolute()) for path in paths})


# -- the machine -------------------------------------------------------------------------


def _kernel() -> Finding:
    release = platform.release()
    return Finding("kernel", release, f"{platform.system()} {release}, {platform.machine()}")


def _io_uring() -> Finding:
    works, reason = native.probe_uring()
    if works:
        return Finding("io_uring", True, f"used: {reason}", "good")
    return Finding("io_uring", False, f"threads are used instead: {reason}", "slow", "Allow io_uring for this process")


def _checksum() -> Finding:
    name = native.features()["crc32c"]
    return Finding("crc32c", name, f"{name} is the fastest version on this processor", "good")


def _memlock() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("memlock_bytes", None, "no limit", "good")
    text = f"{format_bytes(soft)} may be locked; enough, as stepwell's buffers are not registered with io_uring"
    return Finding("memlock_bytes", soft, text, "good")


def _huge_pages() -> Finding:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return Finding("huge_pages", None, "this kernel has no transparent huge pages", "slow")
    mode = text.partition("[")[2].partition("]")[0]
    if mode == "never":
        todo = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        return Finding("huge_pages", mode, "never: host memory is in small pages", "slow", todo)
    return Finding("huge_pages", mode, f"{mode}: host memory asks for them", "good")


def _memory_limit() -> Finding:
    limit = cgroup_limit_bytes()
    return Finding("memory_limit_bytes", limit, f"{format_bytes(limit)} for this process and its group")


def _memory_free() -> Finding:
    free = free_memory_bytes()
    return Finding("memory_free_bytes", free, f"{format_bytes(free)} could be taken now")


def _host_tier() -> Finding:
    ranks = local_ranks()
    cap = host_budget_bytes(_HUGE_BYTES, ranks)
    who = f", for each of {ranks} local ranks" if ranks > 1 else ""
    text = (
        f"at most {format_bytes(cap)}{who}: 2 x the state, up to the smaller of 25 % of the limit and half of what is "
        "free; larger states go in waves"
    )
    return Finding("host_tier_bytes", cap, text)


def _gpus() -> Finding:
    names = []
    for information in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        try:
            rows = dict(line.split(":", 1) for line in information.read_text().splitlines() if ":" in line)
        except OSError:
            continue
        names.append(rows.get("Model", "GPU").strip())
    nodes = len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()])
    count = len(names) or nodes
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    text = f"{count}: {', '.join(sorted(set(names))) or 'names unknown'}" if count else "none"
    if count and hidden is not None:
        text += f"; CUDA_VISIBLE_DEVICES={hidden!r}"
    return Finding("cuda_devices", count, text)


def _gpu_copies() -> Finding:
    if not _gpus().value:
        return Finding("gpu_copies", None, "there is no GPU")
    works, reason = native.probe_device()
    if not works:
        return Finding("gpu_copies", "none", f"GPUs cannot be used: {reason}", "bad", "Mend CUDA's driver (nvidia-smi)")
    if find_spec("cupy") is None:
        text = f"by an engine of our own: {reason}; small tensors one by one, as CuPy is not installed"
        return Finding("gpu_copies", "one by one", text, "slow", "pip install cupy-cuda13x, or as your CUDA is")
    return Finding("gpu_copies", "gathered", f"by an engine of our own, small tensors gathered: {reason}", "good")


def _torch() -> Finding:
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return Finding("torch", None, "not installed", "bad", "pip install torch")
    return Finding("torch", version, version)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return Finding("open_files", None, "no limit", "good")
    if soft >= _FILES_MIN:
        return Finding("open_files", soft, f"{soft} may be open at once", "good")
    text = f"{soft} may be open at once: checkpoints with more shards are opened piece by piece"
    return Finding("open_files", soft, text, "slow", f"ulimit -n {min(_FILES_MIN, hard) if hard > 0 else _FILES_MIN}")


def _config() -> Finding:
    try:
        path = find_config()
        if path is None:
            text = "none: neither STEPWELL_CONFIG nor /etc/stepwell.toml; runs are opened by their folders"
            return Finding("config", None, text)
        tiers = ", ".join(f"{tier.name} ({tier.driver})" for tier in load_config(path).tiers)
        return Finding("config", str(path), f"{path}: {tiers}", "good")
    except StepwellError as error:
        return Finding("config", str(error.where.get("file", "")), str(error), "bad", error.todo)


_MACHINE: tuple[Callable[[], Finding], ...] = (
    _kernel, _io_uring, _checksum, _torch, _gpus, _gpu_copies, _memory_limit, _memory_free, _host_tier, _huge_pages,
    _memlock, _open_files, _config,
)  # fmt: skip


# -- a path ------------------------------------------------------------------------------


def _path(path: Path) -> list[Finding]:
    try:
        return _looked_at(path)
    except OSError as error:
        where = os.fsdecode(error.filename or path)
        todo = "Let this user enter and read the folder and those above it, or name another one"
        return [Finding("usable", False, f"{error.strerror or error} (path {where})", "bad", todo)]


def _looked_at(path: Path) -> list[Finding]:
    """A run's folder is opened by its parent, so that is what is looked at."""
    root = path.parent if is_run(path) else path
    if not root.is_dir():
        what = "it is a file" if root.exists() else "there is no such folder"
        return [Finding("exists", False, what, "bad", "Name a folder that is there")]
    stat = os.statvfs(root)
    free, total = stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize
    space = Finding("free_bytes", free, f"{format_bytes(free)} of {format_bytes(total)} on {_file_system(root)}")
    try:
        return [space, *run_whole(_tried(root))]
    except StepwellError as error:
        return [space, Finding("usable", False, str(error), "bad", error.todo)]


async def _tried(root: Path) -> list[Finding]:
    tier = FileTier(root, name="doctor")
    await tier.start()
    try:
        info = tier.info
    finally:
        await tier.close()
    detail, writable = info.detail, not info.read_only
    direct, reading = detail.get("writing") == "direct", detail.get("reading", "?")
    found = [
        Finding("writable", writable, "yes" if writable else detail["access"], "good" if writable else "bad"),
        Finding("direct_io", direct, detail["access"], "good" if direct else "slow"),
        Finding("engine", detail["engine"].split(":")[0], detail["engine"]),
        Finding("reading", reading.split(":")[0], f"{reading}; the faster way is taken"),
    ]
    if writable:
        found += await _file_tried(root)
    return found


async def _file_tried(root: Path) -> list[Finding]:
    path = probe_path(str(root))
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return [Finding("fallocate", False, f"not tried: {error.strerror}")]
    try:
        asked = direct_alignment(descriptor)
        [done] = await Runtime.get().copier.run([Job(Op.FALLOCATE, fd=descriptor, offset=0, length=_TRIED_BYTES)])
    finally:
        os.close(descriptor)
        os.unlink(path)
    says = f"the file system asks for {asked}" if asked else "the file system does not say what it asks for"
    alignment = Finding("alignment_bytes", ALIGNMENT_BYTES, f"{ALIGNMENT_BYTES} bytes are used; {says}")
    if done.result == 0:
        return [alignment, Finding("fallocate", True, "room is promised before a shard is written", "good")]
    name = errno.errorcode.get(-done.result, str(-done.result))
    text = f"{name}: room is not promised, a full disk shows only while writing"
    return [alignment, Finding("fallocate", False, text, "slow")]


def _file_system(path: Path) -> str:
    """Type and source of the file system that holds a path, from the longest mount point above it."""
    try:
        rows = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return "an unknown file system"
    real = os.path.realpath(path)
    best, said = "", "an unknown file system"
    for row in rows:
        if len(row) < 3:
            continue
        point = row[1].replace("\\040", " ")
        if len(point) >= len(best) and (real == point or real.startswith(point.rstrip("/") + "/")):
            best, said = point, f"{row[2]} ({point})"
    return said
