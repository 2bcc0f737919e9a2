"""Saves that stay in memory where that is short: what one rank of two has no room for, and `on_pressure = "skip"`."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepwell import NotPlanned, SaveFailed, SaveSkipped
from tests.jobs import ended
from tests.store.helpers import eventually, steps
from tests.store.test_memory_only import config, folders, opened, restored, state

#: the second rank's part is larger than what it may keep: 24 of 64 MiB, beside the checkpoint before it
UNEVEN = """
root = sys.argv[1]
def state(step):
    return {"model": {f"rank{rank}.w": torch.full(((6 if rank else 1) << 20,), float(step * 10 + rank))}}
def restored(store):
    target = state(0)
    found = store.restore(target)
    assert bool((target["model"][f"rank{rank}.w"] == found.step * 10 + rank).all())
    return found.step
with stepwell.open(f"{root}/cluster.toml", run="run") as store:
    store.save(1, state(1)).wait("nvme")
    outcomes = []
    for step in (2, 3, 4, 5):
        try:
            save = store.save(step, state(step)).wait("host", timeout=60)
            outcomes.append("held")
        except (stepwell.SaveFailed, stepwell.StepwellError) as error:
            assert not isinstance(error, stepwell.WaitTimeout), error
            outcomes.append("failed")
    dist.barrier()
    told = [None] * world
    dist.all_gather_object(told, outcomes)
    assert told[0] == told[1], told  # what one rank lacks none has
    print(outcomes, flush=True)
    assert "failed" in outcomes
    newest = max([1] + [step for step, outcome in zip((2, 3, 4, 5), outcomes) if outcome == "held"])
    assert restored(store) == newest
    dist.barrier()
    store.save(100, state(100)).wait("nvme", timeout=60)
    assert restored(store) == 100
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_what_one_rank_has_no_room_for_fails_on_all_and_nobody_hangs(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    (tmp_path / "cluster.toml").write_text(
        f'[[tier]]\nname = "host"\ndriver = "host"\ncapacity = "64MiB"\n'
        f'[[tier]]\nname = "nvme"\ndriver = "file"\npath = "{tmp_path}/nvme"\nflush = {{ every_steps = 100 }}\n'
    )
    first, second = ended(UNEVEN, tmp_path)
    assert first.returncode == second.returncode == 0, first.stderr[-3000:] + second.stderr[-3000:]
    assert folders(tmp_path / "nvme") == [1, 100]


def test_skip_beside_saves_that_stay_in_memory(tmp_path: Path) -> None:
    """Those that stay wait for nothing slow, so they are not skipped; and the newest is never one that was."""
    with opened(config(tmp_path, more='on_pressure = "skip"')) as store:
        last = 0
        for step in range(1, 31):
            try:
                save = store.save(step, state(step)).wait("host")
            except SaveSkipped:
                assert step != 1
                continue
            last = step
            if step % 5 and step != 1:
                with pytest.raises(NotPlanned):
                    save.wait("nvme")
        assert last >= 28 and restored(store) == last
    assert last in folders(tmp_path / "nvme") and {1, 5} <= set(folders(tmp_path / "nvme"))


def test_skip_where_memory_is_too_small_for_what_should_stay(tmp_path: Path) -> None:
    more, nvme = 'on_pressure = "skip"', "flush = { every_steps = 100 }"
    with opened(config(tmp_path, more=more, nvme=nvme, host="48MiB")) as store:
        store.save(1, state(1)).wait("nvme")
        outcomes = []
        for step in (2, 3, 4, 5):
            try:
                store.save(step, state(step)).wait("host")
                outcomes.append(step)
            except SaveFailed as error:
                assert "room" in str(error)
        assert len(outcomes) < 4
        store.save(100, state(100)).wait("nvme")
        eventually(lambda: 100 in steps(store, "nvme"))
        assert restored(store) == 100
    assert folders(tmp_path / "nvme") == [1, 100]
