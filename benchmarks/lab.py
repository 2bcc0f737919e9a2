"""Are the lab's times those of the real thing?

    python -m benchmarks.lab --dir SCRATCH

A small training program saves to real files through throttled tiers, closes, opens the run again and restores, and
records a trace of it. The lab then plays that trace against the same config, with the throttle as the tiers' speed and
the disk and the copy as `stepwell lab probe` measures them. For each setting and measure: the real time, the simulated
one, and simulated / real, as medians over the rounds.

Settings: `kept`, where host memory keeps the checkpoints; `waves`, where it is smaller than the state; `busy`, where
saves come faster than the first tier takes them, until host memory is full and they wait for it. Bar: every ratio
within 0.85 to 1.15, but for what `kept` waits for, which is a copy in memory: no throttle makes it long, so it is told
and not judged.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import stepwell
from benchmarks import report
from stepwell.building import build
from stepwell.config import Config, load_config
from stepwell.lab.simulation import simulate
from stepwell.lab.speeds import Speeds, probe
from stepwell.lab.tier import Speed
from stepwell.lab.trace import from_files
from stepwell.saving import SaveReport
from stepwell.tiers.wrap import Throttled

LOW, HIGH = 0.85, 1.15
#: told, but not held against the bar: a copy in memory, which no throttle makes long
UNTHROTTLED = {("kept", "blocked"), ("kept", "save to host")}
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """name, of the state so much host memory, seconds of training between saves, the second tier's flush rule."""

    name: str
    host: float
    pause_s: float
    flush: str


SETTINGS = (
    Setting("kept", 4.0, 3.0, "{ every_steps = 2 }"),
    Setting("waves", 0.4, 2.0, "{ every_steps = 2 }"),
    Setting("busy", 3.0, 0.5, '"at-close"'),
)


def write_config(home: Path, setting: Setting, size: int) -> Config:
    """The config that both use. The tiers are two folders of one disk."""
    for name in ("nvme", "pfs"):
        (home / name).mkdir(parents=True, exist_ok=True)
    file = home / "config.toml"
    file.write_text(f"""
        [[tier]]
        name = "host"
        driver = "host"
        capacity = {max(64 << 20, int(setting.host * size))}

        [[tier]]
        name = "nvme"
        driver = "file"
        path = "nvme"
        retain = {{ last = 2 }}

        [[tier]]
        name = "pfs"
        driver = "file"
        path = "pfs"
        survives = "node-loss"
        flush = {setting.flush}
    """)
    return load_config(file)


def open_real(config: Config, rates: dict[str, float], trace: Path) -> stepwell.CheckpointStore:
    """As `stepwell.open` of the config, but with a throttle around each storage tier."""
    built = build(config, run="run")
    tiers = [
        Throttled(tier, rates[tier.info.name], time.monotonic, asyncio.sleep) if tier.info.name in rates else tier
        for tier in built.tiers
    ]
    return stepwell.open(tiers=tiers, run="run", policies=built.policies, trace=str(trace))


def run_real(config: Config, setting: Setting, size: int, saves: int, rates: dict[str, float], trace: Path) -> Record:
    """What the real program measures. The first save makes memory ready, and does not count."""
    third = size // 3 // 4
    state = {"model": {"w": torch.rand(third)}, "optimizer": {"m": torch.rand(third), "v": torch.rand(third)}}
    reports: list[SaveReport] = []
    with open_real(config, rates, trace) as store:
        handles = []
        for step in range(1, saves + 1):
            time.sleep(setting.pause_s)
            handles.append(store.save(step, state))
    reports = [handle.report() for handle in handles]
    with open_real(config, rates, trace) as store:
        began = time.monotonic()
        store.restore(state)
        restore_s = time.monotonic() - began
    return measures([(r.blocked_seconds, r.tier_seconds) for r in reports[1:]], restore_s)


