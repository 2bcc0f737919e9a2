"""What ranks say of a commit: a word that is there counts, and nobody waits for one that will not come."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stepwell.commit import Committer
from stepwell.errors import SaveFailed, StoreClosed, WaitTimeout
from stepwell.format.names import Attempt
from stepwell.jobs import Job, JobStore, LocalStore
from stepwell.tiers.memory import MemoryTier
from tests.core.virtual import on_virtual_time

GIVEN_UP = "call-1/given-up"


class Ended(LocalStore):
    """Of a job whose rank 0 is gone."""

    def put(self, key: str, value: bytes) -> None:
        raise RuntimeError("broken pipe")


def committer(rank: int, store: JobStore) -> Committer:
    writership: Any = None
    found = Committer("run", Job(rank, 2, store, None, 0), writership, "group", 60.0)
    found._homes = ["node-a", "node-a"]
    return found


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("given_up", [False, True])
@pytest.mark.parametrize("said", [False, True])
def test_a_word_counts_if_it_is_there(said: bool, given_up: bool, left: bool) -> None:
    async def play() -> None:
        store = LocalStore()
        waiting = asyncio.ensure_future(committer(0, store).word(1, "its part", "rank 1's part", GIVEN_UP))
        await asyncio.sleep(1)
        if said:
            store.put("its part", b"here")
        if given_up:
            store.put(GIVEN_UP, b"rank 1: no room")
        if left:
            committer(1, store).leave()
        if said:
            assert await waiting == b"here"
        elif given_up or left:
            with pytest.raises(SaveFailed, match="gave this save up: rank 1"):
                await asyncio.wait_for(waiting, 1)
        else:
            with pytest.raises(WaitTimeout, match="rank 1's part did not come within 60 s"):
                await waiting

    on_virtual_time(play)


def test_of_a_flush_a_rank_that_has_left_is_named() -> None:
    async def play() -> None:
        store = LocalStore()
        committer(1, store).leave()
        with pytest.raises(StoreClosed, match="rank 1 has closed its store; its part does not come"):
            await committer(0, store).word(1, "its part", "its part")
        assert committer(0, store).has_left(1) and not committer(0, store).has_left(0)

    on_virtual_time(play)


def test_whoever_has_announced_a_save_hears_that_it_is_given_up() -> None:
    async def play() -> None:
        store, tier, attempt = LocalStore(), MemoryTier(), Attempt(1, 1, 7)
        committer(1, store).withdraw(tier, attempt)  # not the rank that commits
        assert not store._values
        committer(0, store).withdraw(tier, attempt)
        assert list(store._values.values()) == [b""]

    on_virtual_time(play)


def test_a_job_whose_store_is_gone_can_still_end() -> None:
    committer(0, Ended()).leave()
    committer(0, Ended()).withdraw(MemoryTier(), Attempt(1, 1, 7))
