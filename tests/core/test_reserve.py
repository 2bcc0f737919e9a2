"""Room for all shards of a checkpoint or for none, and what becomes of files that were there before."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stepwell.chain import reserve
from stepwell.errors import TierError, TierFull
from stepwell.tiers.base import CheckpointKey, ShardKey
from stepwell.tiers.file import FileTier
from stepwell.tiers.wrap import Fault, Faulty

KEY = CheckpointKey("run", "step-000000001.1-1")
FIRST, SECOND = ShardKey(KEY, "a.safetensors"), ShardKey(KEY, "b.safetensors")
SIZE = 1 << 20


async def _no() -> bool:
    return False


async def _yes() -> bool:
    return True


@pytest.mark.parametrize("ours", [True, False])
def test_files_that_may_be_another_writer_s_by_now_are_not_given_back(tmp_path: Path, ours: bool) -> None:
    """Both have gone on from the same files; this one finds no room for all, and the other may have committed them."""

    async def scenario() -> None:
        tier = FileTier(tmp_path, name="disk", capacity_bytes=SIZE + (SIZE >> 1))
        await tier.start()
        with pytest.raises(TierFull):
            await reserve(tier, [(FIRST, SIZE), (SECOND, SIZE)], resume=True, ours=_yes if ours else _no)
        await tier.close()

    asyncio.run(scenario())
    assert (tmp_path / str(FIRST)).exists() is not ours


@pytest.mark.parametrize("resume", [True, False])
def test_what_a_tier_has_made_before_it_failed_stays_for_the_next_try(tmp_path: Path, resume: bool) -> None:
    async def scenario() -> None:
        tier = Faulty(FileTier(tmp_path, name="disk"), [Fault("reserve", 2)])
        await tier.start()
        with pytest.raises(TierError):
            await reserve(tier, [(FIRST, SIZE), (SECOND, SIZE)], resume=resume)
        assert (tmp_path / str(FIRST)).exists() is resume
        first, second = await reserve(tier, [(FIRST, SIZE), (SECOND, SIZE)], resume=resume)
        assert (first.resumed, second.resumed) == (resume, False)
        await tier.close()

    asyncio.run(scenario())
