"""How much of what the disk can do does stepwell reach?

    python -m benchmarks.ceiling --dir SCRATCH --out ceiling.jsonl --choice ceiling.json

The ceiling is fio: one setting for writing and one for reading, those with the best median of 9 pilot rounds on this
machine (kept in --choice). Then rounds of fio, product, fio, in turn: a round's figure is the product's GB/s divided by
the mean of the two fio runs around it; a round whose fio runs differ by more than 25 % is repeated. In the same rounds
fio stands in the product's place once ("control"): its figure says what 1.0 really looks like on this machine.

A product run is a fresh process of the peers' harness, warmed up on a small state. Saves are timed until everything is
on the disk: the product's own wait, then fsync of large files and syncfs. Restores are cold and into existing tensors.
Needs fio, root (drops the page cache) and the harness (STEPWELL_PEERS or --peers-dir).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import fio, peers, report
from benchmarks.slice_read import measure_slice

SPREAD_MAX = 1.25  # fio runs around a product run may differ by this factor
TIE = 0.98  # settings whose medians are this close are equals: the steadier one makes more rounds calm
PHASES: dict[str, fio.Kind] = {"save": "write", "restore": "read"}
SETTINGS = {"write": fio.WRITE_SETTINGS, "read": fio.READ_SETTINGS}
Record = dict[str, Any]


def choose(kind: fio.Kind, folder: Path, size: int, pilots: int, settings: int) -> Record:
    """The setting with the best median GB/s over `pilots` rounds; settings take turns within a round."""
    speeds: dict[fio.Setting, list[float]] = {setting: [] for setting in SETTINGS[kind][:settings]}
    for number in range(pilots):
        if kind == "read":
            fio.make_file(folder, size)
        for setting, values in speeds.items():
            values.append(fio.run(setting, kind, folder, size)["gb_s"])
            print(f"pilot {number + 1}/{pilots} {kind}: {values[-1]:.2f} GB/s  {setting}", flush=True)
    fio.clear(folder)
    medians = {setting: statistics.median(values) for setting, values in speeds.items()}
    highest = max(medians.values())
    equals = [setting for setting, value in medians.items() if value >= TIE * highest]
    best = min(equals, key=lambda setting: statistics.pstdev(speeds[setting]))
    return {
        "setting": best.as_json(),
        "gb_s": medians[best],
        "pilots": pilots,
        "all": {str(setting): round(value, 3) for setting, value in medians.items()},
    }


def chosen_settings(args: argparse.Namespace, folder: Path) -> dict[str, fio.Setting]:
    """From --choice if it is there, else from pilot rounds, which write it."""
    if args.choice.exists():
        choice = json.loads(args.choice.read_text())
    else:
        size = args.pilot_mib << 20
        choice = {kind: choose(kind, folder, size, args.pilots, args.settings) for kind in PHASES.values()}
        args.choice.write_text(json.dumps(choice, indent=1) + "\n")
    return {kind: fio.Setting(**choice[kind]["setting"]) for kind in PHASES.values()}


class Product:
    """Runs one phase of one workload in a fresh process of the harness."""

    def __init__(self, args: argparse.Namespace, workload: str, home: Path) -> None:
        self.run, self.name = peers.harness(), args.product
        self.workload = peers.workloads().WORKLOADS[workload]
        self.home, self.data, self.digests = home, home / "data", home / "digests"
        self.digests.mkdir()
        self.options = argparse.Namespace(nice=args.nice, verify=True, mutate=False, timeout=args.timeout)

    def measure(self, phase: str) -> Record:
        """Raises RuntimeError if the product fails, or restores wrong bytes."""
        if phase == "save":
            shutil.rmtree(self.data, ignore_errors=True)
            self.data.mkdir()
            os.sync()
        for left in self.home.glob("warm.*"):  # a warm-up saves, too, and expects an empty folder
            shutil.rmtree(left)
        result: Record = self.run.run_phase(phase, self.name, self.workload, self.data, self.digests, self.options)
        if "error" in result or not result.get("correct", True):
            raise RuntimeError(f"{phase} of {self.workload.name}: {result.get('error', 'wrong bytes came back')}")
        seconds = result["durable_s" if phase == "save" else "restore_s"]
        result["gb_s"] = result["bytes"] / seconds / fio.GB
        if phase == "save":
            files = [path for path in self.data.rglob("*") if path.is_file()]
            # the run's own records are there once, not for each checkpoint
            result["files"] = len([path for path in files if any(p.name.startswith("step-") for p in path.parents)])
            result["files_all"], result["files_bytes"] = len(files), sum(path.stat().st_size for path in files)
        return result


def rounds(
    phase: str, wanted: int, repeats: int, run_fio: Callable[[], Record], run_product: Callable[[], Record]
) -> Iterator[Record]:
    """Rounds until `wanted` are calm, or `repeats` times as many had to be repeated. Of each: figures and their runs.

    fio, product, fio, control (fio again), fio: the middle run belongs to both, the last one to the next round, too.
    """
    calm = 0
    before = run_fio()
    for number in range(1, wanted * (1 + repeats) + 1):
        product, between, control, after = run_product(), run_fio(), run_fio(), run_fio()
        record: Record = {"round": number, "phase": phase, "product": product}
        for name, middle, around in (("ratio", product, (before, between)), ("control", control, (between, after))):
            speeds = [one["gb_s"] for one in around]
            record |= {name: middle["gb_s"] / statistics.mean(speeds), f"{name}_fio": speeds}
            record[f"{name}_calm"] = max(speeds) <= SPREAD_MAX * min(speeds)
        calm += record["ratio_calm"]
        before = after
        yield record
        if calm >= wanted:
            return
    print(f"only {calm} of {wanted} rounds were calm: this machine is too busy to say much", file=sys.stderr)


def measure_workload(
    name: str, args: argparse.Namespace, settings: dict[str, fio.Setting], emit: Callable[[Record], None]
) -> None:
    with scratch_folder(args.dir) as home:
        product, disk = Product(args, name, home), home / "fio"
        disk.mkdir()
        size = product.measure("save")["bytes"]  # also the checkpoint that restores read
        for phase in args.phases:
            kind = PHASES[phase]

            def run_fio(kind: fio.Kind = kind) -> Record:
                return fio.run(settings[kind], kind, disk, size)

            def run_product(phase: str = phase) -> Record:
                return product.measure(phase)

            if phase == "restore":
                fio.make_file(disk, size)
            for record in rounds(phase, args.rounds, args.repeats, run_fio, run_product):
                emit({"workload": name, "setting": str(settings[kind]), **record})
            fio.clear(disk)


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    home = Path(tempfile.mkdtemp(prefix="ceiling-", dir=parent)).resolve()
    try:
        yield home
    finally:
        shutil.rmtree(home)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parse = argparse.ArgumentParser("python -m benchmarks.ceiling", description=__doc__)
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parse.add_argument
    add("--dir", type=Path, default=Path("build/bench"), help="scratch folder on the disk to measure (build/bench)")
    add("--out", type=report.lines_file, default=Path("build/bench/ceiling.jsonl"), help="JSON lines, appended to")
    add("--choice", type=Path, default=Path("build/bench/choice.json"), help="the fio settings; made if missing")
    add("--table", type=Path, help="also write the Markdown table there")
    add("--peers-dir", type=Path, help="the peers' harness (default: STEPWELL_PEERS, or ../shared/peers)")
    add("--product", default="stepwell", help="a name the harness knows (stepwell)")
    add("--workloads", nargs="+", default=["llm-2g", "small-storm"])
    add("--phases", nargs="+", choices=list(PHASES), default=list(PHASES))
    add("--rounds", type=int, default=15, help="calm rounds a workload and phase (15)")
    add("--repeats", type=int, default=2, help="repeat at most so many times the rounds, where fio is not calm (2)")
    add("--pilots", type=int, default=9, help="pilot rounds to choose the fio settings (9)")
    add("--pilot-mib", type=int, default=2048, help="bytes of a pilot run (2048 MiB)")
    add("--settings", type=int, help="try only so many fio settings")
    add("--nice", type=int, default=0, help="priority of the product's processes")
    add("--timeout", type=float, default=180, help="seconds a product run")
    add("--slice-mib", type=int, default=1024, help="size of the tensor of which 1 MiB is read; 0: leave out (1024)")
    return parse.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    if args.peers_dir:
        os.environ["STEPWELL_PEERS"] = str(args.peers_dir.resolve())
    needs = {"fio": fio.available(), "root": os.geteuid() == 0, "the peers' harness": peers.available()}
    missing = [what for what, there in needs.items() if not there]
    if missing:
        print(f"needs {', '.join(missing)}", file=sys.stderr)
        return 2
    args.dir.mkdir(parents=True, exist_ok=True)
    records: list[Record] = []

    def emit(record: Record) -> None:
        records.append({"at": round(time.time(), 1), **record})
        with args.out.open("a") as out:
            out.write(json.dumps(records[-1]) + "\n")
        print(report.line(record), flush=True)

    with scratch_folder(args.dir) as folder:
        settings = chosen_settings(args, folder)
    for kind, setting in settings.items():
        print(f"ceiling of {kind}: {setting}", flush=True)
    for name in args.workloads:
        measure_workload(name, args, settings, emit)
    if args.slice_mib:
        with scratch_folder(args.dir) as folder:
            emit({"phase": "slice", **measure_slice(folder, args.slice_mib << 20)})
    table = report.table(records)
    print("\n" + table)
    if args.table:
        args.table.write_text(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
