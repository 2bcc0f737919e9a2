"""The records as a table with the bars beside them, and as plots where matplotlib is installed."""

from __future__ import annotations

import importlib
import importlib.util
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.gpu.bench import Record

DCP_BAR = 1 / 20
OURS = "stepwell, no guard"


def read(out: Path, since: float) -> list[Record]:
    """The records that were written since then; of wall time."""
    if not out.exists():
        return []
    records: list[Record] = [json.loads(line) for line in out.read_text().splitlines()]
    return [record for record in records if record["at"] >= since]


def compared(records: Sequence[Record]) -> list[Record]:
    """What follows from several measurements together."""
    ours = [record["value"] for record in records if record.get("name") == f"{OURS}: blocked"]
    theirs = {
        record["name"]: record["value"]
        for record in records
        if record.get("name", "").startswith("DCP") and record["name"].endswith(": blocked")
    }
    if not ours or not theirs:
        return []
    best = min(theirs, key=theirs.__getitem__)
    value = ours[-1] / theirs[best]
    name = f"blocked: {OURS} / {best.removesuffix(': blocked')}"
    return [{"measurement": "compared", "name": name, "value": value, "unit": "ratio", "bar": f"<= {DCP_BAR:g}"}]


def verdict(record: Record) -> str:
    """Whether the bar is met; nothing where there is none."""
    if record.get("bar") is None:
        return ""
    better, limit = record["bar"].split()
    good = record["value"] <= float(limit) if better == "<=" else record["value"] >= float(limit)
    return "good" if good else "**off**"


def table(records: Sequence[Record]) -> str:
    """All records in Markdown, the notes below them."""
    devices = sorted({record["device"] for record in records if "device" in record})
    out = [f"{', '.join(devices)}; {machine()}", "", "| measurement | what | value | bar | |", "| --- " * 5 + "|"]
    for record in [*records, *compared(records)]:
        if "name" in record:
            value = f"{record['value']:.4g} {'' if record['unit'] == 'ratio' else record['unit']}".strip()
            row = (record["measurement"], record["name"], value, record["bar"] or "", verdict(record))
            out.append(f"| {' | '.join(row)} |")
    out += ["", *(f"- {record['measurement']}: {record['note']}" for record in records if "note" in record)]
    return "\n".join(out) + "\n"


def machine() -> str:
    return f"{report.machine()}, torch {torch.__version__}, CUDA {torch.version.cuda}, {platform.machine()}"


def plot(records: Sequence[Record], stem: Path) -> list[Path]:
    """Writes `stem`-iterations.png and `stem`-blocked.png, as far as there are records for them."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    made = []
    for what, draw in (("iterations", _iterations), ("blocked", _blocked)):
        figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
        if draw(axes, records):
            path = stem.with_name(f"{stem.name}-{what}.png")
            figure.savefig(path, dpi=120)
            made.append(path)
        pyplot.close(figure)
    return made


def _iterations(axes: Any, records: Sequence[Record]) -> bool:
    found = [r for r in records if r["measurement"] == "training" and r.get("name", "").startswith("iteration, ")]
    for at, record in enumerate(found):
        axes.plot(record["samples"], [at] * len(record["samples"]), "|", alpha=0.6, markersize=14)
        axes.plot([record["value"]], [at], "ko", markersize=4)
    axes.set_yticks(range(len(found)), [record["name"].removeprefix("iteration, ") for record in found])
    axes.set_xlabel("seconds an iteration; the point is the mean")
    return bool(found)


def _blocked(axes: Any, records: Sequence[Record]) -> bool:
    seconds: dict[str, float] = {}
    for record in records:
        if record.get("name", "").endswith(": blocked"):
            seconds[record["name"].removesuffix(": blocked")] = record["value"]
    axes.barh(list(seconds), list(seconds.values()))
    axes.set_xscale("log")
    axes.set_xlabel("seconds blocked by a save")
    return bool(seconds)
