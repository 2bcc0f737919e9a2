"""A state larger than the host tier goes through it in waves. What does that cost?

    python -m benchmarks.waves --dir SCRATCH

One tensor of 4 GiB, saved durably with a host tier of 64 MiB and of 4 GiB (plus what it keeps for staging), in turn. A
round's figure is the small arena's GB/s divided by the mean of the two large ones around it.
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
from pathlib import Path

from benchmarks import peers, report
from benchmarks.states import build, ready_store

SMALL_BYTES = 64 << 20
STAGING_BYTES = 512 << 20


def save_seconds(state: dict[str, object], size: int, host_bytes: int, folder: Path) -> float:
    """A durable save into an empty run: commit and fsync are inside."""
    run = folder / "run"
    with ready_store(run, size, host_bytes) as store:
        os.sync()
        began = time.perf_counter()
        store.save(1, state).wait()
        seconds = time.perf_counter() - began
    shutil.rmtree(run)
    return seconds


def main(argv: list[str] | None = None) -> int:
    parse = argparse.ArgumentParser("python -m benchmarks.waves", description=__doc__)
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    parse.add_argument("--dir", type=Path, default=Path("build/bench"), help="scratch folder (build/bench)")
    parse.add_argument("--workload", default="one-big")
    parse.add_argument("--rounds", type=int, default=9)
    parse.add_argument("--small-mib", type=int, default=SMALL_BYTES >> 20, help="the small host tier (64)")
    args = parse.parse_args(argv)
    if not peers.available():
        print("needs the peers' harness (STEPWELL_PEERS)", file=sys.stderr)
        return 2
    args.dir.mkdir(parents=True, exist_ok=True)
    state, size = build(args.workload)
    folder = Path(tempfile.mkdtemp(prefix="waves-", dir=args.dir))
    rounds: list[dict[str, float]] = []
    try:
        large = save_seconds(state, size, size + STAGING_BYTES, folder)
        for _ in range(args.rounds):
            small = save_seconds(state, size, args.small_mib << 20, folder)
            after = save_seconds(state, size, size + STAGING_BYTES, folder)
            ratio = statistics.mean((large, after)) / small
            rounds.append({"small_gb_s": size / small / 1e9, "large_gb_s": size / after / 1e9, "ratio": ratio})
            print(json.dumps(rounds[-1]), flush=True)
            large = after
    finally:
        shutil.rmtree(folder)
    print(report.machine())
    for name in ("small_gb_s", "large_gb_s", "ratio"):
        print(f"{args.workload} {name}: {report.spread([one[name] for one in rounds], 3)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
