"""What the machine can do by itself: plain copies in each direction, and the disk."""

from __future__ import annotations

import statistics
from typing import cast

from benchmarks.gpu.bench import GB, Bench, Record
from benchmarks.gpu.copies import Direction, Plain
from benchmarks.gpu.disk import Disk

ROUNDS = 3


def run(bench: Bench) -> list[Record]:
    """Medians of a few rounds, with the best of the ways that were tried."""
    plain = Plain(bench.device, bench.scale.copy_bytes)
    speeds: dict[str, list[float]] = {"d2h": [], "h2d": [], "d2d": []}
    for _ in range(ROUNDS):
        for direction, values in speeds.items():
            values.append(plain.rate(cast(Direction, direction)) / GB)
    for direction, values in speeds.items():
        way = plain.best[cast(Direction, direction)]
        tried = {name: rate for name, rate in plain.pilots.items() if name.startswith(direction)}
        bench.record(f"plain {direction}", statistics.median(values), "GB/s", samples=values, way=str(way), tried=tried)
    plain.close()
    with bench.scratch() as folder:
        disk = Disk(folder, bench.scale.disk_bytes)
        disk.choose()
        for kind, once in (("write", disk.write), ("read", disk.read)):
            tried = {name: rate for name, rate in disk.pilots.items() if name.startswith(kind)}
            if bench.has_time_for(ROUNDS * disk.size / once(), f"the disk, {kind}"):
                values = [once() / GB for _ in range(ROUNDS)]
                best = str(disk.best[kind])
                bench.record(f"disk {kind}", statistics.median(values), "GB/s", samples=values, way=best, tried=tried)
    return bench.records
