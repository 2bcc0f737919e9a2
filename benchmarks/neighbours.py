"""Processes that load one model at the same time, with nothing of it in the page cache: what the disk is read for them.

    python -m benchmarks.neighbours --dir FOLDER [--gib 2] [--processes 2] [--rounds 3]

Each process opens the run with a shared host tier, waits until all are ready, and loads the model by `restore` or by
`stepwell.load`. One of them owns the shared memory, the others take from it what it has read. For comparison the same
number of processes loads with private memory. A JSON line for each round, then a table.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.report import machine

ROOT = Path(__file__).resolve().parents[1]
TENSORS = 16

_PROCESS = """
import json, sys, time
import torch, stepwell, stepwell.loading
from stepwell.tiers.shared import SharedHostTier

def read_bytes():
    return int(next(line for line in open("/proc/self/io") if line.startswith("read_bytes")).split()[1])

config, folder, way, rows, tensors = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
with stepwell.open(config, run="model", mode="r") as store:
    state = {"model": {f"w{i}": torch.zeros(rows, 1024) for i in range(tensors)}} if way == "restore" else {}
    host = store.tiers[0]
    print(json.dumps(isinstance(host, SharedHostTier) and host.owned), flush=True)
    sys.stdin.readline()
    before, began = read_bytes(), time.monotonic()
    if way == "restore":
        store.restore(state)
        model = state["model"]
    else:
        model = stepwell.load(f"{folder}/model@latest", part="model")
    seconds, read = time.monotonic() - began, read_bytes() - before
    good = all(bool((model[f"w{i}"] == torch.arange(rows)[:, None] + i).all()) for i in range(tensors))
    print(json.dumps({"seconds": seconds, "read_bytes": read, "good": good}), flush=True)
    sys.stdin.readline()
"""


def save_model(folder: Path, size_bytes: int) -> int:
    """A run with one checkpoint of tensors whose bytes are known; returns the rows of each."""
    import torch

    import stepwell

    rows = size_bytes // TENSORS // 4096
    model = {f"w{i}": (torch.arange(rows)[:, None] + i).float().repeat(1, 1024) for i in range(TENSORS)}
    with stepwell.open(folder / "model", host="1GiB") as store:
        store.save(1, {"model": model}).wait()
    return rows


def _drop_from_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def measure(folder: Path, way: str, rows: int, processes: int, *, shared: bool, memory: Path) -> dict[str, Any]:
    """One round: all load at once. Raises RuntimeError if a process fails or a byte is wrong."""
    size = rows * 4096 * TENSORS
    config = folder / "neighbours.toml"
    capacity = max(256 << 20, size * 5 // 4) if shared else 256 << 20
    host = f'[[tier]]\nname = "host"\ndriver = "host"\ncapacity = "{capacity}"\n'
    host += f'shared = true\npath = "{memory}"\n' if shared else ""
    config.write_text(host + f'[[tier]]\nname = "disk"\ndriver = "file"\npath = "{folder}"\n')
    command = [sys.executable, "-c", _PROCESS, config, folder, way, rows, TENSORS]
    started = [
        subprocess.Popen([str(part) for part in command], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(processes)
    ]
    try:
        owners = sum(_answer(each) for each in started)
        _drop_from_cache(folder)
        _tell(started)
        answers = [_answer(each) for each in started]
        _tell(started)
        if any(each.wait(60) for each in started) or not all(each["good"] for each in answers):
            raise RuntimeError(f"a process failed, or a byte is wrong: {answers}")
    finally:
        for each in started:
            each.kill()
            each.communicate()
    read = sum(each["read_bytes"] for each in answers)
    return {
        "way": way, "shared": shared, "processes": processes, "owners": owners, "model_bytes": size,
        "read_bytes": read, "ratio": read / size, "seconds": max(each["seconds"] for each in answers),
    }  # fmt: skip


def _answer(process: subprocess.Popen[bytes]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process ended with {process.wait()}")
    return json.loads(line)


def _tell(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for each in processes:
        assert each.stdin is not None
        with suppress(BrokenPipeError):
            each.stdin.write(b"\n")
            each.stdin.flush()


def table(records: Sequence[dict[str, Any]]) -> str:
    rows = ["| way | host memory | processes | read from the disk / model | seconds until all have it |"]
    rows.append("| --- | --- | --- | --- | --- |")
    for way, shared in dict.fromkeys((record["way"], record["shared"]) for record in records):
        of = [record for record in records if (record["way"], record["shared"]) == (way, shared)]
        ratios, seconds = [record["ratio"] for record in of], [record["seconds"] for record in of]
        rows.append(
            f"| {way} | {'shared' if shared else 'private'} | {of[0]['processes']} | "
            f"{statistics.median(ratios):.4f} (highest {max(ratios):.4f}) | "
            f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f}) |"
        )
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="a folder on the disk that is measured")
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="neighbours-", dir=options.dir))
    memory = Path(tempfile.mkdtemp(prefix="stepwell-bench-", dir="/dev/shm"))
    records = []
    try:
        rows = save_model(folder, int(options.gib * 2**30))
        for _ in range(options.rounds):
            for way in ("restore", "load"):
                for shared in (True, False):
                    record = measure(folder, way, rows, options.processes, shared=shared, memory=memory)
                    shutil.rmtree(memory)  # the next round begins with nothing in memory
                    memory.mkdir()
                    print(json.dumps(record), flush=True)
                    records.append(record)
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(memory)
    print(f"\n{machine()}\n\n{table(records)}")


if __name__ == "__main__":
    main()
