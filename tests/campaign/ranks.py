"""Jobs of several ranks under policies drawn at random: no rank may wait for another one in vain.

A few processes do the same things together, save, flush by hand, drain and restore, each with pauses of its own, on
tiers that are slow for some of them or fail now and then. No wait of one rank for another may run out, all must agree
on which saves were made, those that were not must have left nothing on the first disk, and the newest checkpoint on the
last tier must be whole, and come back with the values of its step.

    python -m tests.campaign.ranks --jobs 100 --seed 1 --dir SCRATCH
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import stepwell
from stepwell.errors import CheckpointNotFound, SaveFailed, StepwellError
from stepwell.policies.base import Policy
from stepwell.policies.evict import LRU
from stepwell.policies.flush import FlushNewest, FlushRule, side_by_side
from stepwell.policies.retain import Retain
from stepwell.settings import Settings, TierOptions
from stepwell.store import CheckpointStore
from stepwell.tiers.base import ChunkIO, RecordKey, Reservation, Result, Tier
from stepwell.tiers.file import FileTier
from stepwell.tiers.host import HostTier
from stepwell.tiers.wrap import Fault, Faulty, Wrapper
from tests.campaign.command import command
from tests.jobs import running

SIZE = 200_000
STEPS = 12
#: ranks wait so long for each other; whoever waits for what never comes does so for all of it
PATIENCE_S = 30.0
#: a job of some megabytes that takes longer has waited for something
JOB_S = 90.0
VAIN = ("did not come within", "has not said within")


@dataclass(frozen=True)
class Plan:
    """A job, the same on all its ranks."""

    rules: list[dict[str, Any]]  # of flushes to the last tier
    alone: int | None  # saves stay in memory, but for the first of so many steps; None: all go to the first disk
    keeps: dict[str, int]  # tier -> how many checkpoints stay there
    pressure: str
    room: int | None  # checkpoints that the first disk has room for
    pause_s: float
    slow_s: float
    faults: int
    actions: list[str]

    @classmethod
    def drawn(cls, rng: random.Random) -> Plan:
        rules = []
        for _ in range(rng.randint(1, 3)):
            rule: dict[str, Any] = {"idle": rng.random() < 0.4, "newest_wins": rng.random() < 0.4}
            window = rng.choice([None, None, ("every_steps", rng.choice([2, 3, 5])), ("every_s", 0.1)])
            if window is not None:
                rule[window[0]] = window[1]
            if rng.random() < 0.3:
                rule["parts"] = ["model"]
            rules.append(rule)
        keeps = {tier: rng.randint(1, 3) for tier in ("near", "far") if rng.random() < 0.6}
        weights = {"save": 8, "save and wait": 4, "flush": 2, "drain": 1, "keep": 1, "restore": 1}
        actions = ["save"] + rng.choices(list(weights), list(weights.values()), k=2 * STEPS)
        needed = keeps.get("near", 0) + actions.count("keep")  # and one save under way
        room = needed + rng.randint(1, 3) if "near" in keeps and rng.random() < 0.5 else None
        return cls(
            rules, rng.choice([None, None, 3]), keeps,
            rng.choice(["block", "skip", "newest-wins"]) if room else "block", room, rng.choice([0.0, 0.01, 0.1]),
            rng.choice([0.0, 0.0, 0.02, 0.1]), rng.choice([0, 0, 1, 3]), actions,
        )  # fmt: skip

    def policies(self) -> Sequence[Policy]:
        rules: list[Policy] = [FlushNewest("far"), *(FlushRule("far", **rule) for rule in self.rules)]
        if self.alone is not None:
            rules.append(FlushRule("near", every_steps=self.alone))
        side_by_side(rules)
        return [*rules, *(Retain(tier, last=count) for tier, count in self.keeps.items())]


class Slow(Wrapper):
    """Takes its time, another one on each rank."""

    def __init__(self, tier: Tier, rng: random.Random, seconds: float) -> None:
        super().__init__(tier)
        self._rng, self._seconds = rng, seconds

    async def write(self, chunks: Sequence[ChunkIO]) -> list[Result]:
        await asyncio.sleep(self._rng.random() * self._seconds)
        return await super().write(chunks)

    async def commit(self, record: RecordKey, data: bytes, *, shards: Sequence[Reservation] = ()) -> bool:
        await asyncio.sleep(self._rng.random() * self._seconds)
        return await super().commit(record, data, shards=shards)


class Rank:
    """One rank's part in one job."""

    def __init__(self, folder: Path, seed: int, rank: int, world: int) -> None:
        self.plan = Plan.drawn(random.Random(seed))
        self.folder, self.seed, self.rank, self.world = folder, seed, rank, world
        self.rng = random.Random(f"{seed}/{rank}")
        self.log: list[str] = []
        self.made: list[int] = []
        self.last_made = True  # where room is short the last save may have been skipped, and close says so

    def state(self, step: int) -> dict[str, Any]:
        value = float(step * 100 + self.rank)
        return {
            "model": {f"rank{self.rank}.w": torch.full((SIZE,), value)},
            "optimizer": {f"rank{self.rank}.m": torch.full((2 * SIZE,), -value)},
            "step": step,
        }

    def tiers(self) -> list[Tier]:
        room = self.plan.room and self.plan.room * self.world * 13 * SIZE
        disk = FileTier(self.folder / "near", name="near", capacity_bytes=room, siblings=True)
        broken = [Fault("write", self.rng.randint(8, 30), times=6)]  # tried less often; never the first save
        near = Faulty(disk, broken if self.plan.faults and self.rng.random() < 0.5 else [])
        faults = [
            Fault(
                self.rng.choice(["write", "commit", "reserve", "fetch"]), self.rng.randint(15, 60)
            )  # not the takeover's
            for _ in range(self.plan.faults)
        ]
        far = Faulty(FileTier(self.folder / "far", name="far", scope="shared"), faults)
        return [HostTier(LRU(), 48 << 20, chunk_bytes=1 << 20), near, Slow(far, self.rng, self.plan.slow_s)]

    def play(self) -> dict[str, Any]:
        """The saves that were made, and what was wrong."""
        began = time.monotonic()
        settings = Settings(
            open_number=2 * self.seed,  # as `stepwell.open` counts them
            rank_timeout_seconds=PATIENCE_S,
            on_pressure=self.plan.pressure,
            block_timeout=10.0,
            exit_timeout=80.0,
        )
        options = {"near": TierOptions(by_rules=self.plan.alone is not None), "far": TierOptions(delete_grace_s=0.0)}
        store = CheckpointStore("run", self.tiers(), "w", settings, self.plan.policies(), options=options)
        try:
            self._act(store)
        except BaseException:
            with contextlib.suppress(StepwellError):  # what went wrong before counts
                store.close()
            raise
        try:
            store.close()
        except SaveFailed:
            if self.last_made:
                raise
        seconds = time.monotonic() - began
        wrong = [line for line in self.log if any(words in line for words in VAIN)]
        if seconds > JOB_S:
            wrong.append(f"it took {seconds:.0f} s")
        return {"wrong": wrong, "made": self.made}

    def _act(self, store: CheckpointStore) -> None:
        step, saves = 0, []
        for action in self.plan.actions:
            time.sleep(self.rng.random() * self.plan.pause_s)
            if action in ("save", "save and wait"):
                step += 1
                save = store.save(step, self.state(step))
                saves.append(save)
                if action == "save and wait":
                    self._settle([save])
            elif action == "flush" and self._settle(saves[-1:]):
                # a fault of ours may end it, or retention be faster; a wait in vain is in the log
                with contextlib.suppress(StepwellError):
                    store.flush(saves[-1].step, "far")
            elif action == "drain":
                store.drain(20.0)
            elif action == "keep" and self.rank == 0 and self._settle(saves[-1:]):
                with contextlib.suppress(StepwellError):  # a fault of ours
                    store.keep(saves[-1].step)
            elif action == "restore" and self._settle(saves[-1:]):
                self._restore(store)
        self._settle(saves)
        self.made = [save.step for save in saves if not save.failed]
        self.last_made = not saves[-1].failed

    def _settle(self, saves: Sequence[stepwell.Save]) -> bool:
        """Whether all of them are where they go first; each has come to its end then."""
        there = bool(saves)
        for save in saves:
            try:
                save.wait("host" if self.plan.alone is not None else "near", timeout=PATIENCE_S + 10)
            except (SaveFailed, stepwell.NotPlanned):
                there = False
        return there

    def _restore(self, store: CheckpointStore) -> None:
        found = store.restore(target := self.state(-1))
        assert found is not None and target["step"] == found.step, found
        expected = self.state(found.step)
        assert torch.equal(target["model"][f"rank{self.rank}.w"], expected["model"][f"rank{self.rank}.w"])
        assert torch.equal(target["optimizer"][f"rank{self.rank}.m"], expected["optimizer"][f"rank{self.rank}.m"])

    def look(self) -> dict[str, Any]:
        """The newest checkpoint on the last tier, which must come back."""
        left = [] if self.plan.alone is not None else self._left()
        assert not left, f"saves that were given up have left {left}"
        far = FileTier(self.folder / "far", name="far", scope="shared", read_only=True)
        with CheckpointStore(
            "run", [far], "r", Settings(open_number=2 * self.seed + 1, rank_timeout_seconds=PATIENCE_S)
        ) as store:
            try:
                self._restore(store)
            except CheckpointNotFound:
                return {"newest": None}
            return {"newest": max(c.step for c in store.checkpoints() if c.complete_on)}

    def _left(self) -> list[str]:
        """Files on the first disk of checkpoints that were never committed."""
        folders = (self.folder / "near" / "run").glob("step-*")
        given_up = [each for each in folders if not (each / "manifest.json").exists()]
        return [f"{file.parent.name}/{file.name}" for each in given_up for file in each.iterdir()]


