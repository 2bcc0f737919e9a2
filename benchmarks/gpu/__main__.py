"""Measures on a GPU what stepwell promises, prints it beside the bars, and writes it down.

    python -m benchmarks.gpu --dir SCRATCH --out gpu.jsonl [--only NAME…] [--small --device cpu]

SCRATCH is a folder on the disk that is measured, with room for four states (64 GB); host memory must have room for
three of them, and what else runs. Records are JSON lines, appended as they come; beside them the table (.md) and plots
(.png, where matplotlib is installed) are written at the end. Each measurement runs in a process of its own, so that
memory of the device and of the host begins empty, and one that fails ends alone. With a single --only it runs in this
process. --small makes everything tiny, for the CPU, too: it shows that it works, and measures nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.gpu import ceilings, peers, report, restore, resume, snapshot, training
from benchmarks.gpu.bench import FULL, TINY, Bench, Record, append
from benchmarks.gpu.device import Device
from benchmarks.report import lines_file

ROOT = Path(__file__).resolve().parents[2]
#: the most telling first: a run that comes short leaves out the last ones
MEASUREMENTS: dict[str, Callable[[Bench], list[Record]]] = {
    "ceilings": ceilings.run,
    "snapshot": snapshot.run,
    "training": training.run,
    "restore": restore.run,
    "resume": resume.run,
    "peers": peers.run,
}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parse = argparse.ArgumentParser("python -m benchmarks.gpu", description=__doc__)
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parse.add_argument
    add("--dir", type=Path, default=Path("build/bench"), help="scratch folder on the disk to measure (build/bench)")
    add("--out", type=lines_file, default=Path("build/bench/gpu.jsonl"), help="JSON lines, appended to")
    add("--only", nargs="+", choices=list(MEASUREMENTS), help="only these measurements")
    add("--device", default="cuda", help="cuda, cuda:1, cpu (cuda)")
    add("--small", action="store_true", help="everything tiny")
    add("--minutes", type=float, default=7.8, help="the most that all of it may take (7.8)")
    add("--part", action="store_true", help="no table: another process makes it of all records")
    args = parse.parse_args(argv)
    args.only = args.only or list(MEASUREMENTS)
    return args


def measure(args: argparse.Namespace, name: str, until: float) -> None:
    """One measurement, in this process."""
    scale = TINY if args.small else FULL
    MEASUREMENTS[name](Bench(name, Device(args.device), args.dir, args.out, scale, until))


def measure_apart(args: argparse.Namespace, name: str, until: float) -> bool:
    """One measurement in a process of its own, which is ended when the time is over. False if it failed."""
    minutes = (until - time.time()) / 60
    command = [sys.executable, "-m", "benchmarks.gpu", "--dir", args.dir, "--out", args.out, "--only", name]
    command += ["--device", args.device, "--minutes", str(minutes), "--part", *(["--small"] if args.small else [])]
    child = subprocess.Popen([str(word) for word in command], cwd=ROOT, process_group=0)
    try:
        code = child.wait(max(minutes * 60, 0))
    except BaseException as error:
        os.killpg(child.pid, signal.SIGKILL)  # with what it has started
        child.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        code = None
    if code != 0:
        why = "the time was over" if code is None else f"it ended with {code}"
        append(args.out, {"at": round(time.time(), 3), "measurement": name, "note": f"cut short: {why}"})
        for left in args.dir.glob(f"{name}-*"):  # the next one needs the room
            shutil.rmtree(left, ignore_errors=True)
    return code == 0


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    began = time.time()
    until = began + args.minutes * 60
    args.dir, args.out = args.dir.resolve(), args.out.resolve()
    args.dir.mkdir(parents=True, exist_ok=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if len(args.only) == 1:
        measure(args, args.only[0], until)
        good = True
    else:
        good = all([measure_apart(args, name, until) for name in args.only])
    if not args.part:
        records = report.read(args.out, began)
        text = report.table(records)
        args.out.with_suffix(".md").write_text(text)
        for path in report.plot(records, args.out.with_suffix("")):
            print(f"wrote {path}")
        print(f"\n{text}\n{time.time() - began:.0f} s in all")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
