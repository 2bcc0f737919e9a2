"""What holds of every built-in eviction policy: random histories, with restarts, beside a plain dict."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from stepwell.policies.announced import Announced
from stepwell.policies.evict import EVICTION, LRU
from stepwell.policies.evict_cost import CostAware
from stepwell.policies.s3fifo import S3FIFO
from stepwell.tiers.base import Chunk, EvictionPolicy

MAKERS: dict[str, Callable[[], Any]] = {
    **EVICTION,
    **{f"announced {name}": lambda make=make: Announced(make()) for name, make in EVICTION.items()},  # type: ignore[misc]
}
SHARDS, INDICES = st.sampled_from("abcd"), st.integers(0, 9)
Key = tuple[str, int]


def chunk(shard: str, index: int, size_bytes: int = 8) -> Chunk:
    return Chunk((shard, index), shard, index, size_bytes, fetch_s=(ord(shard) - 96) * 1e-6)


def in_order(policy: EvictionPolicy) -> list[object]:
    """All chunks as they would go, one after the other, of a copy."""
    policy, gone = deepcopy(policy), []
    while victim := next(policy.victims(1, lambda c: True), None):
        policy.left(victim)
        gone.append(victim.key)
    return gone


def restarted(policy: EvictionPolicy, new: Any, here: list[Chunk]) -> Any:
    new.resume(json.loads(json.dumps(policy.state())))
    for each in here:
        new.entered(each)
    return new


class AnyPolicy(RuleBasedStateMachine):
    """`here` says what is resident."""

    def __init__(self) -> None:
        super().__init__()
        self.here: dict[Key, Chunk] = {}

    @initialize(name=st.sampled_from(sorted(MAKERS)))
    def choose(self, name: str) -> None:
        self.make = MAKERS[name]
        self.policy: Any = self.make()

    def forget(self, key: Any) -> None:
        self.policy.left(self.here.pop(key))

    @rule(shard=SHARDS, index=INDICES, size=st.integers(1, 20))
    def enter(self, shard: str, index: int, size: int) -> None:
        self.here[shard, index] = chunk(shard, index, size)
        self.policy.entered(self.here[shard, index])

    @rule(shard=SHARDS, first=INDICES, last=INDICES)
    def enter_many(self, shard: str, first: int, last: int) -> None:
        for index in range(first, last + 1):
            self.enter(shard, index, 8)

    @rule(shard=SHARDS, index=INDICES)
    def use(self, shard: str, index: int) -> None:
        self.policy.used(chunk(shard, index))

    @rule(shard=SHARDS, index=INDICES)
    def leave(self, shard: str, index: int) -> None:
        self.policy.left(chunk(shard, index))
        self.here.pop((shard, index), None)

    @rule(keys=st.lists(st.tuples(SHARDS, INDICES)))
    def announce(self, keys: list[Key]) -> None:
        if isinstance(self.policy, Announced):
            self.policy.announce(keys)

    @rule(needed=st.integers(0, 300), may=st.frozensets(INDICES, min_size=6), remove=st.booleans())
    def evict(self, needed: int, may: frozenset[int], remove: bool) -> None:
        free = {key for key in self.here if key[1] in may}
        found: list[Chunk] = []
        for victim in self.policy.victims(needed, lambda c: c.index in may):
            assert victim is self.here[victim.shard, victim.index] and victim.key in free
            found.append(victim)
            if remove:
                self.forget(victim.key)
        sizes = [victim.size_bytes for victim in found]
        assert len({victim.key for victim in found}) == len(found)
        assert sum(sizes) >= needed or {victim.key for victim in found} == free
        assert not sizes or sum(sizes[:-1]) < needed

    @rule(needed=st.integers(0, 300))
    def look(self, needed: int) -> None:
        """Whoever only looks changes nothing of what will go."""
        seen = [victim.key for victim in self.policy.victims(needed, lambda c: True)]
        assert [victim.key for victim in self.policy.victims(needed, lambda c: True)] == seen

    @rule(needed=st.integers(50, 300), seed=st.integers(0, 9999))
    def evict_while_things_change(self, needed: int, seed: int) -> None:
        rng, seen = random.Random(seed), set()
        for victim in self.policy.victims(needed, lambda c: c.index != 3):
            key = (victim.shard, victim.index)
            assert key in self.here and key not in seen and victim.index != 3
            seen.add(key)
            change, shard, index = (
                rng.choice(["leave", "enter", "use", "nothing"]),
                rng.choice("abcd"),
                rng.randrange(9),
            )
            if change != "nothing":
                getattr(self, change)(shard, index, *([7] if change == "enter" else []))
            if rng.random() < 0.5 and key in self.here:
                self.forget(key)

    @rule(seed=st.integers(0, 9999))
    def restart(self, seed: int) -> None:
        if isinstance(self.policy, Announced):
            self.policy.announce([])  # whoever announced is gone
        self.policy.state()
        before, here = in_order(self.policy), list(self.here.values())
        random.Random(seed).shuffle(here)
        self.policy = restarted(self.policy, self.make(), here)
        assert in_order(self.policy) == before

    @invariant()
    def bytes_agree(self) -> None:
        if hasattr(self, "policy"):
            inner: Any = self.policy.inner if isinstance(self.policy, Announced) else self.policy
            assert inner.resident_bytes == sum(each.size_bytes for each in self.here.values())


TestAnyPolicy = AnyPolicy.TestCase
TestAnyPolicy.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("name", MAKERS)
def test_it_is_an_eviction_policy_and_says_what_it_holds(name: str) -> None:
    policy: EvictionPolicy = MAKERS[name]()
    assert list(policy.victims(1, lambda c: True)) == []
    policy.entered(chunk("a", 0))
    assert "1" in repr(policy)


@pytest.mark.parametrize("make", EVICTION.values())
def test_of_a_shard_the_tail_goes_first(make: Callable[[], EvictionPolicy]) -> None:
    policy = make()
    for i in range(40):
        policy.entered(chunk("a", i))
        policy.entered(chunk("b", 39 - i))  # another load goes on beside it, in another order
    for shard in "ab":
        gone = [c.index for c in policy.victims(8 * 80, lambda c, shard=shard: c.shard == shard)]  # type: ignore[misc]
        assert gone == list(range(39, -1, -1))


def filled(make: Callable[[], Any]) -> tuple[Any, list[Chunk]]:
    """A policy that has seen uses, evictions and things that came back; and what is there."""
    policy = make()
    here: dict[Key, Chunk] = {}
    rng = random.Random(5)
    for _ in range(600):
        shard, index = rng.choice("aabbcdefg"), rng.randrange(12)
        if (shard, index) in here:
            policy.used(here[shard, index])
            continue
        while len(here) >= 40:
            for victim in policy.victims(1, lambda c: True):
                policy.left(here.pop(victim.key))
        here[shard, index] = chunk(shard, index)
        policy.entered(here[shard, index])
    return policy, list(here.values())


@pytest.mark.parametrize("make", EVICTION.values())
def test_what_did_not_survive_a_restart_is_passed_over(make: Callable[[], Any]) -> None:
    policy, here = filled(make)
    before = in_order(policy)
    lost = set(here[::3])
    new = restarted(policy, make(), [each for each in here if each not in lost])
    new.left(here[1])
    gone = {each.key for each in lost} | {here[1].key}
    expected = [key for key in before if key not in gone]
    assert sorted(map(str, in_order(new))) == sorted(map(str, expected))
    if make is LRU:
        assert in_order(new) == expected
    assert new.resident_bytes == 8 * len(expected)


@pytest.mark.parametrize("make", [S3FIFO, CostAware])
def test_what_was_evicted_is_still_remembered_after_a_restart(make: Callable[[], Any]) -> None:
    policy, here = filled(make)
    new = restarted(policy, make(), here)
    gone = [(shard, i) for shard in "abcdefg" for i in range(12) if (shard, i) not in {c.key for c in here}]
    for shard, i in gone:
        policy.entered(chunk(shard, i))
        new.entered(chunk(shard, i))
    assert in_order(policy) == in_order(new)
    fresh = make()
    for each in here:
        fresh.entered(each)
    for shard, i in gone:
        fresh.entered(chunk(shard, i))
    assert in_order(fresh) != in_order(new)


def test_a_state_is_not_larger_than_what_is_there_and_as_much_again() -> None:
    for make in EVICTION.values():
        policy = make()
        here: dict[object, Chunk] = {}
        for i in range(20_000):
            new = chunk("abcd"[i % 4], i)
            for victim in policy.victims(1, lambda c: True) if len(here) == 500 else ():
                policy.left(here.pop(victim.key))
            here[new.key] = new
            policy.entered(new)
        assert len(json.dumps(policy.state())) < 1000 * 40


@pytest.mark.parametrize("make", EVICTION.values())
def test_chunks_that_another_process_cannot_name_are_left_out(make: Callable[[], EvictionPolicy]) -> None:
    policy = make()
    policy.entered(Chunk("x", 7, 0, 8))
    policy.entered(chunk("a", 0))
    new = restarted(policy, make(), [chunk("a", 0)])
    assert in_order(new) == [("a", 0)]


@pytest.mark.parametrize("make", EVICTION.values())
def test_the_state_of_another_policy_is_forgotten(make: Callable[[], Any]) -> None:
    policy, here = filled(make)
    for other in EVICTION.values():
        if other is not make:
            new, plain = restarted(policy, other(), here), other()
            for each in here:
                plain.entered(each)
            assert in_order(new) == in_order(plain)


def damaged(state: Any, rng: random.Random) -> Any:
    """The same with one thing somewhere in it replaced or left out."""
    if rng.random() < 0.3 or not isinstance(state, list | dict) or not state:
        return rng.choice([None, -1, 1e400, float("nan"), "x", [], {}, [[]], "lru", True, {"policy": 3}])
    keys = list(state) if isinstance(state, dict) else range(len(state))
    key = rng.choice(list(keys))
    if rng.random() < 0.2:
        del state[key]
    else:
        state[key] = damaged(state[key], rng)
    return state


@pytest.mark.parametrize("make", [S3FIFO, CostAware])
def test_a_state_that_remembers_what_is_there_as_gone_does_no_harm(make: Callable[[], Any]) -> None:
    policy, here = filled(make)
    state = policy.state()
    state["ghosts"] = [[c.shard, [c.index], [1000 if make is S3FIFO else [1, 1000]]] for c in here]
    new = restarted(policy, make(), [])
    new.resume(state)
    for each in here:
        new.entered(each)
    assert len(in_order(new)) == len(here)


@given(st.sampled_from(sorted(EVICTION)), st.integers(0, 10**6))
@settings(max_examples=400, deadline=None)
def test_a_damaged_state_does_no_harm(name: str, seed: int) -> None:
    make = EVICTION[name]
    policy, here = filled(make)
    rng = random.Random(seed)
    new: Any = make()
    new.resume(damaged(json.loads(json.dumps(policy.state())), rng))
    for each in here:
        new.entered(each)
        new.used(each)
    assert sorted(map(str, in_order(new))) == sorted(str(each.key) for each in here)
    assert new.resident_bytes == 8 * len(here)
