"""LRU beside a model that is a plain list, and what callers rely on while they iterate."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stepwell.policies.base import Chunk, EvictionPolicy
from stepwell.policies.evict import LRU


def chunk(shard: str, index: int, size_bytes: int = 8) -> Chunk:
    return Chunk((shard, index), shard, index, size_bytes)


def lru(*chunks: Chunk) -> LRU:
    policy = LRU()
    for each in chunks:
        policy.entered(each)
    return policy


def names(chunks: Iterable[Chunk]) -> list[str]:
    return [f"{c.shard}{c.index}" for c in chunks]


def test_it_is_an_eviction_policy() -> None:
    policy: EvictionPolicy = LRU()
    assert list(policy.victims(1, lambda c: True)) == []


def test_least_recent_shard_first_and_its_tail_first() -> None:
    policy = lru(chunk("a", 0), chunk("b", 0), chunk("a", 1), chunk("b", 2), chunk("b", 1))
    assert names(policy.victims(1000, lambda c: True)) == ["a1", "a0", "b2", "b1", "b0"]


def test_a_use_of_any_chunk_refreshes_its_shard() -> None:
    policy = lru(chunk("a", 0), chunk("a", 1), chunk("b", 0))
    policy.used(chunk("a", 0))
    assert names(policy.victims(1000, lambda c: True)) == ["b0", "a1", "a0"]


def test_it_stops_once_enough_bytes_are_together() -> None:
    policy = lru(chunk("a", 0, 10), chunk("a", 1, 3), chunk("b", 0, 8))
    assert names(policy.victims(0, lambda c: True)) == []
    assert names(policy.victims(3, lambda c: True)) == ["a1"]
    assert names(policy.victims(4, lambda c: True)) == ["a1", "a0"]
    assert names(policy.victims(13, lambda c: True)) == ["a1", "a0"]


def test_what_may_not_go_is_passed_over_and_not_counted() -> None:
    policy = lru(chunk("a", 0), chunk("a", 1), chunk("b", 0))
    assert names(policy.victims(16, lambda c: c.index == 0)) == ["a0", "b0"]


def test_a_shard_of_which_nothing_may_go_counts_as_used() -> None:
    policy = lru(chunk("a", 0), chunk("b", 0), chunk("c", 0))
    assert names(policy.victims(8, lambda c: c.shard != "a")) == ["b0"]
    assert names(policy.victims(99, lambda c: True)) == ["b0", "c0", "a0"]


def test_what_is_set_aside_is_no_victim_and_keeps_its_place() -> None:
    policy = lru(chunk("a", 0), chunk("a", 1), chunk("a", 2), chunk("b", 0))
    for _ in range(2):
        policy.set_aside(chunk("a", 1))
    policy.set_aside(chunk("x", 1))
    policy.bring_back(chunk("x", 1))
    assert policy.resident_bytes == 32 and names(policy.victims(99, lambda c: True)) == ["a2", "a0", "b0"]
    for _ in range(2):
        policy.bring_back(chunk("a", 1))
    assert names(policy.victims(99, lambda c: True)) == ["a2", "a1", "a0", "b0"]


def test_a_chunk_that_enters_again_is_counted_once() -> None:
    policy = lru(chunk("a", 0, 8), chunk("b", 0, 8), chunk("a", 0, 5))
    assert policy.resident_bytes == 13
    assert [(c.shard, c.size_bytes) for c in policy.victims(99, lambda c: True)] == [("b", 8), ("a", 5)]


def test_what_is_not_there_may_be_used_and_leave() -> None:
    policy = lru(chunk("a", 0))
    for gone in (chunk("a", 7), chunk("x", 0)):
        policy.left(gone)
        policy.used(gone)
    policy.left(chunk("a", 0))
    policy.left(chunk("a", 0))
    assert policy.resident_bytes == 0 and names(policy.victims(1, lambda c: True)) == []


@pytest.mark.parametrize("needed", [8, 10_000])
def test_victims_may_leave_enter_and_be_used_while_it_iterates(needed: int) -> None:
    policy = lru(*(chunk(shard, i) for shard in "abc" for i in range(4)))
    seen = []
    for victim in policy.victims(needed, lambda c: True):
        seen.append(victim)
        policy.left(victim)
        policy.entered(chunk("new", len(seen)))
        policy.used(chunk("c", 0))
        policy.left(chunk("b", 1))  # not yet yielded: must not come
    assert names(seen) == ["a3", "a2", "a1", "a0", "b3", "b2", "b0", "c3", "c2", "c1", "c0"][: len(seen)]
    assert len(seen) == (1 if needed == 8 else 11)


class CountedIndex(int):
    """Counts comparisons, which is what a search or a sort costs."""

    compared = 0

    def __lt__(self, other: int) -> bool:
        CountedIndex.compared += 1
        return int(self) < int(other)


def test_a_victim_costs_a_search_and_no_scan_or_sort() -> None:
    policy, asked = LRU(), 0
    for shard in ("hot", "cold"):
        for i in random.Random(7).sample(range(20_000), 20_000):
            policy.entered(Chunk((shard, i), shard, CountedIndex(i), 8))
    for i in range(0, 20_000, 2):
        policy.used(Chunk(("hot", i), "hot", CountedIndex(i), 8))

    def may_go(c: Chunk) -> bool:
        nonlocal asked
        asked += 1
        return True

    CountedIndex.compared = 0
    for _ in range(1000):
        for victim in policy.victims(8, may_go):
            assert victim.shard == "cold"
            policy.left(victim)
    assert asked == 1000
    assert CountedIndex.compared <= 1000 * 2 * math.ceil(math.log2(20_000))


SHARDS = st.sampled_from("abcd")
INDICES = st.integers(0, 9)


class LruBesideModel(RuleBasedStateMachine):
    """The model: a list of (shard, index, size) kept in the order in which shards were last touched."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = LRU()
        self.recent: list[str] = []
        self.sizes: dict[tuple[str, int], int] = {}

    def touch(self, shard: str) -> None:
        self.recent = [s for s in self.recent if s != shard] + [shard]

    def expected(self, needed: int, may_go: frozenset[int]) -> list[tuple[str, int]]:
        out, total = [], 0
        for shard in list(self.recent):
            if total >= needed:
                break
            keys = [k for k in sorted(self.sizes, reverse=True) if k[0] == shard and k[1] in may_go]
            if not keys:
                self.touch(shard)
            for key in keys:
                if total < needed:
                    out.append(key)
                    total += self.sizes[key]
        return out

    @rule(shard=SHARDS, index=INDICES, size=st.integers(1, 20))
    def enter(self, shard: str, index: int, size: int) -> None:
        self.policy.entered(chunk(shard, index, size))
        self.sizes[shard, index] = size
        self.touch(shard)

    @rule(shard=SHARDS, index=INDICES)
    def use(self, shard: str, index: int) -> None:
        self.policy.used(chunk(shard, index))
        if any(k[0] == shard for k in self.sizes):
            self.touch(shard)

    @rule(shard=SHARDS, index=INDICES)
    def leave(self, shard: str, index: int) -> None:
        self.policy.left(chunk(shard, index))
        self.forget((shard, index))

    def forget(self, key: tuple[str, int]) -> None:
        self.sizes.pop(key, None)
        if not any(k[0] == key[0] for k in self.sizes):
            self.recent = [s for s in self.recent if s != key[0]]

    @rule(needed=st.integers(0, 200), may_go=st.frozensets(INDICES), remove=st.booleans())
    def evict(self, needed: int, may_go: frozenset[int], remove: bool) -> None:
        expected = self.expected(needed, may_go)
        got = []
        for victim in self.policy.victims(needed, lambda c: c.index in may_go):
            got.append(victim.key)
            if remove:
                self.policy.left(victim)
        assert got == expected
        if remove:
            for key in expected:
                self.forget(key)

    @invariant()
    def bytes_agree(self) -> None:
        assert self.policy.resident_bytes == sum(self.sizes.values())


TestLruBesideModel = LruBesideModel.TestCase
TestLruBesideModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.permutations(range(40)))
def test_the_tail_goes_first_in_whatever_order_chunks_entered(order: list[int]) -> None:
    policy = lru(*(chunk("a", i) for i in order))
    assert [c.index for c in policy.victims(10_000, lambda c: True)] == list(range(39, -1, -1))
