"""S3-FIFO: who stays and who goes; and the paper's algorithm as a reference, where each shard is one chunk."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Iterable

import pytest

from stepwell.policies import s3fifo
from stepwell.policies.s3fifo import S3FIFO
from stepwell.tiers.base import Chunk


def chunk(shard: str, index: int = 0, size_bytes: int = 8) -> Chunk:
    return Chunk((shard, index), shard, index, size_bytes)


class Cache:
    """A cache of so many bytes under S3-FIFO."""

    def __init__(self, capacity_bytes: int) -> None:
        self.policy, self.capacity_bytes = S3FIFO(), capacity_bytes
        self.here: dict[object, Chunk] = {}

    def get(self, new: Chunk) -> bool:
        if new.key in self.here:
            self.policy.used(new)
            return True
        while self.policy.resident_bytes + new.size_bytes > self.capacity_bytes:
            for victim in self.policy.victims(1, lambda c: True):
                del self.here[victim.key]
                self.policy.left(victim)
        self.here[new.key] = new
        self.policy.entered(new)
        return False

    def load(self, shard: str, count: int) -> int:
        """How many of its chunks were there."""
        return sum(self.get(chunk(shard, i)) for i in range(count))

    def has(self, shard: str) -> int:
        return sum(key[0] == shard for key in self.here)  # type: ignore[index]


def names(chunks: Iterable[Chunk]) -> list[str]:
    return [f"{c.shard}{c.index}" for c in chunks]


def test_a_scan_pushes_out_what_was_used_once_and_leaves_what_was_used_more() -> None:
    cache = Cache(100 * 8)
    for turn in range(3):
        cache.load("hot", 40)
        for i in range(60):
            cache.get(chunk(f"between{turn}-{i}"))
    for i in range(1000):
        cache.get(chunk(f"scan{i}"))
    assert cache.has("hot") == 40


def test_what_comes_back_while_it_is_remembered_goes_to_the_main_queue_at_once() -> None:
    cache = Cache(10 * 8)
    for i in range(12):
        cache.get(chunk("a", i))
    assert cache.get(chunk("b")) is False
    gone = next(i for i in range(12) if ("a", i) not in cache.here)
    cache.get(chunk("a", gone))
    for i in range(50):
        cache.get(chunk("scan", i))
    assert ("a", gone) in cache.here


def test_uses_that_follow_each_other_closely_count_as_one() -> None:
    cache = Cache(1000 * 8)
    cache.load("filler", 1020)  # from now on it knows how much there is room for
    cache.load("once", 2)
    for _ in range(4):  # one reader, in many small reads: no more than the one that brought it
        cache.load("once", 2)
    cache.load("again", 20)
    cache.load("again", 20)
    for i in range(2000):
        cache.get(chunk(f"scan{i}"))
    assert cache.has("once") == 0 and cache.has("again") > 15


def test_a_kept_prefix_serves_a_shard_that_is_larger_than_the_cache() -> None:
    cache = Cache(100 * 8)
    cache.load("big", 300)
    kept = sorted(key[1] for key in cache.here)  # type: ignore[index]
    assert kept[:-1] == list(range(99))
    assert cache.load("big", 300) >= 90


def test_what_may_not_go_goes_to_the_back_of_its_queue() -> None:
    policy = S3FIFO()
    for name in "abcd":
        policy.entered(chunk(name))
    assert names(policy.victims(8, lambda c: c.shard not in ("a", "b"))) == ["c0"]
    assert names(policy.victims(99, lambda c: True)) == ["c0", "d0", "a0", "b0"]


def test_what_was_named_and_stayed_is_named_first_again() -> None:
    policy = S3FIFO()
    for name in "abc":
        for i in range(3):
            policy.entered(chunk(name, i))
    policy.used(chunk("a", 1))
    policy.used(chunk("a", 1))
    order = names(policy.victims(99, lambda c: True))
    assert order == ["a2", "a0", "b2", "b1", "b0", "c2", "c1", "c0", "a1"]
    for needed in (8, 40, 99):
        assert names(policy.victims(needed, lambda c: True)) == order[: -(-needed // 8)]
        next(policy.victims(needed, lambda c: True))
    assert policy.resident_bytes == 72


def test_what_was_named_is_a_ghost_if_it_goes_later_and_is_not_used_before() -> None:
    policy = S3FIFO()
    for name in "abcd":
        policy.entered(chunk(name))
    named = list(policy.victims(16, lambda c: True))
    policy.left(chunk("d"))  # dropped: nobody will ask for it
    assert "0 ghosts" in repr(policy)
    policy.used(chunk("b"))
    for each in named:
        policy.left(each)
    assert "1 ghosts" in repr(policy)


def test_a_pinned_majority_is_not_asked_about_for_each_chunk_that_goes() -> None:
    policy, asked = S3FIFO(), 0

    def may_go(c: Chunk) -> bool:
        nonlocal asked
        asked += 1
        return c.shard != "pinned"

    for i in range(2000):
        policy.entered(chunk("pinned", i))
    for i in range(2000):
        policy.entered(chunk("free", i))
    for _ in range(2000):
        for victim in policy.victims(8, may_go):
            policy.left(victim)
    assert asked <= 2000 + 2 * 2000 and policy.resident_bytes == 16_000


class Paper:
    """The algorithm of the paper, written down again, in bytes: queues of single chunks, and a fixed capacity. But one
    use in the small queue is enough."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.small: deque[str] = deque()
        self.main: deque[str] = deque()
        self.ghosts: OrderedDict[str, int] = OrderedDict()
        self.sizes: dict[str, int] = {}
        self.uses: dict[str, int] = {}

    def held(self, queue: deque[str]) -> int:
        return sum(self.sizes[name] for name in queue)

    def get(self, name: str, size: int) -> bool:
        if name in self.sizes:
            self.uses[name] = min(3, self.uses[name] + 1)
            return True
        while sum(self.sizes.values()) + size > self.capacity_bytes:
            self.evict()
        (self.main if self.ghosts.pop(name, None) else self.small).append(name)
        self.sizes[name], self.uses[name] = size, 0
        return False

    def evict(self) -> None:
        room = sum(self.sizes.values())
        while True:
            if self.small and (not self.main or self.held(self.small) >= 0.1 * room):
                name = self.small.popleft()
                if self.uses[name] < 1:
                    self.ghosts[name] = self.sizes.pop(name)
                    while sum(self.ghosts.values()) > (1 - 0.1) * room:
                        self.ghosts.popitem(last=False)
                    return
                self.uses[name] = 0
                self.main.append(name)
                continue
            name = self.main.popleft()
            if self.uses[name] == 0:
                del self.sizes[name]
                return
            self.uses[name] -= 1
            self.main.append(name)


@pytest.mark.parametrize("seed", range(20))
def test_it_is_the_paper_s_algorithm_where_each_shard_is_one_chunk(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3fifo, "SAME_USE_SHARE", 0)
    rng = random.Random(seed)
    sizes = {f"s{i}": rng.randint(1, 9) for i in range(120)}
    weights = [1 / (i + 1) ** 0.8 for i in range(120)]
    cache, paper = Cache(150), Paper(150)
    for name in rng.choices(list(sizes), weights, k=1500):
        assert cache.get(chunk(name, 0, sizes[name])) == paper.get(name, sizes[name])
        assert {key[0] for key in cache.here} == set(paper.sizes)  # type: ignore[index]
