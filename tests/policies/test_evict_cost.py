"""Cost-aware eviction: cheap and seldom used goes first, and old uses lose weight."""

from __future__ import annotations

from stepwell.policies.evict_cost import FETCH_S_PER_BYTE, CostAware
from stepwell.tiers.base import Chunk


def chunk(shard: str, index: int = 0, size_bytes: int = 1000, fetch_s: float = 0.0) -> Chunk:
    return Chunk((shard, index), shard, index, size_bytes, fetch_s)


def policy_of(*chunks: Chunk) -> CostAware:
    policy = CostAware()
    for each in chunks:
        policy.entered(each)
    return policy


def going(policy: CostAware, count: int = 99) -> str:
    return "".join(str(c.shard) for c in policy.victims(1000 * count, lambda c: True))


def test_what_is_quick_to_fetch_again_goes_first() -> None:
    assert going(policy_of(chunk("a", fetch_s=3e-3), chunk("b", fetch_s=1e-3), chunk("c", fetch_s=2e-3))) == "bca"


def test_it_counts_by_the_byte() -> None:
    assert going(policy_of(chunk("a", 0, 1000, 1e-3), chunk("b", 0, 4000, 2e-3))) == "ba"


def test_what_nobody_measured_counts_as_a_busy_disk() -> None:
    known = FETCH_S_PER_BYTE * 1000
    assert going(policy_of(chunk("a", fetch_s=2 * known), chunk("b"), chunk("c", fetch_s=known / 2))) == "cba"


def test_what_was_measured_is_known_after_a_restart() -> None:
    policy, new = policy_of(chunk("a", fetch_s=3e-3), chunk("b", fetch_s=1e-3), chunk("c", fetch_s=2e-3)), CostAware()
    new.resume(policy.state())
    for name in "abc":
        new.entered(chunk(name))
    assert going(new) == "bca"


def test_uses_weigh_as_much_as_cost() -> None:
    policy = policy_of(chunk("a", fetch_s=1e-3), chunk("b", fetch_s=2.5e-3))
    policy.used(chunk("a"))
    assert going(policy, 1) == "a"
    policy.used(chunk("b"))
    for _ in range(4):
        policy.used(chunk("a"))
    assert next(policy.victims(1, lambda c: True)).shard == "b"


def test_old_uses_lose_weight_as_other_chunks_come_and_go() -> None:
    policy = policy_of(chunk("old"), chunk("other"))
    for _ in range(5):
        policy.used(chunk("old"))
    rounds = 0
    while (victim := next(policy.victims(1, lambda c: True))).shard != "old":
        policy.left(victim)
        rounds += 1
        policy.entered(chunk(f"new{rounds}"))
        assert rounds < 100
        policy.entered(chunk(f"more{rounds}"))
    assert rounds > 4


def test_uses_of_what_was_evicted_are_remembered_while_there_is_room_for_as_much() -> None:
    policy = policy_of(chunk("a"), chunk("b"))
    policy.used(chunk("a"))
    for victim in policy.victims(2000, lambda c: True):
        policy.left(victim)
    for name in "cab":
        policy.entered(chunk(name))
    assert going(policy) == "cba"


def test_a_touch_of_any_chunk_counts_for_the_clock_of_its_shard() -> None:
    policy = policy_of(chunk("a", 0), chunk("a", 1), chunk("b", 0), chunk("x", fetch_s=5e-6))
    policy.left(next(policy.victims(1, lambda c: True)))  # a1: the clock moves on
    policy.used(chunk("a", 0))
    policy.entered(chunk("a", 1))
    assert going(policy, 1) == "b"
