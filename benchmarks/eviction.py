"""How many bytes must be fetched again, by what leaves memory first?

    python -m benchmarks.eviction                        (pip install libcachesim, for the reference)

Chunk traces (`benchmarks.chunk_traces`) run through a memory of 30 % of their footprint, under each policy of stepwell,
under libcachesim's S3-FIFO and LRU, and under the offline optimum: Belady's rule, by which what is wanted last goes,
which may be the chunk that has just come. The byte miss ratio is bytes fetched / bytes asked for; what saves bring is
in memory, and neither. `announced` is the default policy with all that comes announced.

Bars: s3-fifo <= 0.88 x LRU and <= 1.02 x libcachesim's S3-FIFO, over all traces; announced <= 1.05 x the optimum.
"""

from __future__ import annotations

import argparse
import heapq
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks import chunk_traces, report
from benchmarks.chunk_traces import Key, Request, Trace
from benchmarks.report import lines_file
from stepwell.policies.announced import Announced
from stepwell.policies.evict import EVICTION, default_eviction
from stepwell.tiers.base import Chunk, EvictionPolicy

SHARE = 0.3
BARS = {("s3-fifo", "libcachesim LRU"): 0.88, ("s3-fifo", "lru"): 0.88, ("s3-fifo", "libcachesim S3-FIFO"): 1.02,
        ("announced", "optimum"): 1.05}  # fmt: skip
Record = dict[str, Any]


def missed(requests: Sequence[Request], hit: Callable[[Request], bool]) -> int:
    """Bytes of what is asked for and not there; `hit` is called for what is written, too."""
    return sum(request.size_bytes for request in requests if not hit(request) and not request.written)


def under(
    policy: EvictionPolicy, requests: Sequence[Request], capacity_bytes: int,
    before: Callable[[int], object] = lambda place: None,
) -> int:  # fmt: skip
    """Bytes missed under one of stepwell's policies. before: called with the place of each request."""
    here: dict[Key, Chunk] = {}
    used_bytes, place = 0, -1

    def hit(request: Request) -> bool:
        nonlocal used_bytes, place
        place += 1
        before(place)
        chunk = here.get(request.key)
        if chunk is not None:
            policy.used(chunk)
            return True
        if (short := used_bytes + request.size_bytes - capacity_bytes) > 0:
            for victim in policy.victims(short, lambda chunk: True):
                policy.left(victim)
                del here[victim.shard, victim.index]  # type: ignore[arg-type]  # the traces' shards are texts
                used_bytes -= victim.size_bytes
        here[request.key] = chunk = Chunk(request.key, *request.key, request.size_bytes)
        policy.entered(chunk)
        used_bytes += request.size_bytes
        return False

    return missed(requests, hit)


def announced(requests: Sequence[Request], capacity_bytes: int) -> int:
    """Bytes missed where prefetches have announced all that comes."""
    policy = default_eviction()
    policy.announce([request.key for request in requests if not request.written])

    def serve(place: int) -> None:
        if place and not requests[place - 1].written:
            policy.served(requests[place - 1].key)

    return under(policy, requests, capacity_bytes, serve)


def optimum(requests: Sequence[Request], capacity_bytes: int) -> int:
    """Bytes missed by Belady's rule."""
    never = len(requests)
    following, last = [never] * never, dict[Key, int]()
    for place in range(never - 1, -1, -1):
        following[place] = last.get(requests[place].key, never)
        if not requests[place].written:
            last[requests[place].key] = place
    wanted: dict[Key, int] = {}
    heap: list[tuple[int, Key, int]] = []
    missed_bytes = used_bytes = 0
    for place, request in enumerate(requests):
        if request.key not in wanted:
            missed_bytes += 0 if request.written else request.size_bytes
            used_bytes += request.size_bytes
        wanted[request.key] = following[place]
        heapq.heappush(heap, (-following[place], request.key, request.size_bytes))
        while used_bytes > capacity_bytes:
            next_use, key, size_bytes = heapq.heappop(heap)
            if wanted.get(key) == -next_use:
                del wanted[key]
                used_bytes -= size_bytes
    return missed_bytes


def libcachesim_or_none() -> Any:
    try:
        return importlib.import_module("libcachesim")
    except ImportError:
        return None


