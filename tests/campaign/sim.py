"""Many simulated histories: the real mover, catalog, commit protocol and policies, on a virtual clock, with everything
going wrong that can. See `tests.sim.world`. With `--ahead`, trainers prefetch and pin besides; with `--alone`, saves
may stay in host memory, and trainers drain.

Resumable: with `--state FILE` the seeds that are done are kept there, and a second start goes on after them. Seeds
that fail are printed at once, and in the result; they belong into tests/sim/seeds.json.

    python -m tests.campaign.sim --seeds 20000 --first 0 --state build/campaign/sim.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from functools import partial
from pathlib import Path

from tests.sim.world import run_seed

#: seeds handed to a worker at once, and between two writes of the state
BATCH = 50
#: what is added up, and how an outcome names it
COUNTS = {
    "events": "events", "saves": "saves", "kills": "kills", "gaps": "gap", "held": "held", "drained": "drained",
}  # fmt: skip


def run_batch(first: int, ahead: bool = False, alone: bool = False) -> dict[str, object]:
    """One batch of seeds: totals, and what failed."""
    counts = dict.fromkeys(COUNTS, 0)
    failed: dict[str, str] = {}
    for seed in range(first, first + BATCH):
        try:
            outcome = run_seed(seed, ahead=ahead, alone=alone)
        except Exception as error:
            failed[str(seed)] = f"{type(error).__name__}: {error}"
            print(f"seed {seed} is WRONG: {error}", file=sys.stderr)
            continue
        for name, of_one in COUNTS.items():
            counts[name] += getattr(outcome, of_one)
    return {"first": first, **counts, "failed": failed}


def load(state: Path | None) -> dict[int, dict[str, object]]:
    """Batches that an earlier start has finished, by their first seed."""
    if state is None or not state.exists():
        return {}
    return {int(first): batch for first, batch in json.loads(state.read_text()).items()}


def run(
    first: int, seeds: int, workers: int, state: Path | None = None, ahead: bool = False, alone: bool = False
) -> dict[str, object]:
    """All batches that are not done yet; returns the totals of all."""
    began = time.monotonic()
    done = load(state)
    if state is not None:
        state.parent.mkdir(parents=True, exist_ok=True)
    todo = [at for at in range(first, first + seeds, BATCH) if at not in done]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for batch in pool.imap_unordered(partial(run_batch, ahead=ahead, alone=alone), todo):
            done[int(str(batch["first"]))] = batch
            if state is not None:
                temporary = state.with_suffix(".tmp")
                temporary.write_text(json.dumps(done))
                temporary.replace(state)
    batches = [done[at] for at in range(first, first + seeds, BATCH)]
    failed = {seed: why for batch in batches for seed, why in dict(batch["failed"]).items()}  # type: ignore[call-overload]
    return {
        "trial": "simulation" + " with prefetches" * ahead + ", saves in memory alone" * alone,
        "seeds": len(batches) * BATCH,
        "first": first,
        "wrong": len(failed),
        "failed": failed,
        **{name: sum(int(str(batch.get(name, 0))) for batch in batches) for name in COUNTS},
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20_000, help=f"how many; rounded up to a multiple of {BATCH}")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--state", type=Path, help="where to keep what is done, so that a second start goes on")
    parser.add_argument("--ahead", action="store_true", help="of histories with prefetches and pins")
    parser.add_argument("--alone", action="store_true", help="of histories in which saves stay in memory")
    args = parser.parse_args()
    result = run(args.first, args.seeds, args.workers, args.state, args.ahead, args.alone)
    print(json.dumps(result))
    sys.exit(1 if result["wrong"] else 0)


if __name__ == "__main__":
    main()
