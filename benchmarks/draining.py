"""Does a drain to a slow parallel file system slow down the saves in front of it?

    python -m benchmarks.draining --dir SCRATCH        (needs fio and root)

Saves go through host memory to a file tier, and are timed until they are durable there: without any other tier, and
while a PFS that takes 200 MB/s drains what was saved before. The PFS stands in as a folder (a) on a tmpfs and (b) on
the file tier's own disk. Rounds of without, (a), without, (b), without, in turn; a figure is the speed while draining,
divided by the mean of the two without around it. The same round measures the disk's ceiling with fio.

Bars: (a) 0.95; (b) 0.95 x (1 - 0.2 GB/s / ceiling), since the drain takes its share of the disk.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import stepwell
from benchmarks import fio, report
from benchmarks.ceiling import choose
from stepwell.policies.base import Policy
from stepwell.policies.evict import LRU
from stepwell.policies.flush import FlushRule
from stepwell.policies.retain import Retain
from stepwell.settings import Settings, TierOptions
from stepwell.store import CheckpointStore
from stepwell.tiers.base import Tier
from stepwell.tiers.file import FileTier
from stepwell.tiers.host import HostTier
from stepwell.tiers.pfs import PfsTier

BAR = 0.95
#: the longest that a drain may take to begin, or to end after a measurement
DRAIN_S = 300.0
Record = dict[str, Any]


@contextmanager
def opened(nvme: Path, pfs: Path | None, size: int, rate: float) -> Iterator[stepwell.CheckpointStore]:
    """A store of a new run, whose host memory is warm; the newest two checkpoints stay on the disk, one on the PFS."""
    nvme.mkdir()
    tiers: list[Tier] = [HostTier(LRU(), 3 * size), FileTier(nvme, name="nvme")]
    policies: list[Policy] = [Retain("nvme", last=2)]
    if pfs is not None:
        pfs.mkdir()
        tiers.append(PfsTier(pfs, write_bytes_per_s=rate, delete_pause_s=0))
        policies += [FlushRule("pfs", newest_wins=True), Retain("pfs", last=1)]
    options = {"pfs": TierOptions(delete_grace_s=0)}  # a stand-in on a tmpfs must not fill the memory
    try:
        with CheckpointStore("run", tiers, "w", Settings(), policies, options=options) as store:
            yield store
    finally:
        for folder in filter(None, (nvme, pfs)):
            shutil.rmtree(folder, ignore_errors=True)


def drained_bytes(store: stepwell.CheckpointStore) -> int:
    return sum(edge.moved_bytes for edge in store.status().edges if edge.target == "pfs")


def wait_until(what: Callable[[], bool]) -> None:
    """Raises RuntimeError if it is not so in time."""
    deadline = time.monotonic() + DRAIN_S
    while not what():
        if time.monotonic() > deadline:
            raise RuntimeError("the drain neither begins nor ends: is the disk stuck?")
        time.sleep(0.01)


def measure(nvme: Path, pfs: Path | None, state: dict[str, Any], size: int, saves: int, rate: float) -> Record:
    """GB/s of `saves` saves, one after the other, each until it is durable on the file tier.

    With `pfs` a drain is under way all the time: each save adds what takes longer to drain than to save.
    """
    with opened(nvme, pfs, size, rate) as store:
        for step in (1, 2):  # the first ones make memory and plans ready
            store.save(step, state).wait("nvme")
        if pfs is not None:
            wait_until(lambda: drained_bytes(store) > 0)  # what little there was to drain may have gone by now
        speeds, busy = [], True
        began, moved = time.perf_counter(), drained_bytes(store)
        for step in range(3, 3 + saves):
            start = time.perf_counter()
            store.save(step, state).wait("nvme")
            speeds.append(size / (time.perf_counter() - start) / fio.GB)
            busy = busy and (pfs is None or bool(store.status().tier("pfs").backlog))
        seconds = time.perf_counter() - began
        drain_gb_s = (drained_bytes(store) - moved) / seconds / fio.GB
    return {"gb_s": statistics.median(speeds), "saves_gb_s": speeds, "drain_gb_s": drain_gb_s, "busy": busy}


def one_round(args: argparse.Namespace, home: Path, setting: fio.Setting, state: dict[str, Any]) -> Record:
    """Without, (a), without, (b), without; and fio."""
    size, rate, disk = args.mib << 20, args.rate * 1e6, home / "fio"
    disk.mkdir(exist_ok=True)

    def run(pfs: Path | None) -> Record:
        fio.drop_caches()
        return measure(home / "nvme", pfs, state, size, args.saves, rate)

    ceiling = fio.run(setting, "write", disk, size)["gb_s"]
    with tempfile.TemporaryDirectory(prefix="draining-", dir=args.tmpfs) as memory:
        without = [run(None)]
        behind = {}
        for name, folder in (("tmpfs", Path(memory)), ("disk", home)):
            pfs = folder / f"pfs-{uuid.uuid4().hex[:8]}"  # one that was seen full and is empty looks unmounted
            behind[name] = run(pfs)
            without.append(run(None))
    ratios = {
        name: behind[name]["gb_s"] / statistics.mean(one["gb_s"] for one in around)
        for name, around in (("tmpfs", without[:2]), ("disk", without[1:]))
    }
    return {"ceiling_gb_s": ceiling, "without": without, **behind, "ratio": ratios}


def table(records: list[Record], rate: float) -> str:
    """Medians over the rounds, against the bars."""
    ceiling = statistics.median(one["ceiling_gb_s"] for one in records)
    bars = {"tmpfs": BAR, "disk": BAR * max(0.0, 1 - rate / fio.GB / ceiling)}
    out = [report.machine(), "", "| PFS on | GB/s without | GB/s while it drains | ratio | bar | drain GB/s |"]
    out.append("| --- " * 6 + "|")
    for place, bar in bars.items():
        row = [
            place,
            report.spread([run["gb_s"] for one in records for run in one["without"]]),
            report.spread([one[place]["gb_s"] for one in records]),
            report.spread([one["ratio"][place] for one in records], 3),
            f"{bar:.3f}",
            report.spread([one[place]["drain_gb_s"] for one in records]),
        ]
        out.append(f"| {' | '.join(row)} |")
    idle = sum(not one[place]["busy"] for one in records for place in bars)
    out += ["", f"fio: {report.spread([one['ceiling_gb_s'] for one in records])} GB/s; {len(records)} rounds"]
    if idle:
        out.append(f"in {idle} runs the drain had ended before the last save: take a larger --mib, or fewer --saves")
    return "\n".join(out)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parse = argparse.ArgumentParser("python -m benchmarks.draining", description=__doc__)
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parse.add_argument
    add("--dir", type=Path, default=Path("build/bench"), help="scratch folder on the disk to measure (build/bench)")
    add("--tmpfs", type=Path, default=Path("/dev/shm"), help="where (a) stands in for a PFS (/dev/shm)")
    add("--out", type=report.lines_file, help="also append the JSON lines there")
    add("--mib", type=int, default=1024, help="bytes of the state (1024 MiB)")
    add("--saves", type=int, default=6, help="timed saves a run (6)")
    add("--rounds", type=int, default=9)
    add("--rate", type=float, default=200, help="what the PFS takes, in MB/s (200)")
    add("--pilots", type=int, default=5, help="pilot rounds to choose the fio setting (5)")
    add("--settings", type=int, help="try only so many fio settings")
    return parse.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    if not fio.available():
        print("needs fio (`make bench` installs it)", file=sys.stderr)
        return 2
    args.dir.mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix="draining-", dir=args.dir)).resolve()
    state = {"model": {"weight": torch.randint(0, 255, ((args.mib << 20) - 4096,), dtype=torch.uint8)}}
    records: list[Record] = []
    try:
        choice = choose("write", home, args.mib << 20, args.pilots, args.settings)
        setting = fio.Setting(**choice["setting"])
        for number in range(1, args.rounds + 1):
            records.append({"round": number, "setting": str(setting), **one_round(args, home, setting, state)})
            line = json.dumps(records[-1])
            print(line, flush=True)
            if args.out:
                with args.out.open("a") as out:
                    out.write(line + "\n")
    finally:
        shutil.rmtree(home, ignore_errors=True)
    print(table(records, args.rate * 1e6))
    return 0


if __name__ == "__main__":
    sys.exit(main())
