"""The eviction benchmark on a few jobs, so that it cannot rot; its offline optimum beside all that could be done."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

import pytest

from benchmarks import chunk_traces, eviction
from benchmarks.chunk_traces import CHUNK_BYTES, Request

MANY = 20


def test_a_round_compares_all_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    options = ["--kinds", "sweep", "training", "--seeds", "3", "--shrink", str(MANY), "--out", str(out)]
    assert eviction.main(options) == 0
    printed = capsys.readouterr().out
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["trace"] for record in records] == ["sweep-3", "training-3"]
    for record in records:
        found = record["missed_bytes"]
        assert found["optimum"] <= found["announced"] <= found["s3-fifo"] <= record["asked_bytes"]
        assert f"| {record['trace']} |" in printed
    assert "| announced | optimum | 1.05 |" in printed and "CPU for each request" in printed


@pytest.mark.parametrize("kind", chunk_traces.KINDS)
def test_a_trace_follows_from_its_seed(kind: str) -> None:
    made = chunk_traces.make(kind, 1, MANY)
    assert made == chunk_traces.make(kind, 1, MANY) != chunk_traces.make(kind, 2, MANY)
    assert made.requests and all(0 < request.size_bytes <= CHUNK_BYTES for request in made.requests)
    sizes = {request.key: request.size_bytes for request in made.requests}
    assert all(sizes[request.key] == request.size_bytes for request in made.requests)
    assert made.footprint_bytes == sum(sizes.values())


def test_the_chunks_of_a_part() -> None:
    job = chunk_traces.chunks("m", chunk_traces.SHARD_BYTES + CHUNK_BYTES + 5)
    assert sum(request.size_bytes for request in job) == chunk_traces.SHARD_BYTES + CHUNK_BYTES + 5
    assert [request.key for request in job[-2:]] == [("m/1", 0), ("m/1", 1)] and job[-1].size_bytes == 5


@pytest.mark.parametrize("seed", range(30))
def test_the_optimum_is_one(seed: int) -> None:
    """Beside a search through all that a memory of equal chunks may keep after each request."""
    rng = random.Random(seed)
    requests = [Request(("s", rng.randrange(5)), 1, rng.random() < 0.2) for _ in range(12)]

    @cache
    def least(place: int, here: frozenset[int]) -> int:
        if place == len(requests):
            return 0
        new = requests[place].key[1]
        cost = 0 if new in here or requests[place].written else 1
        full = here | {new}
        kept = [full] if len(full) <= 2 else [full - {one} for one in full]
        return cost + min(least(place + 1, each) for each in kept)

    assert eviction.optimum(requests, 2) == least(0, frozenset())
