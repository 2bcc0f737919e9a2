"""The announced order, beside a reference that sorts everything anew each time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.policies.announced import Announced, SetsAside
from stepwell.policies.evict import EVICTION, default_eviction
from stepwell.policies.evict_cost import CostAware
from stepwell.policies.s3fifo import S3FIFO
from stepwell.tiers.base import Chunk

Key = tuple[str, int]


class Oldest:
    """A third party's: first in, first out, without anything besides the protocol. Counts what it is asked."""

    def __init__(self) -> None:
        self.here: dict[object, Chunk] = {}

    def entered(self, chunk: Chunk) -> None:
        self.here[chunk.key] = chunk

    def used(self, chunk: Chunk) -> None:
        pass

    def left(self, chunk: Chunk) -> None:
        self.here.pop(chunk.key, None)

    def victims(self, needed_bytes: int, may_go: Callable[[Chunk], bool]) -> Iterator[Chunk]:
        for chunk in list(self.here.values()):
            if needed_bytes > 0 and chunk.key in self.here and may_go(chunk):
                needed_bytes -= chunk.size_bytes
                yield chunk

    def state(self) -> Any:
        return ["oldest"]

    def resume(self, state: Any) -> None:
        self.resumed = state


INNER: dict[str, Callable[[], Any]] = {**EVICTION, "a third party's": Oldest}
KEYS = st.tuples(st.sampled_from("abc"), st.integers(0, 7))


def chunk(key: Key, size_bytes: int = 8) -> Chunk:
    return Chunk(key, *key, size_bytes)


def ranked(policy: Announced, here: dict[Key, Chunk], order: list[Key]) -> list[Key]:
    """What should go, in order: what nobody announced as `inner` has it, then by the next use, the last one first."""
    first = [c.key for c in deepcopy(policy).inner.victims(10**9, lambda c: c.key not in order)]
    assert sorted(map(str, first)) == sorted(str(key) for key in here if key not in order)
    return [*first, *sorted({key for key in order if key in here}, key=order.index, reverse=True)]  # type: ignore[list-item]


@given(st.sampled_from(sorted(INNER)), st.data())
@settings(max_examples=300, deadline=None)
def test_beside_the_reference(name: str, data: st.DataObject) -> None:
    policy = Announced(INNER[name]())
    here: dict[Key, Chunk] = {}
    order: list[Key] = []
    for _ in range(data.draw(st.integers(1, 12))):
        act = data.draw(st.sampled_from(["enter", "enter", "use", "leave", "announce", "announce", "serve", "evict"]))
        keys = data.draw(st.lists(KEYS, max_size=14))
        if act == "announce":
            order = list(keys)
            policy.announce(keys)
        elif act == "serve":
            for key in keys:
                policy.served(key)
                if key in order:
                    del order[order.index(key)]
        elif act == "evict":
            may = data.draw(st.frozensets(st.integers(0, 7), min_size=4))
            needed = data.draw(st.integers(0, 120))
            left, expected = needed, []
            for key in [key for key in ranked(policy, here, order) if key[1] in may]:
                if left > 0:
                    expected.append(key)
                    left -= here[key].size_bytes
            if name in ("s3-fifo", "cost-aware"):  # being asked about what may not go changes their order
                first = [c.key for c in deepcopy(policy).inner.victims(needed, may_of(may, order))]
                expected[: len(first)] = first  # type: ignore[assignment]
            got = []
            for victim in policy.victims(needed, lambda c, may=may: c.index in may):  # type: ignore[misc]
                got.append(victim.key)
                policy.left(here.pop(victim.key))  # type: ignore[call-overload]
            assert got == expected
        else:
            for key in keys:
                if act == "enter":
                    here[key] = chunk(key, data.draw(st.integers(1, 9)))
                    policy.entered(here[key])
                elif act == "use":
                    policy.used(chunk(key))
                else:
                    policy.left(chunk(key))
                    here.pop(key, None)


def may_of(may: frozenset[int], order: list[Key]) -> Callable[[Chunk], bool]:
    return lambda c: c.index in may and c.key not in order


def test_a_chunk_that_is_wanted_again_and_again_counts_by_its_next_use() -> None:
    policy = Announced(S3FIFO())
    for i in range(4):
        policy.entered(chunk(("a", i)))
    policy.announce([("a", 2), ("a", 0), ("a", 1), ("a", 2), ("a", 0), ("x", 9)])
    assert [c.index for c in policy.victims(99, lambda c: True)] == [3, 1, 0, 2]
    policy.announce([("a", 1)])
    assert [c.index for c in policy.victims(99, lambda c: True)][-1] == 1


def test_the_first_use_of_what_was_brought_for_it_is_no_second_one() -> None:
    policy, plain = Announced(CostAware()), CostAware()
    policy.announce([("a", 0), ("b", 0)])
    for each in (chunk(("a", 0)), chunk(("b", 0)), chunk(("c", 0))):
        policy.entered(each)
        plain.entered(each)
    policy.used(chunk(("a", 0)))
    policy.announce([])
    policy.used(chunk(("c", 0)))
    plain.used(chunk(("c", 0)))
    assert [c.key for c in policy.victims(99, lambda c: True)] == [c.key for c in plain.victims(99, lambda c: True)]
    policy.used(chunk(("a", 0)))
    assert [c.key for c in policy.victims(99, lambda c: True)][0] == ("b", 0)


def test_it_goes_on_by_the_announcement_that_counted_at_its_start() -> None:
    policy = Announced(S3FIFO())
    for i in range(6):
        policy.entered(chunk(("a", i)))
    policy.announce([("a", i) for i in range(5)])
    seen = []
    for victim in policy.victims(99, lambda c: True):
        seen.append(victim.index)
        policy.announce([("a", 5), ("a", 0)])
        policy.left(chunk(("a", 2)))
    assert seen == [5, 4, 3, 1, 0]
    policy.announce([])
    assert sorted(c.index for c in policy.victims(99, lambda c: True)) == [0, 1, 3, 4, 5]


def test_its_state_is_that_of_the_policy_inside() -> None:
    inner = Oldest()
    policy = Announced(inner)
    assert policy.state() == ["oldest"] and not isinstance(inner, SetsAside)
    policy.resume({"a": 1})
    assert inner.resumed == {"a": 1}
    assert isinstance(default_eviction().inner, S3FIFO)


class Counted(int):
    """Counts what is done with it, which is what a search costs."""

    done = 0

    def __hash__(self) -> int:
        Counted.done += 1
        return int.__hash__(self)

    def __eq__(self, other: object) -> bool:
        Counted.done += 1
        return int.__eq__(self, other)

    def __lt__(self, other: int) -> bool:
        Counted.done += 1
        return int.__lt__(self, other)


@pytest.mark.parametrize("name", EVICTION)
def test_memory_full_of_announced_chunks_is_not_searched_for_each_one_that_goes(name: str) -> None:
    """50,000 announced chunks are resident; 2000 that nobody announced stream through, then announced ones leave."""
    policy: Any = Announced(EVICTION[name]())
    keys = [(f"s{i // 1000}", Counted(i % 1000)) for i in range(50_000)]
    random.Random(3).shuffle(keys)
    for key in keys:
        policy.entered(chunk(key))
    policy.announce(keys)
    Counted.done = 0
    for i in range(2000):
        policy.entered(chunk(("new", Counted(i))))
        for victim in policy.victims(8, lambda c: True):
            assert victim.shard == "new"
            policy.left(victim)
    for i in range(2000):
        for victim in policy.victims(8, lambda c: True):
            assert victim.key == keys[-1 - i]
            policy.left(victim)
    assert Counted.done < 4000 * 150
