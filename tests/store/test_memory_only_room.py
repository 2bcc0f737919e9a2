"""How much room saves take that stay in memory: what is on its way there is counted once."""

from __future__ import annotations

from pathlib import Path

import torch

import stepwell
from stepwell.tiers.base import CheckpointKey, ShardKey
from stepwell.tiers.host import Priority

MIB = 1 << 20


def test_what_has_come_of_a_promise_is_counted_once(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    config = tmp_path / "config.toml"
    config.write_text(
        f"""
[[tier]]
name = "host"
driver = "host"
capacity = "{8 * (15 + 2)}MiB"

[[tier]]
name = "disk"
driver = "file"
path = "{tmp_path / "disk"}"
flush = "at-close"
"""
    )
    state = {"model": {"w": torch.zeros(39 * MIB, dtype=torch.uint8)}}  # five chunks with the header
    with stepwell.open(config, run="run") as store:
        store.save(1, state).wait("host")
        host = store.mover.host
        assert host is not None

        async def look() -> tuple[int, int, int]:
            shard = ShardKey(CheckpointKey("run", "step-000000002.1-2"), "model.safetensors")
            await host.reserve(shard, 39 * MIB + 4096)
            before = host.awaited_slots
            for number in range(3):
                slot = host.arena.take_now(Priority.SNAPSHOT, kept=True)
                assert slot is not None and host.arena.place(slot, shard, number, 8 * MIB)
                host.arena.filled(slot)
                host.arena.release(slot)
            found = before, host.awaited_slots, host.promised_slots
            await host.drop([shard])
            return found

        assert store._runtime.run(look()) == (5, 2, 5)
