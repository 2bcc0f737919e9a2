"""Made-up chunk traces: what a node's memory is asked for, chunk by chunk. All of it follows from a seed.

No recorded traces of checkpoint caches are public, so these model the four uses that stepwell has. The parameters were
fixed before any policy was run on them:

- `fleet`: inference servers load models. 60 models of 0.5 to 16 GiB (log-normal), in shards of at most 5 GB as Hugging
  Face cuts them; popularity is Zipf with exponent 1 and drifts: two models trade places every 25 loads. One load in ten
  reads a stretch of a model (10 to 50 % of it); one in a hundred is a scan: five models that nobody asks for again.
- `training`: six runs of 0.5 to 2 GiB of model and twice that of optimizer save in turn, through memory. After a save
  one in seven jobs is restarted and restores its newest checkpoint, one in thirty forks from an older one of any run,
  and three in ten models are loaded by an evaluation.
- `sweep`: evaluations. 40 checkpoints of a 3 GiB model appear one by one; each is loaded by six benchmarks in the order
  of a queue, three of them after the next checkpoint has come; five baselines of 1 to 6 GiB are loaded again with every
  second benchmark; every tenth checkpoint a new benchmark goes over all checkpoints so far, once.
- `mixed`: all three on one node, a third as long each.

Jobs overlap: up to four of them at a time take turns of 16 chunks. The last chunk of a shard takes what is left.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

CHUNK_BYTES = 8 << 20
GIB = 1 << 30
SHARD_BYTES = 5_000_000_000
TURN_CHUNKS, JOBS_AT_ONCE = 16, 4

Key = tuple[str, int]  # shard, index of the chunk


@dataclass(frozen=True, slots=True)
class Request:
    """One chunk that is asked for, or, if it is `written`, that a save brings."""

    key: Key
    size_bytes: int
    written: bool = False


Job = list[Request]


@dataclass(slots=True)
class Trace:
    """Requests in order, and what they are about."""

    name: str
    requests: list[Request] = field(default_factory=list)

    @property
    def footprint_bytes(self) -> int:
        """Of all chunks that it touches."""
        return sum({request.key: request.size_bytes for request in self.requests}.values())


def chunks(name: str, size_bytes: int, *, written: bool = False) -> Job:
    """All chunks of one part, in order."""
    made = []
    for shard, first in enumerate(range(0, size_bytes, SHARD_BYTES)):
        left = min(SHARD_BYTES, size_bytes - first)
        for index, begin in enumerate(range(0, left, CHUNK_BYTES)):
            made.append(Request((f"{name}/{shard}", index), min(CHUNK_BYTES, left - begin), written))
    return made


def _size(rng: random.Random, low_gib: float, high_gib: float) -> int:
    """Log-normal around the middle of the two, and between them."""
    middle = (low_gib * high_gib) ** 0.5
    return int(min(max(rng.lognormvariate(0, 0.8) * middle, low_gib), high_gib) * GIB)


def fleet_jobs(rng: random.Random, loads: int = 1200) -> Iterator[Job]:
    sizes = {f"model{i}": _size(rng, 0.5, 16) for i in range(60)}
    ranks = list(sizes)
    weights = [1 / (rank + 1) for rank in range(len(ranks))]
    for load in range(loads):
        if load % 25 == 24:
            a, b = rng.sample(range(len(ranks)), 2)
            ranks[a], ranks[b] = ranks[b], ranks[a]
        if rng.random() < 0.01:
            for i in range(5):
                yield chunks(f"once{load}-{i}", _size(rng, 0.5, 16))
            continue
        name = rng.choices(ranks, weights)[0]
        job = chunks(name, sizes[name])
        if rng.random() < 0.1:
            count = max(1, int(len(job) * rng.uniform(0.1, 0.5)))
            first = rng.randrange(len(job) - count + 1)
            job = job[first : first + count]
        yield job


def training_jobs(rng: random.Random, saves: int = 240) -> Iterator[Job]:
    sizes = [_size(rng, 0.5, 2) for _ in range(6)]
    made: list[list[int]] = [[] for _ in sizes]

    def checkpoint(run: int, step: int, *, written: bool = False, optimizer: bool = True) -> Job:
        job = chunks(f"run{run}@{step}/model", sizes[run], written=written)
        return job + chunks(f"run{run}@{step}/optimizer", 2 * sizes[run], written=written) if optimizer else job

    for save in range(saves):
        run = save % len(sizes)
        made[run].append(save)
        yield checkpoint(run, save, written=True)
        if rng.random() < 1 / 7:
            yield checkpoint(run, save)
        if rng.random() < 1 / 30:
            parent = rng.choice([i for i in range(len(sizes)) if made[i]])
            yield checkpoint(parent, rng.choice(made[parent]))
        if rng.random() < 0.3:
            yield checkpoint(run, save, optimizer=False)


def sweep_jobs(rng: random.Random, checkpoints: int = 40) -> Iterator[Job]:
    size = 3 * GIB
    baselines = [chunks(f"baseline{i}", _size(rng, 1, 6)) for i in range(5)]
    late: list[int] = []  # benchmarks that wait until the next checkpoint has come
    for new in range(checkpoints):
        queue = [new] * 3 + late
        late = [new] * 3
        rng.shuffle(queue)
        for place, number in enumerate(queue):
            yield chunks(f"sweep@{number}", size)
            if place % 2:
                yield rng.choice(baselines)
        if new % 10 == 9:
            for number in range(new + 1):
                yield chunks(f"sweep@{number}", size)


def mixed_jobs(rng: random.Random) -> Iterator[Job]:
    """All three, each in its own order, in turns by chance."""
    parts = [list(fleet_jobs(rng, 400)), list(training_jobs(rng, 80)), list(sweep_jobs(rng, 14))]
    while any(parts):
        part = rng.choices(parts, [len(part) for part in parts])[0]
        yield part.pop(0)


KINDS: dict[str, Callable[[random.Random], Iterator[Job]]] = {
    "fleet": fleet_jobs, "training": training_jobs, "sweep": sweep_jobs, "mixed": mixed_jobs,
}  # fmt: skip


def make(kind: str, seed: int = 1, shrink: int = 1) -> Trace:
    """The trace of that kind and seed: its jobs, a few at a time. shrink: only one in so many of them, for tests."""
    rng = random.Random(f"{kind}-{seed}")
    return Trace(f"{kind}-{seed}", _interleaved(islice(KINDS[kind](rng), 0, None, shrink), rng))


def _interleaved(jobs: Iterator[Job], rng: random.Random) -> list[Request]:
    requests: list[Request] = []
    running: list[tuple[Job, int]] = []
    while True:
        while len(running) < JOBS_AT_ONCE and (job := next(jobs, None)) is not None:
            running.append((job, 0))
        if not running:
            return requests
        turn = rng.randrange(len(running))
        job, done = running[turn]
        requests += job[done : done + TURN_CHUNKS]
        if done + TURN_CHUNKS < len(job):
            running[turn] = (job, done + TURN_CHUNKS)
        else:
            del running[turn]
