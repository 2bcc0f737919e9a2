"""What the lab says against what can be reckoned by hand: the real mover and policies on tiers of known speeds."""

from __future__ import annotations

import asyncio
import logging
import math
from pathlib import Path

import pytest

from stepwell.errors import ConfigError
from stepwell.lab import Outcome, Speed, Speeds, Workload, simulate
from stepwell.lab.synthetic import fleet, training
from stepwell.tracing import Closed, Event, Loaded, Prefetched, Restored, Saved, Start
from tests.lab.helpers import CHUNK, GB, HOST, MEMORY, NVME, PFS, SPEEDS, config

STATE = 48 * CHUNK
PARTS = {"model": STATE // 4, "optimizer": STATE - STATE // 4}


def saves(*moments: float, tail: float = 0.0) -> Workload:
    """Saves at these moments of the program; they block none of it."""
    events: list[Event] = [Saved(t=t, took=0.0, run="r", step=n, parts=PARTS) for n, t in enumerate(moments, 1)]
    return Workload("test", [[Start(), *events, Closed(t=moments[-1] + tail, took=0.0, run="r")]])


def seconds(outcome: Outcome, tier: str) -> list[float]:
    return [each.tiers[tier] for each in outcome.each if tier in each.tiers]


def test_a_save_blocks_for_the_copy_and_is_durable_after_the_write(tmp_path: Path) -> None:
    outcome = simulate(config(tmp_path, HOST, NVME), saves(10.0, 20.0), SPEEDS, memory_bytes=MEMORY)
    copy, write = STATE / (8 * GB), STATE / (2 * GB)
    assert [each.blocked_s for each in outcome.each] == pytest.approx([copy, copy], rel=0.05)
    assert seconds(outcome, "nvme") == pytest.approx([write, write], rel=0.05)
    assert outcome.edges == {"host -> nvme": 2 * STATE}
    assert outcome.closed and not outcome.trouble
    assert (outcome.saves.asked, outcome.saves.durable) == (2, 2)
    assert outcome.program_s == pytest.approx(20.0)


def test_a_state_that_host_memory_cannot_keep_blocks_nearly_as_long_as_its_writing(tmp_path: Path) -> None:
    small = HOST.replace("8GiB", "200MiB")
    outcome = simulate(config(tmp_path, small, NVME), saves(10.0), SPEEDS, memory_bytes=MEMORY)
    [save] = outcome.each
    assert 0.5 * save.tiers["nvme"] < save.blocked_s <= save.tiers["nvme"]
    assert "host" not in save.tiers


def test_a_flush_begins_where_the_save_ends_and_the_limit_of_the_config_holds(tmp_path: Path) -> None:
    slow = PFS + 'bandwidth = "100MB/s"\n'
    outcome = simulate(config(tmp_path, HOST, NVME, slow), saves(10.0), SPEEDS, memory_bytes=MEMORY)
    [took] = seconds(outcome, "pfs")
    assert took == pytest.approx(STATE / (GB / 10), rel=0.05)  # it takes chunks from host memory, beside the writing
    assert outcome.edges["host -> pfs"] == STATE


def test_rules_of_the_config_decide_what_goes_where_and_what_stays(tmp_path: Path) -> None:
    chosen = config(
        tmp_path, HOST, NVME + "retain = { last = 2 }\n", PFS + "flush = [{ every_steps = 3 }]\n"
    )  # fmt: skip
    outcome = simulate(chosen, saves(*range(10, 80, 10)), SPEEDS, memory_bytes=MEMORY)
    nvme, pfs = outcome.tiers[1], outcome.tiers[2]
    assert (nvme.committed, nvme.most_bytes) == (7, 3 * STATE)
    assert [each.step for each in outcome.each if "pfs" in each.tiers] == [1, 3, 6, 7]  # and the newest, at the end
    assert pfs.most_bytes == 4 * STATE


def test_without_room_saves_wait_or_are_skipped_as_on_pressure_says(tmp_path: Path) -> None:
    tight = NVME + 'capacity = "900MB"\nretain = { last = 1 }\n'
    pfs = PFS + 'flush = "all"\n'
    block = config(tmp_path, HOST, tight, pfs, name="block.toml")
    skip = config(tmp_path, HOST, tight, pfs, head='on_pressure = "skip"\n', name="skip.toml")
    waits = simulate(block, saves(1.0, 1.05, 1.1), SPEEDS, memory_bytes=MEMORY)
    skips = simulate(skip, saves(1.0, 1.05, 1.1), SPEEDS, memory_bytes=MEMORY)
    assert waits.saves.durable == 3 and waits.saves.blocked_max_s > 0.1
    assert skips.saves.skipped >= 1 and skips.saves.durable + skips.saves.skipped == 3
    assert skips.saves.blocked_max_s < waits.saves.blocked_max_s
    assert any("on_pressure" in line for line in skips.trouble)


def test_a_restart_reads_from_the_nearest_tier_that_outlived_it(tmp_path: Path) -> None:
    def failing(level: str) -> Workload:
        events: list[Event] = [
            Start(), Saved(t=10.0, took=0.0, run="r", step=1, parts=PARTS), Start(after=30.0, lost=level),
            Restored(t=60.0, took=0.0, run="r", parts=PARTS),
        ]  # fmt: skip
        return Workload("test", [events])

    chosen = config(tmp_path, HOST, NVME, PFS)
    shared = config(tmp_path, HOST + "shared = true\n", NVME, PFS, name="shared.toml")
    for made, level, tier, speed in (
        (chosen, "process", "nvme", 4 * GB), (chosen, "reboot", "nvme", 4 * GB), (chosen, "node-loss", "pfs", GB),
        (shared, "process", "host", 8 * GB), (shared, "reboot", "nvme", 4 * GB),
    ):  # fmt: skip
        outcome = simulate(made, failing(level), SPEEDS, memory_bytes=MEMORY)
        assert outcome.restores.sources == {tier: STATE}, (level, tier)
        [failure] = outcome.failures
        assert failure.restore_s == pytest.approx(STATE / speed, rel=0.1)
        assert failure.lost_s == pytest.approx(30.0 + STATE / (8 * GB), rel=0.01)
        assert (failure.level, failure.step) == (level, 1)


@pytest.mark.parametrize(("shared", "source"), [(False, "nvme"), (True, "host")])
def test_the_next_process_finds_shared_memory_also_after_a_clean_end(tmp_path: Path, shared: bool, source: str) -> None:
    events: list[Event] = [
        Start(), Saved(t=10.0, took=0.0, run="r", step=1, parts=PARTS), Closed(t=11.0, took=0.0, run="r"), Start(),
        Restored(t=5.0, took=0.0, run="r", parts=PARTS), Closed(t=6.0, took=0.0, run="r"),
        Restored(t=7.0, took=0.0, run="r", parts=PARTS),
    ]  # fmt: skip
    chosen = config(tmp_path, HOST + f"shared = {str(shared).lower()}\n", NVME)
    outcome = simulate(chosen, Workload("test", [events]), SPEEDS, memory_bytes=MEMORY)
    assert outcome.restores.sources == {source: 2 * STATE}
    assert outcome.failures == []


def test_what_had_not_got_there_in_time_is_lost_with_the_node(tmp_path: Path) -> None:
    events: list[Event] = [
        Start(), Saved(t=10.0, took=0.0, run="r", step=1, parts=PARTS),
        Saved(t=40.0, took=0.0, run="r", step=2, parts=PARTS), Start(after=0.3, lost="node-loss"),
        Restored(t=60.0, took=0.0, run="r", parts=PARTS), Saved(t=70.0, took=0.0, run="r", step=3, parts=PARTS),
    ]  # fmt: skip
    outcome = simulate(config(tmp_path, HOST, NVME, PFS), Workload("test", [events]), SPEEDS, memory_bytes=MEMORY)
    [failure] = outcome.failures
    assert failure.step == 1
    assert failure.lost_s == pytest.approx(30.3, abs=0.3)
    assert outcome.each[-1].tiers.keys() == {"host", "nvme", "pfs"}  # training went on from step 1


def test_the_cost_of_a_failure_is_half_an_interval_and_the_lag(tmp_path: Path) -> None:
    outcome = simulate(
        config(tmp_path, HOST, NVME, PFS), saves(*range(100, 2100, 100)), SPEEDS, memory_bytes=MEMORY,
        failures={"process": 86400.0, "node-loss": 10 * 86400.0},
    )  # fmt: skip
    process, node = outcome.exposed
    assert process.lost_mean_s == pytest.approx(50 + STATE / (2 * GB), rel=0.03)
    assert node.lost_mean_s == pytest.approx(50 + STATE / (GB / 2), rel=0.03)
    assert process.lost_max_s == pytest.approx(100 + STATE / (2 * GB), rel=0.03)
    assert process.restore_s == pytest.approx(STATE / (4 * GB), rel=0.05)
    assert process.restore_s is not None
    assert process.per_day_s == pytest.approx(process.lost_mean_s + process.restore_s)
    assert node.per_day_s is not None and node.restore_s is not None
    assert node.per_day_s == pytest.approx((node.lost_mean_s + node.restore_s) / 10)


def test_ranks_share_the_node_and_commit_as_one(tmp_path: Path) -> None:
    one = simulate(
        config(tmp_path, HOST, NVME), training(state=STATE, every=10, iteration=1.0, saves=3), SPEEDS,
        memory_bytes=MEMORY,
    )  # fmt: skip
    two = simulate(
        config(tmp_path, HOST, NVME), training(state=STATE, every=10, iteration=1.0, saves=3, ranks=2), SPEEDS,
        memory_bytes=MEMORY,
    )  # fmt: skip
    assert two.saves.asked == two.saves.durable == 6
    assert two.tiers[1].committed == 3
    assert two.tiers[1].written_bytes == pytest.approx(one.tiers[1].written_bytes, rel=0.01)
    assert two.tiers[1].seconds_mean == pytest.approx(one.tiers[1].seconds_mean, rel=0.05)
    assert two.saves.blocked_mean_s == pytest.approx(one.saves.blocked_mean_s / 2, rel=0.1)


def test_the_same_seed_is_the_same_outcome(tmp_path: Path) -> None:
    chosen = config(tmp_path, HOST, NVME, PFS)
    work = training(
        state=STATE, every=10, iteration=1.0, saves=6, failures={"process": 30.0, "node-loss": 80.0}, seed=5
    )
    first, again = (simulate(chosen, work, SPEEDS, memory_bytes=MEMORY, seed=1) for _ in range(2))
    assert first == again
    assert len(first.failures) > 0


def test_it_runs_where_an_event_loop_runs_and_leaves_other_logs_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tight = config(tmp_path, HOST, NVME + 'capacity = "500MB"\n')

    async def notebook() -> Outcome:
        task = asyncio.create_task(asyncio.sleep(0))
        outcome = simulate(tight, saves(1.0, 9.0), SPEEDS, memory_bytes=MEMORY)
        await task
        return outcome

    with caplog.at_level(logging.DEBUG, "stepwell"):
        outcome = asyncio.run(notebook())
        logging.getLogger("stepwell").warning("heard")
    assert (outcome.saves.durable, outcome.saves.failed) == (1, 1)
    assert "no room" in outcome.trouble[0]
    assert [record.message for record in caplog.records if record.name == "stepwell"] == ["heard"]


def test_models_that_fit_are_read_from_the_last_tier_once(tmp_path: Path) -> None:
    work = fleet(models=3, state=32 * CHUNK, requests=30, gap=5.0, seed=2)
    outcome = simulate(config(tmp_path, HOST, NVME, PFS), work, SPEEDS, memory_bytes=MEMORY)
    asked = len({event.ref for event in work.ranks[0] if isinstance(event, Loaded)})
    assert outcome.loads.count == 30 and not outcome.loads.failed
    assert outcome.loads.sources == {"pfs": asked * 32 * CHUNK, "host": (30 - asked) * 32 * CHUNK}
    assert math.isclose(sum(outcome.loads.shares.values()), 1.0)
    assert outcome.exposed == [] and outcome.saves.asked == 0


def test_a_prefetch_makes_the_load_that_follows_quick(tmp_path: Path) -> None:
    files = {"model.safetensors": 32 * CHUNK}
    load = Loaded(t=30.0, took=0.0, ref="m", files=files)
    ahead = Prefetched(t=1.0, run="", refs=["m"])
    chosen = config(tmp_path, HOST, NVME, PFS)
    cold = simulate(chosen, Workload("t", [[Start(), load]], {"m": files}), SPEEDS, memory_bytes=MEMORY)
    warm = simulate(chosen, Workload("t", [[Start(), ahead, load]], {"m": files}), SPEEDS, memory_bytes=MEMORY)
    assert cold.loads.sources == {"pfs": 32 * CHUNK}
    assert warm.loads.sources == {"host": 32 * CHUNK}
    assert warm.loads.seconds_mean < cold.loads.seconds_mean / 3


def test_a_policy_that_looks_ahead_has_the_newest_in_memory_before_it_is_restored(tmp_path: Path) -> None:
    events: list[Event] = [
        Start(), Saved(t=1.0, took=0.0, run="r", step=1, parts=PARTS), Start(after=30.0, lost="reboot"),
        Restored(t=20.0, took=0.0, run="r", parts=PARTS),
    ]  # fmt: skip
    work = Workload("test", [events])
    ahead = config(tmp_path, HOST + 'prefetch = "newest"\n', NVME, name="ahead.toml")
    usual = simulate(config(tmp_path, HOST, NVME), work, SPEEDS, memory_bytes=MEMORY)
    warm = simulate(ahead, work, SPEEDS, memory_bytes=MEMORY)
    assert usual.restores.sources == {"nvme": STATE} and warm.restores.sources == {"host": STATE}
    assert warm.restores.seconds_mean < 0.6 * usual.restores.seconds_mean


def test_a_load_of_some_chunks_reads_only_those(tmp_path: Path) -> None:
    files = {"model.safetensors": 32 * CHUNK}
    load = Loaded(t=1.0, took=0.0, ref="m", files=files, chunks={"model.safetensors": [(0, 2), (9, 1)]})
    outcome = simulate(
        config(tmp_path, HOST, NVME), Workload("t", [[Start(), load]], {"m": files}), SPEEDS, memory_bytes=MEMORY
    )
    assert outcome.loads.sources == {"nvme": 3 * CHUNK}


def test_what_a_trace_restores_first_was_there_before(tmp_path: Path) -> None:
    events: list[Event] = [Start(), Restored(t=1.0, took=0.0, run="r", step=None, found=40, parts=PARTS)]
    outcome = simulate(config(tmp_path, HOST, NVME, PFS), Workload("t", [events]), SPEEDS, memory_bytes=MEMORY)
    assert outcome.restores.sources == {"pfs": STATE}
    assert outcome.restores.seconds_mean == pytest.approx(STATE / GB, rel=0.05)


def test_a_tier_without_a_speed_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"how fast tier pfs is.*stepwell lab probe"):
        simulate(config(tmp_path, HOST, NVME, PFS), saves(1.0), Speeds(GB, {"nvme": Speed(GB, GB)}))


def test_a_host_tier_without_a_size_is_what_the_first_save_would_make_it(tmp_path: Path) -> None:
    grows = HOST.replace('capacity = "8GiB"\n', "")
    roomy = simulate(config(tmp_path, grows, NVME), saves(1.0, 20.0), SPEEDS, memory_bytes=MEMORY)
    tight = simulate(config(tmp_path, grows, NVME), saves(1.0, 20.0), SPEEDS, memory_bytes=1 << 30)
    assert all("host" in each.tiers for each in roomy.each)
    assert not any("host" in each.tiers for each in tight.each)
