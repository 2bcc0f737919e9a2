"""Restore after kill -9: from shared host memory, against what the disk can be read at.

    python -m benchmarks.warm --dir FOLDER [--gib 2] [--rounds 5]

In each round a process saves a state, is killed by kill -9, and a new one restores the newest step into tensors that
are there already, from memory alone; before and after it fio reads as many bytes from the disk, past the page cache, by
the fastest of its settings. The figure is the restore's GB/s over the mean of fio's. `open_s` is what opening the store
took, adoption of the memory included; it is not in the figure. A JSON line for each round, then a table. Needs root.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import fio
from benchmarks.report import machine
from stepwell.tiers import _shm

ROOT = Path(__file__).resolve().parents[1]
TENSORS = 16

_PROCESS = """
import json, os, signal, sys, time
import torch, stepwell

config, what, rows, tensors = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
value = torch.arange(rows, dtype=torch.float32).repeat_interleave(1024).reshape(rows, 1024)
if what == "save":
    state = {"model": {f"w{i}": value + i for i in range(tensors)}}
    store = stepwell.open(config, run="run")
    found = store.latest()
    store.save(found.step + 1 if found else 1, state).wait("host")
    os.kill(os.getpid(), signal.SIGKILL)
state = {"model": {f"w{i}": torch.ones(rows, 1024) for i in range(tensors)}}
began = time.monotonic()
store = stepwell.open(config, run="run")
opened = time.monotonic()
found = store.restore(state)
restored = time.monotonic()
good = all(torch.equal(tensor, value + i) for i, tensor in enumerate(state["model"].values()))
told = {"open_s": opened - began, "restore_s": restored - opened, "sources": dict(found.sources), "good": good}
print(json.dumps(told))
sys.stdout.flush()
os.kill(os.getpid(), signal.SIGKILL)  # the next round restores what that one saves
"""

_CONFIG = """
[[tier]]
name = "host"
driver = "host"
capacity = {capacity}
shared = true
path = "{memory}"

[[tier]]
name = "disk"
driver = "file"
path = "{disk}"
retain = {{ last = 1 }}
"""


def process(config: Path, what: str, rows: int) -> dict[str, Any]:
    """What a process of its own tells before it kills itself."""
    done = subprocess.run(
        [sys.executable, "-c", _PROCESS, config, what, str(rows), str(TENSORS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if what == "save":
        assert done.returncode == -9, done.stderr
        return {}
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def measure(config: Path, rows: int, read_disk: fio.Setting, folder: Path) -> dict[str, Any]:
    """One round."""
    size = rows * 1024 * 4 * TENSORS
    fio.make_file(folder, size)
    before = fio.run(read_disk, "read", folder, size)["gb_s"]
    process(config, "save", rows)
    told = process(config, "restore", rows)
    after = fio.run(read_disk, "read", folder, size)["gb_s"]
    fio.clear(folder)
    if not told["good"] or set(told["sources"]) != {"host"}:
        raise RuntimeError(f"not the right bytes from memory: {told}")
    speed = size / told["restore_s"] / fio.GB
    return {
        "bytes": size, "gb_s": speed, "disk_gb_s": [before, after], "ratio": speed / statistics.mean([before, after]),
        "open_s": told["open_s"], "restore_s": told["restore_s"],
    }  # fmt: skip


def fastest(folder: Path, size: int) -> fio.Setting:
    fio.make_file(folder, size)
    speeds = {setting: fio.run(setting, "read", folder, size)["gb_s"] for setting in fio.READ_SETTINGS}
    return max(speeds, key=lambda setting: speeds[setting])


def table(records: Sequence[dict[str, Any]]) -> str:
    rows = ["| restore GB/s | disk GB/s | ratio | open s |", "| --- | --- | --- | --- |"]
    for each in records:
        disk = statistics.mean(each["disk_gb_s"])
        rows.append(f"| {each['gb_s']:.2f} | {disk:.2f} | {each['ratio']:.2f} | {each['open_s']:.3f} |")
    return "\n".join(rows)


def run(scratch: Path, size: int, rounds: int) -> list[dict[str, Any]]:
    """All rounds, on a disk's folder; prints each."""
    disk, pilot = scratch / "disk", scratch / "fio"
    for folder in (disk, pilot):
        folder.mkdir()
    memory = Path(tempfile.mkdtemp(dir=_shm.ROOT, prefix="stepwell-bench-"))
    config, rows = scratch / "config.toml", size // (1024 * 4 * TENSORS)
    config.write_text(_CONFIG.format(capacity=3 * size + (256 << 20), memory=memory, disk=disk))
    records = []
    try:
        setting = fastest(pilot, size)
        for number in range(1, rounds + 1):
            record = {"round": number, "setting": str(setting), **measure(config, rows, setting, pilot)}
            records.append(record)
            print(json.dumps(record), flush=True)
    finally:
        shutil.rmtree(memory)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True, type=Path, help="a folder on the disk that is measured")
    parser.add_argument("--gib", type=float, default=2.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="warm.") as scratch:
        records = run(Path(scratch), int(args.gib * (1 << 30)), args.rounds)
    print(f"{machine()}\n\n{table(records)}\n\nmedian ratio {statistics.median(r['ratio'] for r in records):.2f}")


if __name__ == "__main__":
    main()
