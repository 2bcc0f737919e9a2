"""Prefetches, loads and pins that are begun and given up at any moment: afterwards the arena's books are right."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

import stepwell
from stepwell.errors import StepwellError, StoreClosed
from stepwell.prefetching import Prefetch
from stepwell.tiers.wrap import Fault
from stepwell.wanted import Ref
from tests.prefetch.helpers import calls, check, check_books, hold, let_go, model, on_loop, state
from tests.store.helpers import disk, eventually, host


@pytest.mark.parametrize("seed", range(6))
def test_given_up_at_any_moment(tmp_path: Path, seed: int) -> None:
    choose = random.Random(seed)
    memory, tier = host(24), disk(tmp_path)
    models = [model(tmp_path, number, choose.randrange(2, 12)) for number in range(4)]
    with stepwell.open(run="run", tiers=[memory, tier], policies=[]) as store:
        for step in (1, 2):
            store.save(step, state(float(step), 2)).wait()
        if seed % 2:
            tier.plan = [Fault("read", 3, times=5)]
        handles: list[Prefetch] = []
        refs: list[Ref] = [*models, 1, 2]
        for _ in range(25):
            picks = [choose.choice(refs) for _ in range(choose.randrange(1, 5))]
            handles.append(store.prefetch(picks, priority=choose.randrange(3)))
            on_loop(turns(choose.randrange(40)))
            what = choose.random()
            if what < 0.5:
                choose.choice(handles).cancel()
            elif what < 0.7:
                number = choose.randrange(4)
                check(models[number], number)
        for handle in handles:
            handle.cancel()
        for handle in handles:
            try:
                handle.wait(20)
            except StepwellError:
                pass
        eventually(lambda: memory.arena.in_use == 0)
        lifter = store.ahead.lifter
        assert lifter is not None
        eventually(lambda: not calls(lambda: lifter._sources or lifter._moving or lifter._ends or lifter.lineup.live))
        assert not calls(lambda: lifter._lanes.total())
        check_books(memory)
        for number, path in enumerate(models):
            store.prefetch(path).wait(20)
            check(path, number)
        check_books(memory)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_handle_that_is_cancelled_while_another_wants_the_same(tmp_path: Path) -> None:
    memory = host(24)
    with stepwell.open(run="run", tiers=[memory, disk(tmp_path)], policies=[]) as store:
        path = model(tmp_path, 1)
        slots = hold(store, 21)
        one, two = store.prefetch(path, priority=1), store.prefetch(path)
        eventually(lambda: one.progress.total_bytes == two.progress.total_bytes > 0)
        let_go(store, slots[:3])
        eventually(lambda: one.progress.done_bytes > 0)
        one.cancel()
        let_go(store, slots[3:])
        two.wait(20)
        with pytest.raises(StoreClosed, match="cancelled"):
            one.wait(20)
        check(path, 1)
        check_books(memory)


def test_an_error_ends_its_own_prefetch_alone(tmp_path: Path) -> None:
    with stepwell.open(run="run", tiers=[disk(tmp_path)], policies=[]) as store:
        store.save(1, state(1.0, 2)).wait()
    memory, tier = host(24), disk(tmp_path)
    with stepwell.open(run="run", tiers=[memory, tier], policies=[]) as store:
        tier.plan = [Fault("read", 1, times=10**9)]
        path = model(tmp_path, 1)
        bad, good = store.prefetch(1, priority=1), store.prefetch(path)
        with pytest.raises(StepwellError, match="injected|bad"):
            bad.wait(20)
        good.wait(20)
        tier.plan = []
        store.prefetch(1).wait(20)
        check_books(memory)
