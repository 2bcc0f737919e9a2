"""The policy that brings up the newest checkpoint: what it answers, and what a store does with that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

import stepwell
from stepwell.building import Node, build
from stepwell.config import load_config
from stepwell.errors import ConfigError
from stepwell.policies.base import CheckpointView, Closing, Committed, Event, Evicted, Found, Policy, Prefetch, Pressure
from stepwell.policies.prefetch import PrefetchNewest
from stepwell.promises import refusal
from tests.policies.views import checkpoint, view
from tests.prefetch.helpers import calls, check_books, here, hold, let_go, model, moved_bytes, state
from tests.store.helpers import disk, eventually, host

NEAR, FAR = checkpoint(100, ["nvme", "pfs"]), checkpoint(200, ["pfs"])


IDLE = ("host", "nvme", "pfs")


def answers(
    event: Event, *checkpoints: CheckpointView, brought: Sequence[tuple[str, str]] = (), idle: Sequence[str] = IDLE
) -> list[str]:
    seen = replace(view(*checkpoints, idle=idle), brought=frozenset(brought))
    return [move.checkpoint for move in PrefetchNewest().decide(event, seen) if refusal(move, seen) is None]


def test_it_asks_for_the_newest_that_is_not_there() -> None:
    for event in (Found(), Evicted("step-200", "host"), Committed("step-200", "pfs")):
        assert answers(event, NEAR, FAR) == ["step-200"]
    assert answers(Found(), NEAR, FAR, idle=()) == []  # a save is under way
    assert answers(Found(), NEAR, FAR, brought=[("step-200", "host")]) == []
    assert answers(Found(), NEAR, checkpoint(200, ["host", "nvme"])) == []
    assert answers(Found(), NEAR, checkpoint(200, [], partial=["pfs"])) == ["step-100"]
    assert answers(Found(), NEAR, checkpoint(200, ["pfs"], abandoned=True)) == ["step-100"]
    assert answers(Found()) == []
    assert answers(Closing(), NEAR) == answers(Pressure("nvme"), NEAR) == []


def test_parts_are_asked_for_as_far_as_there_are_some() -> None:
    seen = view(NEAR, idle=["host", "nvme", "pfs"])
    [move] = PrefetchNewest(parts=["model", "other"]).decide(Found(), seen)
    assert move.parts == ("model",) and refusal(move, seen) is None
    assert PrefetchNewest(parts=["other"]).decide(Found(), seen) == []
    with pytest.raises(ConfigError):
        PrefetchNewest(parts=[])


@pytest.mark.parametrize(
    ("move", "why"),
    [
        (Prefetch("step-200", "nvme", "because"), "storage tier is a flush"),
        (Prefetch("step-300", "host", "because"), "no such checkpoint"),
        (Prefetch("step-400", "host", "because"), "it is there already"),
        (Prefetch("step-500", "host", "because"), "on no other tier"),
        (Prefetch("step-600", "host", "because"), "already, or on its way"),
    ],
)
def test_what_no_policy_may_have_prefetched(move: Prefetch, why: str) -> None:
    there = [FAR, checkpoint(400, ["host", "nvme"]), checkpoint(500, []), checkpoint(600, ["pfs"])]
    seen = replace(view(*there), brought=frozenset([("step-600", "host")]))
    assert why in str(refusal(move, seen))
    small = replace(seen, tiers=tuple(replace(tier, capacity_bytes=0) for tier in seen.tiers))
    assert "larger than" in str(refusal(Prefetch("step-200", "host", "because"), small))


def saved(folder: Path, *steps: int) -> None:
    with stepwell.open(run="run", tiers=[disk(folder)], policies=[]) as store:
        for step in steps:
            store.save(step, state(float(step))).wait()


@pytest.mark.parametrize("mode", ["w", "r"])
def test_it_comes_when_a_store_is_opened_and_again_after_it_gave_way(tmp_path: Path, mode: str) -> None:
    saved(tmp_path, 1, 2)
    memory = host(24)  # 21 may stay; a checkpoint has 14 chunks
    policies: list[Policy] = [PrefetchNewest()]
    with stepwell.open(
        run="run", tiers=[memory, disk(tmp_path)], policies=policies, mode=mode,  # type: ignore[arg-type]
    ) as store:  # fmt: skip
        entries = store._writer.events.entries
        eventually(lambda: [entry.what for entry in entries] == ["prefetched"])
        assert entries[0].step == 2 and entries[0].tier == "host" and "likely next restore" in entries[0].reason
        whole = here(memory)
        before, into = moved_bytes(store), state(0.0)
        done = store.restore(into)
        assert done is not None and done.step == 2 and bool((into["model"]["first"] == 2).all())
        assert moved_bytes(store) == before and set(done.sources) == {"host"}
        slots = hold(store, 15)  # something more urgent
        assert set(here(memory)) < set(whole)
        let_go(store, slots)
        eventually(lambda: here(memory) == whole)
        eventually(lambda: len(entries) == 2)
        assert calls(lambda: store._writer.steering.outlook())[0].reason == "stays in memory until room is needed"
        check_books(memory)


def test_users_prefetches_come_before_it(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    memory = host(24)
    path = model(tmp_path, 7)
    with stepwell.open(run="run", tiers=[memory, disk(tmp_path)], policies=[PrefetchNewest()]) as store:
        store.prefetch([path, 1], max_bytes=21 << 20).wait(20)
        eventually(lambda: len(here(memory)) == 21)
        check_books(memory)


def test_what_is_too_large_is_refused_and_noted(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    memory = host(8)
    with stepwell.open(run="run", tiers=[memory, disk(tmp_path)], policies=[PrefetchNewest()]) as store:
        eventually(lambda: not store._writer.steering._bringing)
        store.save(2, state(2.0)).wait()
        assert not [entry for entry in store._writer.events.entries if entry.what == "prefetched"]


CONFIG = """
[[tier]]
name = "memory"
driver = "host"
capacity = "64MiB"
prefetch = {prefetch}

[[tier]]
name = "disk"
driver = "file"
path = "{path}"
"""


def test_a_config_says_it(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    for text, made in (('"newest"', "<PrefetchNewest to memory>"), ('{ parts = ["model"] }', "memory, only model>")):
        file.write_text(CONFIG.format(prefetch=text, path=tmp_path))
        modes: tuple[Literal["w"], Literal["r"]] = ("w", "r")
        for mode in modes:
            built = build(load_config(file), run="run", mode=mode, node=Node(1, 1 << 30))
            assert repr(built.policies[-1]).endswith(made)
    for text, wrong in (
        ('{ policy = "nobodys" }', "no policy 'nobodys'"),
        ("{ parts = [] }", "no part is named"),
        ('"all"', "prefetch"),
    ):
        file.write_text(CONFIG.format(prefetch=text, path=tmp_path))
        with pytest.raises(ConfigError, match=wrong) as caught:
            build(load_config(file), run="run", node=Node(1, 1 << 30))
        assert "tier[0].prefetch" in str(caught.value)
    file.write_text(CONFIG.replace('driver = "host"', 'driver = "memory"').format(prefetch='"newest"', path=tmp_path))
    with pytest.raises(ConfigError, match="memory driver has no 'prefetch'"):
        load_config(file)
