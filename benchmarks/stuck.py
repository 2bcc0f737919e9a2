"""A parallel file system whose server stops: do saves to the NVMe tier feel it?

    python -m benchmarks.stuck --dir SCRATCH        (needs root, /dev/fuse and bindfs)

The PFS stands in as a FUSE mount (bindfs) of another folder of the same disk. Saves go through host memory and a
file tier, and are flushed to that mount: some with the PFS at work, as many while its server is stopped (SIGSTOP),
and as many after it went on. Then it is stopped again and the store is closed, which must end within its limit.
What is compared is the time until a save is durable on the file tier: stopped, against the mean of before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import stepwell
from benchmarks import report
from stepwell.policies.base import Policy
from stepwell.policies.evict import LRU
from stepwell.policies.flush import FlushNewest, FlushRule
from stepwell.policies.retain import Retain
from stepwell.tiers.file import FileTier
from stepwell.tiers.host import HostTier
from stepwell.tiers.pfs import PfsTier


def available() -> bool:
    return shutil.which("bindfs") is not None and os.path.exists("/dev/fuse") and os.geteuid() == 0


@contextmanager
def mounted(folder: Path) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """A folder seen through a FUSE server, and the server's process."""
    behind, mount = folder / "behind", folder / "pfs"
    behind.mkdir()
    mount.mkdir()
    server = subprocess.Popen(["bindfs", "-f", str(behind), str(mount)])
    try:
        while not os.path.ismount(mount):
            if server.poll() is not None:
                raise RuntimeError("bindfs did not start")
            time.sleep(0.02)
        yield mount, server
    finally:
        server.send_signal(signal.SIGCONT)
        subprocess.run(["umount", "-l", str(mount)], check=False)
        server.kill()
        server.wait()


def timed_saves(
    store: stepwell.CheckpointStore, state: dict[str, object], first: int, count: int, every_s: float
) -> list[float]:
    """Seconds until each save is durable on the file tier; a save each `every_s`."""
    seconds = []
    for step in range(first, first + count):
        began = time.perf_counter()
        save = store.save(step, state)
        save.wait("nvme", timeout=60)
        seconds.append(time.perf_counter() - began)
        time.sleep(max(0.0, every_s - seconds[-1]))
    return seconds


def measure(folder: Path, size: int, count: int, stopped_s: float, exit_timeout: float) -> dict[str, object]:
    state: dict[str, object] = {"model": {"weight": torch.randint(0, 255, (size,), dtype=torch.uint8)}}
    every_s = stopped_s / count
    (folder / "nvme").mkdir()
    with mounted(folder) as (mount, server):
        tiers = [HostTier(LRU(), 4 * size), FileTier(folder / "nvme", name="nvme"), PfsTier(mount, timeout_s=20)]
        policies: list[Policy] = [FlushRule("pfs"), FlushNewest("pfs"), Retain("pfs", last=3)]
        store = stepwell.open(run="run", tiers=tiers, policies=policies, exit_timeout=exit_timeout)
        timed_saves(store, state, 1, 3, every_s)
        before = timed_saves(store, state, 10, count, every_s)
        store.flush()
        server.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        during = timed_saves(store, state, 100, count, every_s)
        stopped = time.monotonic() - began
        health = store.status().tier("pfs").health
        server.send_signal(signal.SIGCONT)
        store.flush()
        after = timed_saves(store, state, 200, count, every_s)
        store.flush()
        server.send_signal(signal.SIGSTOP)
        timed_saves(store, state, 300, 1, every_s)
        began = time.monotonic()
        try:
            store.close()
            closing = "everything was flushed"
        except stepwell.StepwellError as error:
            closing = str(error)
        exit_s = time.monotonic() - began
    return {
        "saves": count,
        "before_s": statistics.median(before),
        "stopped_s": statistics.median(during),
        "after_s": statistics.median(after),
        "worst_s": max(during),
        "ratio": 2 * statistics.median(during) / (statistics.median(before) + statistics.median(after)),
        "stopped_for_s": stopped,
        "health": health,
        "exit_s": exit_s,
        "exit_timeout_s": exit_timeout,
        "closing": closing,
    }


def main(argv: list[str] | None = None) -> int:
    parse = argparse.ArgumentParser("python -m benchmarks.stuck", description=__doc__)
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    parse.add_argument("--dir", type=Path, default=Path("build/bench"), help="scratch folder (build/bench)")
    parse.add_argument("--mib", type=int, default=256, help="bytes of the state (256 MiB)")
    parse.add_argument("--saves", type=int, default=24, help="saves with and without (24)")
    parse.add_argument("--stopped", type=float, default=60, help="seconds the server is stopped (60)")
    parse.add_argument("--exit-timeout", type=float, default=20, help="what closing may take at most (20 s)")
    args = parse.parse_args(argv)
    if not available():
        print("needs root, /dev/fuse and bindfs (apt-get install bindfs)", file=sys.stderr)
        return 2
    args.dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="stuck-", dir=args.dir)).resolve()
    try:
        result = measure(folder, args.mib << 20, args.saves, args.stopped, args.exit_timeout)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(report.machine())
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
