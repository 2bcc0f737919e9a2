"""The ceiling's records as one line each and as a Markdown table."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]
TITLES = (
    "workload, phase",
    "GB/s",
    "of the ceiling",
    "control",
    "blocked s",
    "CPU s per GB",
    "files a step",
    "bytes on disk / state",
    "rounds, calm",
    "fio setting",
)


def lines_file(text: str) -> Path:
    """Of an argument: a file to which JSON lines are appended. That it cannot be one is said before hours of work."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder; give a file in it, such as {path / 'lines.jsonl'}")
    return path


def line(record: Record) -> str:
    if record["phase"] == "slice":
        return slice_line(record)
    product, fio = record["product"], record["ratio_fio"]
    repeated = "" if record["ratio_calm"] else "  repeated: fio differs too much"
    return (
        f"{record['workload']} {record['phase']} round {record['round']}: {product['gb_s']:.2f} GB/s, "
        f"fio {fio[0]:.2f} and {fio[1]:.2f}, ratio {record['ratio']:.3f}, control {record['control']:.3f}{repeated}"
    )


def slice_line(record: Record) -> str:
    size, whole, read = (record[name] / 2**20 for name in ("slice_bytes", "tensor_bytes", "read_bytes"))
    return (
        f"slice of {size:.0f} MiB of a tensor of {whole:.0f} MiB: {read:.2f} MiB read from the disk; "
        f"the checkpoint's records are {record['record_bytes'] / 2**10:.0f} KiB of them"
    )


def spread(values: Sequence[float], digits: int = 2) -> str:
    """median (lowest to highest)"""
    if not values:
        return "–"
    middle = f"{statistics.median(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def machine() -> str:
    model = "unknown CPU"
    with open("/proc/cpuinfo") as info:
        model = next((row.split(":", 1)[1].strip() for row in info if row.startswith("model name")), model)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return (
        f"{os.cpu_count()} x {model}, {memory:.0f} GiB, Linux {platform.release()}, Python {platform.python_version()}"
    )


def table(records: list[Record]) -> str:
    """Medians over the calm rounds. CPU is of the product's processes; kernel threads are not in it."""
    cells: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record["phase"] != "slice":
            cells.setdefault((record["workload"], record["phase"]), []).append(record)
    out = [machine(), ""]
    out += [f"| {' | '.join(TITLES)} |", "| --- " * len(TITLES) + "|"]
    for (workload, phase), group in cells.items():
        calm = [record for record in group if record["ratio_calm"]]
        runs = [record["product"] for record in calm]
        blocked = spread([run["blocking_s"] for run in runs if "blocking_s" in run])
        files = spread([run["files"] for run in runs if "files" in run], 0)
        grown = spread([run["files_bytes"] / run["bytes"] for run in runs if "files_bytes" in run], 3)
        row = [
            f"{workload} {phase}",
            spread([run["gb_s"] for run in runs]),
            spread([record["ratio"] for record in calm], 3),
            spread([record["control"] for record in group if record["control_calm"]], 3),
            blocked,
            spread([run["cpu_s"] / (run["bytes"] / 1e9) for run in runs]),
            files,
            grown,
            f"{len(group)}, {len(calm)}",
            group[0]["setting"],
        ]
        out.append(f"| {' | '.join(row)} |")
    out += ["", *(slice_line(record) for record in records if record["phase"] == "slice")]
    return "\n".join(out) + "\n"
