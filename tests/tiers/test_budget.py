"""A capacity is a node's: its ranks, each a process of its own, never take more together."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from stepwell.tiers.base import CheckpointKey, Refused, Reservation, ShardKey
from stepwell.tiers.file import FileTier
from tests.contract.suite import SHARD, data_of, put, save
from tests.tiers.helpers import on

MB = 1 << 20
ROOT = Path(__file__).parents[2]
RANK = """
import asyncio, sys
from stepwell.tiers.base import CheckpointKey, Reservation, ShardKey
from stepwell.tiers.file import FileTier

async def main(rank, root):
    tier = FileTier(root, capacity_bytes=10 << 20, siblings=True)
    await tier.start()
    print("ready", flush=True)
    sys.stdin.readline()
    keys = [ShardKey(CheckpointKey("run", f"step-00000000{i}.1-1"), f"rank{rank}.safetensors") for i in range(6)]
    answers = await asyncio.gather(*(tier.reserve(key, 1 << 20) for key in keys))
    granted = [answer for answer in answers if isinstance(answer, Reservation)]
    print(len(granted), flush=True)
    sys.stdin.readline()
    for each in granted:
        await tier.abort(each)
    await tier.close()

asyncio.run(main(*sys.argv[1:]))
"""


def test_processes_reserve_no_more_together_than_the_capacity(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "root")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": "."},
        )
        for rank in range(3)
    ]  # fmt: skip

    def everybody(word: str = "") -> list[str]:
        said = []
        for rank in ranks:
            assert rank.stdin is not None
            if word:
                rank.stdin.write(word + "\n")
                rank.stdin.flush()
        for rank in ranks:
            assert rank.stdout is not None
            said.append(rank.stdout.readline().strip())
        return said

    try:
        assert everybody() == ["ready"] * 3
        granted = [int(count) for count in everybody("go")]
        sizes = [file.stat().st_size for file in (tmp_path / "root").rglob("*.safetensors")]
        assert sum(granted) == 10 and sizes == [MB] * 10
        everybody("end")
        assert [rank.wait(60) for rank in ranks] == [0, 0, 0]
        assert not list((tmp_path / "root").rglob("*.safetensors"))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            for pipe in (rank.stdin, rank.stdout):
                assert pipe is not None
                pipe.close()


def test_what_another_process_has_committed_counts_without_a_scan(tmp_path: Path) -> None:
    async def scenario(tier: FileTier) -> None:
        other = FileTier(tmp_path / "root", capacity_bytes=4 * MB, siblings=True)
        await other.start()
        await save(other, SHARD, data_of(3 * MB))
        mine = ShardKey(CheckpointKey("run", "step-2"), "model.safetensors")
        refused = await tier.reserve(mine, 2 * MB)
        assert isinstance(refused, Refused) and refused.reason == "full"
        assert refused.free_bytes == MB and "ranks share" in refused.detail
        await other.drop([SHARD.checkpoint])
        granted = await tier.reserve(mine, 4 * MB)
        assert isinstance(granted, Reservation)
        await put(tier, mine, data_of(4 * MB))
        again = await tier.reserve(mine, 4 * MB)  # in the place of what was begun
        assert isinstance(again, Reservation)
        await tier.abort(again)
        await other.close()

    on(FileTier(tmp_path / "root", capacity_bytes=4 * MB, siblings=True), scenario)


def test_a_rank_that_gives_up_while_it_waits_holds_up_nobody(tmp_path: Path) -> None:
    async def scenario(tier: FileTier) -> None:
        keys = [ShardKey(CheckpointKey("run", f"step-{i}"), "model.safetensors") for i in range(8)]
        asking = [asyncio.ensure_future(tier.reserve(key, MB)) for key in keys]
        await asyncio.sleep(0)
        for each in asking[::2]:
            each.cancel()
        answers = await asyncio.gather(*asking, return_exceptions=True)
        granted = [answer for answer in answers if isinstance(answer, Reservation)]
        assert granted
        for reservation in granted:
            await tier.abort(reservation)
        assert isinstance(await tier.reserve(keys[0], 4 * MB), Reservation)

    on(FileTier(tmp_path / "root", capacity_bytes=4 * MB, siblings=True), scenario)
