"""`verify_after_flush`: the last copy above a flushed one goes only when that one was looked at and found good."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import pytest

import stepwell
from stepwell.policies.base import Policy
from stepwell.policies.flush import FlushRule
from stepwell.policies.retain import Retain
from stepwell.runtime import Runtime
from stepwell.settings import Settings, TierOptions
from stepwell.store import CheckpointStore
from tests.store.helpers import disk, eventually, host, state, steps

Check = Literal["size", "digest"] | None


def opened(path: Path, check: Check) -> CheckpointStore:
    policies: list[Policy] = [FlushRule("far"), Retain("near", last=1)]
    tiers = [host(), disk(path, name="near"), disk(path, name="far")]
    return CheckpointStore("run", tiers, "w", Settings(), policies, options={"far": TierOptions(None, check)})


def damage(path: Path, how: str) -> None:
    [shard] = path.glob("far/run/step-000000001.*/model.safetensors")
    data = bytearray(shard.read_bytes())
    if how == "flip":
        data[200_000] ^= 1
        shard.write_bytes(data)
    else:
        shard.write_bytes(data[:-5000])


def verified(store: CheckpointStore) -> list[int]:
    return [entry.step for entry in store._writer.events.entries if entry.what == "verified"]


@pytest.mark.parametrize("check", ["size", "digest"])
def test_a_good_copy_is_looked_at_once_and_the_one_above_goes(tmp_path: Path, check: Check) -> None:
    with opened(tmp_path, check) as store:
        for step in range(1, 4):
            store.save(step, state(step)).wait("far")
        eventually(lambda: steps(store, "near") == [3])
        assert verified(store) == [1, 2]


def test_without_it_nothing_is_read_again(tmp_path: Path) -> None:
    with opened(tmp_path, None) as store:
        for step in range(1, 4):
            store.save(step, state(step)).wait("far")
        eventually(lambda: steps(store, "near") == [3])
        assert verified(store) == []


@pytest.mark.parametrize(("check", "how"), [("digest", "flip"), ("digest", "cut"), ("size", "cut")])
def test_a_bad_copy_is_found_before_the_good_one_goes_and_is_written_again(
    tmp_path: Path, check: Check, how: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, "stepwell")
    above: list[Path] = []  # what near held of step 1 as its bad copy had been written again; then it may go at once

    def look(record: logging.LogRecord) -> bool:
        if "has been written again" in record.getMessage():
            above.extend(tmp_path.glob("near/run/step-000000001.*/manifest.json"))
        return True

    monkeypatch.setattr(caplog.handler, "filters", [look])
    with opened(tmp_path, check) as store:
        store.save(1, state(1)).wait("far")
        damage(tmp_path, how)
        store.save(2, state(2)).wait("far")
        eventually(lambda: "has been written again" in caplog.text)
        assert "is bad, so the one above it stays" in caplog.text and above
        store.save(3, state(3)).wait("far")
        eventually(lambda: steps(store, "near") == [3])
    for copy in (tmp_path / "far" / "run").glob("step-*"):
        assert stepwell.load(copy, part="model")["w"].unique().tolist() == [float(copy.name[5:14])]


def test_a_copy_that_more_parts_have_come_to_is_looked_at_again(tmp_path: Path) -> None:
    tiers, options = [disk(tmp_path, name="near"), disk(tmp_path, name="far")], {"far": TierOptions(None, "digest")}
    with CheckpointStore("run", tiers, "w", Settings(), [], options=options) as store:
        store.save(1, state(1) | {"extra": [1]}).wait("near")
        [attempt] = store.catalog.holdings
        for parts, looks in ((["model"], 1), (["model"], 1), (None, 2), (None, 2)):
            store.flush(1, "far", parts=parts)
            Runtime.get().run(store._writer.steering._verifier.check_below(attempt, tiers[0]))
            assert verified(store) == [1] * looks