def measures(saves: Sequence[tuple[float, dict[str, float]]], restore_s: float) -> Record:
    found: Record = {"blocked": statistics.mean(blocked for blocked, _ in saves)}
    for tier in ("host", "nvme", "pfs"):
        took = [seconds[tier] for _, seconds in saves if tier in seconds]
        if took:
            found[f"save to {tier}"] = statistics.mean(took)
    return {**found, "restore": restore_s}


def run_lab(config: Config, trace: Path, speeds: Speeds) -> Record:
    """What the lab says of the same program."""
    outcome = simulate(config, from_files([trace]), speeds)
    saves = [(save.blocked_s, save.tiers) for save in outcome.each[1:]]
    return measures(saves, outcome.restores.seconds_mean)


def limited(measured: Speeds, rates: dict[str, float]) -> Speeds:
    """The disk as it was measured, behind the throttle."""
    tiers = {
        name: Speed(
            speed.write_bytes_per_s, speed.read_bytes_per_s, rates[name], speed.latency_s, speed.record_s
        )
        for name, speed in measured.tiers.items()
    }  # fmt: skip
    return Speeds(measured.copy_bytes_per_s, tiers)


def one(args: argparse.Namespace, setting: Setting, number: int) -> Record:
    home = Path(tempfile.mkdtemp(prefix="lab-", dir=args.dir)).resolve()
    size, rates = args.mib << 20, {"nvme": args.nvme * 1e6, "pfs": args.pfs * 1e6}
    try:
        config = write_config(home, setting, size)
        speeds = limited(probe(config, min(size, 256 << 20)), rates)
        load = os.getloadavg()[0]
        real = run_real(config, setting, size, args.saves, rates, home / "trace.jsonl")
        lab = run_lab(config, home / "trace.jsonl", speeds)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return {"setting": setting.name, "round": number, "load": load, "real": real, "lab": lab}


def table(records: Sequence[Record]) -> str:
    out = [report.machine(), "", "| setting | measure | real s | lab s | lab / real | |", "| --- " * 6 + "|"]
    for setting in dict.fromkeys(record["setting"] for record in records):
        mine = [record for record in records if record["setting"] == setting]
        for measure in mine[0]["real"]:
            real = [record["real"][measure] for record in mine if measure in record["real"]]
            lab = [record["lab"][measure] for record in mine if measure in record["lab"]]
            ratios = [each / other for each, other in zip(lab, real, strict=True)]
            middle = statistics.median(ratios)
            verdict = "good" if LOW <= middle <= HIGH else "**off**"
            verdict = "not throttled" if (setting, measure) in UNTHROTTLED else verdict
            cells = [setting, measure, report.spread(real, 3), report.spread(lab, 3), report.spread(ratios), verdict]
            out.append(f"| {' | '.join(cells)} |")
    out += ["", f"load before each: {report.spread([record['load'] for record in records])}"]
    return "\n".join(out)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parse = argparse.ArgumentParser("python -m benchmarks.lab", description=__doc__)
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parse.add_argument
    add("--dir", type=Path, default=Path("build/bench"), help="scratch folder on a disk (build/bench)")
    add("--out", type=report.lines_file, help="also append the JSON lines there")
    add("--mib", type=int, default=192, help="bytes of the state (192 MiB)")
    add("--saves", type=int, default=7, help="saves a run (7)")
    add("--rounds", type=int, default=3)
    add("--nvme", type=float, default=150, help="throttle of the first tier, MB/s (150)")
    add("--pfs", type=float, default=80, help="throttle of the second tier, MB/s (80)")
    add("--settings", nargs="*", default=[setting.name for setting in SETTINGS], help="which of them (all)")
    return parse.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    args.dir.mkdir(parents=True, exist_ok=True)
    records: list[Record] = []
    for number in range(1, args.rounds + 1):
        for setting in (each for each in SETTINGS if each.name in args.settings):
            records.append(one(args, setting, number))
            line = json.dumps(records[-1])
            print(line, flush=True)
            if args.out:
                with args.out.open("a") as out:
                    out.write(line + "\n")
    print(table(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