def under_libcachesim(library: Any, name: str, requests: Sequence[Request], capacity_bytes: int) -> int:
    cache, asked = getattr(library, name)(cache_size=capacity_bytes), library.Request()
    numbers: dict[Key, int] = {}

    def hit(request: Request) -> bool:
        asked.obj_id = numbers.setdefault(request.key, len(numbers) + 1)
        asked.obj_size = request.size_bytes
        return bool(cache.get(asked))

    return missed(requests, hit)


def measure(trace: Trace, share: float = SHARE) -> Record:
    """All policies on one trace: bytes missed, and of stepwell's the microseconds of CPU for each request."""
    requests, capacity = trace.requests, int(share * trace.footprint_bytes)
    found: dict[str, int] = {}
    cost: dict[str, float] = {}
    for name, make in EVICTION.items():
        begun = time.process_time()
        found[name] = under(Announced(make()), requests, capacity)
        cost[name] = (time.process_time() - begun) / len(requests) * 1e6
    found["announced"] = announced(requests, capacity)
    found["optimum"] = optimum(requests, capacity)
    if (library := libcachesim_or_none()) is not None:
        found["libcachesim S3-FIFO"] = under_libcachesim(library, "S3FIFO", requests, capacity)
        found["libcachesim LRU"] = under_libcachesim(library, "LRU", requests, capacity)
    asked = sum(request.size_bytes for request in requests if not request.written)
    return {
        "trace": trace.name, "requests": len(requests), "footprint_bytes": trace.footprint_bytes,
        "capacity_bytes": capacity, "asked_bytes": asked, "missed_bytes": found, "us": cost,
    }  # fmt: skip


def table(records: Sequence[Record]) -> str:
    """Miss ratios as Markdown: a row for each trace and one for all of them."""
    names = list(records[0]["missed_bytes"])
    rows = [["trace", "requests", "footprint", *names], ["---"] * (3 + len(names))]
    for record in records:
        ratios = [f"{record['missed_bytes'][name] / record['asked_bytes']:.4f}" for name in names]
        rows.append([record["trace"], f"{record['requests']}", f"{record['footprint_bytes'] / 2**30:.0f} GiB", *ratios])
    asked = sum(record["asked_bytes"] for record in records)
    rows.append(["all", "", "", *(f"{total(records, name) / asked:.4f}" for name in names)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def total(records: Sequence[Record], name: str) -> int:
    return sum(record["missed_bytes"][name] for record in records)


def verdicts(records: Sequence[Record]) -> Iterator[str]:
    """One row for each bar: the ratio of all bytes, and of each kind of trace."""
    kinds = list(dict.fromkeys(record["trace"].rpartition("-")[0] for record in records))
    yield "| bytes fetched | of those with | bar | all | " + " | ".join(kinds) + " |"
    yield "| --- " * (4 + len(kinds)) + "|"
    for (name, other), bar in BARS.items():
        if other in records[0]["missed_bytes"]:
            groups = [records, *([r for r in records if r["trace"].startswith(f"{kind}-")] for kind in kinds)]
            ratios = [f"{total(group, name) / total(group, other):.3f}" for group in groups]
            yield f"| {name} | {other} | {bar} | " + " | ".join(ratios) + " |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", nargs="+", default=list(chunk_traces.KINDS), choices=list(chunk_traces.KINDS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--share", type=float, default=SHARE, help="of the footprint that memory holds")
    parser.add_argument("--shrink", type=int, default=1, help="leave out all but one in so many jobs of a trace")
    parser.add_argument("--out", type=lines_file, help="append a JSON line for each trace")
    options = parser.parse_args(argv)
    records = []
    for kind in options.kinds:
        for seed in options.seeds:
            record = measure(chunk_traces.make(kind, seed, options.shrink), options.share)
            records.append(record)
            print(".", end="", file=sys.stderr, flush=True)
            if options.out:
                with open(options.out, "a") as out:
                    print(json.dumps(record), file=out)
    print(f"\n{report.machine()}\n\n{table(records)}\n")
    print("\n".join(verdicts(records)))
    each = {name: [record["us"][name] for record in records] for name in EVICTION}
    print("\nCPU for each request, µs: " + ", ".join(f"{name} {report.spread(us)}" for name, us in each.items()))
    if "libcachesim LRU" not in records[0]["missed_bytes"]:
        print("libcachesim is not installed: pip install libcachesim")
    return 0


if __name__ == "__main__":
    sys.exit(main())
