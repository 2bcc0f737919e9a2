"""How long does save() block, against one memory copy of the state with one thread?

    python -m benchmarks.blocking --dir SCRATCH

The state is on the CPU and there is no guard, so save() must copy all of it before it returns. The host tier's memory
is ready, as in a training loop from its second save on. Rounds of copy, save, copy, in turn; a round's figure is the
save's blocked time divided by the mean of the two copies around it. Each save is durable before the next round.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks import peers, report
from benchmarks.states import build, ready_store


def tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)


def copy_seconds(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> float:
    """One copy of everything, by memmove in this thread."""
    began = time.perf_counter()
    for source, target in zip(sources, targets, strict=True):
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    return time.perf_counter() - began


def measure(workload: str, folder: Path, rounds: int) -> list[dict[str, float]]:
    state, size = build(workload)
    sources = list(tensors(state))
    targets = [torch.zeros_like(tensor) for tensor in sources]
    results = []
    with ready_store(folder / "run", size) as store:
        store.save(1, state).wait()
        for number in range(rounds):
            before = copy_seconds(sources, targets)
            began = time.perf_counter()
            save = store.save(number + 2, state)
            blocked = time.perf_counter() - began
            after = copy_seconds(sources, targets)
            save.wait()
            shutil.rmtree(folder / "run" / str(save.checkpoint), ignore_errors=True)
            copy = statistics.mean((before, after))
            results.append({"blocked_s": blocked, "copy_s": copy, "ratio": blocked / copy, "bytes": size})
    return results


def main(argv: list[str] | None = None) -> int:
    parse = argparse.ArgumentParser("python -m benchmarks.blocking", description=__doc__)
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    parse.add_argument("--dir", type=Path, default=Path("build/bench"), help="scratch folder (build/bench)")
    parse.add_argument("--workloads", nargs="+", default=["llm-2g", "small-storm"])
    parse.add_argument("--rounds", type=int, default=15)
    args = parse.parse_args(argv)
    if not peers.available():
        print("needs the peers' harness (STEPWELL_PEERS)", file=sys.stderr)
        return 2
    args.dir.mkdir(parents=True, exist_ok=True)
    print(report.machine())
    for workload in args.workloads:
        folder = Path(tempfile.mkdtemp(prefix="blocking-", dir=args.dir))
        try:
            results = measure(workload, folder, args.rounds)
        finally:
            shutil.rmtree(folder)
        print(json.dumps({"workload": workload, "rounds": results}))
        for name in ("blocked_s", "copy_s", "ratio"):
            print(f"{workload} {name}: {report.spread([one[name] for one in results], 3)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