class Listen(logging.Handler):
    def __init__(self, rank: Rank) -> None:
        super().__init__(logging.WARNING)
        self._rank = rank

    def emit(self, record: logging.LogRecord) -> None:
        self._rank.log.append(record.getMessage())


def take_part(scratch: str, first: int, jobs: int, rank: int, world: int) -> None:
    """What one process does: all the jobs, one after the other; tells of each in a line."""
    import torch.distributed as dist

    for seed in range(first, first + jobs):
        folder = Path(scratch) / str(seed)
        for tier in ("near", "far"):
            (folder / tier).mkdir(parents=True, exist_ok=True)
        mine = Rank(folder, seed, rank, world)
        handler = Listen(mine)
        logging.getLogger("stepwell").addHandler(handler)
        wrong: list[str] = []
        told: dict[str, Any] = {"made": [], "newest": None}
        for work in (mine.play, mine.look):
            dist.barrier()  # also if one of them has failed
            try:
                told |= (found := work())
                wrong += found.pop("wrong", [])
            except (StepwellError, AssertionError) as error:
                wrong.append(f"{type(error).__name__}: {error}")
        logging.getLogger("stepwell").removeHandler(handler)
        print(json.dumps(told | {"seed": seed, "rank": rank, "wrong": wrong, "log": mine.log[-20:]}), flush=True)


