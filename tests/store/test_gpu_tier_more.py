"""What goes wrong with copies within GPU memory leaves nothing behind: no slot, and no copy that goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from stepwell import restoring, rollback
from stepwell.errors import SaveFailed, TierError
from stepwell.mover import Mover
from stepwell.packing import PackedShard
from stepwell.reader import open_checkpoint
from stepwell.reading import Reading
from stepwell.unpacking import Unpacking, begin
from tests.fakecuda import ENGINE, FakeCuda
from tests.store.gpubench import Bench, benches, opened
from tests.store.helpers import eventually


@pytest.fixture
def bench(driver: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with benches(driver, monkeypatch) as made:
        yield made


def _state(bench: Bench) -> dict[str, torch.nn.Linear]:
    """Two parts, so that there are two shards."""
    state = {part: torch.nn.Linear(300, 1000, bias=False) for part in ("a", "b")}
    bench.on.put(list(state.values()))
    return state


def test_a_copy_that_cannot_be_begun_leaves_no_slot(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of the shard whose copy was begun, nor of the other one."""
    begin, begun = PackedShard.begin, 0

    def once(self: PackedShard, chunk_bytes: int) -> None:
        nonlocal begun
        begun += 1
        if begun == 2:
            raise TierError("the engine is closed", todo="Nothing")
        begin(self, chunk_bytes)

    with opened(tmp_path) as store:
        state = _state(bench)
        store.save(1, state).wait("nvme")
        tier = store.mover.gpu
        assert tier is not None
        before = tier.arena.cached_bytes
        with monkeypatch.context() as patch:
            patch.setattr(PackedShard, "begin", once)
            with pytest.raises(SaveFailed, match="the engine is closed"):
                store.save(2, state).wait("nvme", timeout=20)
        assert begun == 2
        eventually(lambda: (tier.arena.in_use, tier.arena.cached_bytes, tier.promised_slots) == (0, before, 0))
        store.save(3, state).wait("gpu")


@pytest.mark.parametrize("trouble", ["with the other shard", "afterwards"])
def test_the_usual_way_begins_once_nothing_of_a_rollback_goes_on(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """What is still being copied must not land in what was restored."""
    seen, driver = list[str](), bench.driver

    def torn(mover: Mover, reading: Reading, lengths: Mapping[int, int], keep: object = None) -> Unpacking | None:
        seen.append("begun")
        if len(seen) == 2 and trouble == "with the other shard":
            raise TierError("the engine is closed", todo="Nothing")
        driver.hold(ENGINE)
        found = begin(mover, reading, lengths, keep)
        assert found is not None
        found.copying.add_done_callback(lambda done: seen.append("ended"))
        asyncio.get_running_loop().call_later(0.1, driver.go)
        return found

    async def failing(*arguments: Any) -> Any:
        raise TierError("no tier has its manifest", todo="Nothing")

    async def noted(*arguments: Any, **more: Any) -> Any:
        seen.append("usual")
        return await open_checkpoint(*arguments, **more)

    monkeypatch.setattr(rollback, "begin", torn)
    if trouble == "afterwards":
        monkeypatch.setattr(rollback, "describe", failing)
    monkeypatch.setattr(restoring, "open_checkpoint", noted)
    with opened(tmp_path) as store:
        state = _state(bench)
        then = {part: entry.weight.detach().clone() for part, entry in state.items()}
        for step in (1, 2, 3):  # from the second one on it is known which parts are only tensors
            store.save(step, state).wait("gpu")
        for entry in state.values():
            entry.weight.data += 1
        assert store.restore(state, step=3) is not None
        ended = ["ended"] if trouble == "with the other shard" else ["ended", "ended"]
        assert seen == ["begun", "begun", *ended, "usual"]
        assert all(torch.equal(entry.weight, then[part]) for part, entry in state.items())
        tier = store.mover.gpu
        assert tier is not None
        eventually(lambda: tier.arena.in_use == 0)
