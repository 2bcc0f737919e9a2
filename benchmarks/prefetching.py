"""How many bytes come up for a known sequence of loads that was announced, against the least that is possible?

    python -m benchmarks.prefetching --dir SCRATCH

Models of several sizes are loaded again and again, in a seeded order in which few are loaded often (Zipf), through a
store whose host memory keeps 30 % of them. The whole order is announced by one `store.prefetch`. Counted are the bytes
that leave the disk for memory, by prefetch or load (without the files' headers, which every load reads), and divided
by the offline optimum: Belady's rule with bypass, chunk by chunk, for the same order and memory. Loads follow each
other at once, or each waits until prefetching has done what it can.

Bar: 1.05.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import stepwell
from benchmarks import report
from stepwell.policies.s3fifo import S3FIFO
from stepwell.settings import Settings
from stepwell.store import CheckpointStore
from stepwell.tiers.file import FileTier
from stepwell.tiers.host import HostTier

BAR = 1.05
MIB = 1 << 20
#: between two looks whether prefetching has done what it can, and how many must find the same
LOOK_S, LOOKS = 0.005, 4
Record = dict[str, Any]


def optimum_bytes(sizes: Sequence[int], order: Sequence[int], slots: int) -> int:
    """What must come up at least: of the chunks here and the one that is used, the one that is used again last goes."""
    uses = [(number, start) for number in order for start in range(0, sizes[number], MIB)]
    again: list[float] = [0.0] * len(uses)
    later: dict[tuple[int, int], int] = {}
    for at in range(len(uses) - 1, -1, -1):
        again[at] = later.get(uses[at], float("inf"))
        later[uses[at]] = at
    here: dict[tuple[int, int], float] = {}
    moved = 0
    for at, chunk in enumerate(uses):
        if chunk not in here:
            moved += min(MIB, sizes[chunk[0]] - chunk[1])
        here[chunk] = again[at]
        if len(here) > slots:
            del here[max(here, key=here.__getitem__)]
    return moved


def make(folder: Path, sizes: Sequence[int]) -> list[Path]:
    """Plain folders of safetensors files."""
    made = []
    for number, size in enumerate(sizes):
        path = folder / f"model-{number}"
        path.mkdir(parents=True)
        half = (size - 4096) // 2
        weights = {name: torch.full((half,), number, dtype=torch.uint8) for name in ("first", "second")}
        save_file(weights, path / "model.safetensors")
        made.append(path)
    return made


def moved_bytes(store: CheckpointStore) -> dict[str, int]:
    """Where to -> bytes that came from the disk."""
    return {edge.target: edge.moved_bytes for edge in store.status().edges if edge.source == "disk"}


def settle(store: CheckpointStore) -> None:
    """Until nothing has come for a moment."""
    before, same = {"": -1}, 0
    while same < LOOKS:
        time.sleep(LOOK_S)
        now = moved_bytes(store)
        same, before = (same + 1, before) if now == before else (0, now)


def replay(home: Path, models: Sequence[Path], order: Sequence[int], slots: int, how: str) -> Record:
    """Loads models in this order. how: "at once" or "paced"."""
    count = next(count for count in range(slots, 2 * slots + 8) if HostTier(S3FIFO(), count * MIB, chunk_bytes=MIB,
        background=False).arena.kept_max >= slots)  # fmt: skip
    host, disk = HostTier(S3FIFO(), count * MIB, chunk_bytes=MIB), FileTier(home, name="disk")
    with CheckpointStore(f"run-{how.replace(' ', '-')}", [host, disk], "w", Settings()) as store:
        began = time.monotonic()
        handle = store.prefetch([models[number] for number in order])
        while not handle.progress.total_bytes:  # until then nothing is announced
            time.sleep(LOOK_S)
        for number in order:
            if how == "paced":
                settle(store)
            loaded = stepwell.load(models[number])
            if not bool((loaded["second"][-1] == number).item()):
                raise RuntimeError(f"model {number} has other bytes")
        seconds = time.monotonic() - began
        handle.wait(60)
        moved = moved_bytes(store)
    return {"how": how, "bytes": sum(moved.values()), "by_prefetch": moved.get("host", 0), "seconds": seconds}


def run(args: argparse.Namespace, seed: int) -> list[Record]:
    choose = random.Random(seed)
    sizes = [choose.randrange(args.mib // 8, args.mib) * MIB + choose.randrange(1, MIB) for _ in range(args.models)]
    weights = [1 / (rank + 1) for rank in range(args.models)]
    order = choose.choices(range(args.models), weights, k=args.loads)
    slots = int(sum(-(-size // MIB) for size in sizes) * args.share)
    args.dir.mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix="prefetching-", dir=args.dir)).resolve()
    try:
        models = make(home, sizes)
        real = [(model / "model.safetensors").stat().st_size for model in models]
        least = optimum_bytes(real, order, slots)
        records = []
        for how in ("at once", "paced"):
            record = replay(home, models, order, slots, how)
            record |= {"seed": seed, "optimum_bytes": least, "ratio": record["bytes"] / least}
            records.append(record)
            print(json.dumps(record), flush=True)
        return records
    finally:
        shutil.rmtree(home, ignore_errors=True)


def table(records: Sequence[Record]) -> str:
    rows = ["| loads | bytes moved up / optimum | by prefetch | bar |", "| --- | --- | --- | --- |"]
    for how in dict.fromkeys(record["how"] for record in records):
        mine = [record for record in records if record["how"] == how]
        share = report.spread([record["by_prefetch"] / record["bytes"] for record in mine])
        rows.append(f"| {how} | {report.spread([record['ratio'] for record in mine], 3)} | {share} | {BAR} |")
    return "\n".join(rows)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parse = argparse.ArgumentParser("python -m benchmarks.prefetching", description=__doc__)
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parse.add_argument
    add("--dir", type=Path, default=Path("build/bench"), help="scratch folder (build/bench)")
    add("--models", type=int, default=12)
    add("--mib", type=int, default=320, help="the largest model (320 MiB); the smallest has an eighth")
    add("--loads", type=int, default=40)
    add("--share", type=float, default=0.3, help="of all models, what host memory keeps (0.3)")
    add("--seeds", type=int, default=3, help="sequences (3)")
    return parse.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    records = []
    for seed in range(1, args.seeds + 1):
        records += run(args, seed)
    print(table(records))
    print(report.machine())
    return 0


if __name__ == "__main__":
    sys.exit(main())