def judge(told: Sequence[dict[str, Any]]) -> list[str]:
    """What is wrong with a job, of which each rank has told."""
    wrong = [f"rank {one['rank']}: {what}" for one in told for what in one["wrong"]]
    if wrong:
        return wrong
    made = {tuple(one["made"]) for one in told}
    if len(made) > 1:
        return [f"the ranks have made other saves: {sorted(made)}"]
    [steps] = made
    if any(one["newest"] != (steps[-1] if steps else None) for one in told):
        return [f"newest on the last tier: {[one['newest'] for one in told]}, saved: {steps[-3:]}"]
    return []


def run(scratch: Path, jobs: int, seed: int, world: str = "2") -> dict[str, object]:
    """All jobs; returns the totals."""
    began, wrong, saves = time.monotonic(), 0, 0
    code = (
        "from tests.campaign.ranks import take_part\n"
        "take_part(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), rank, world)\n"
        "dist.barrier()\ndist.destroy_process_group()\n"
    )
    with running(code, scratch, seed, jobs, world=int(world)) as ranks:
        for number in range(seed, seed + jobs):
            lines = [process.stdout.readline() for process in ranks if process.stdout is not None]
            if not all(lines):
                raise RuntimeError(f"a rank has ended in job {number}: {[p.communicate()[1][-3000:] for p in ranks]}")
            told = [json.loads(line) for line in lines]
            problems = judge(told)
            saves += len(told[0].get("made", []))
            if problems:
                wrong += 1
                print(f"job {number} is WRONG: {problems[:4]}", file=sys.stderr)
                for one in told:
                    print(
                        *(f"   rank {one['rank']}: {line[:300]}" for line in one["log"][-8:]), sep="\n", file=sys.stderr
                    )
    return {
        "trial": "ranks", "jobs": jobs, "world": int(world), "seed": seed, "wrong": wrong, "saves": saves,
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip


if __name__ == "__main__":
    command(__doc__, run, counted="jobs", count=20, world="2")
