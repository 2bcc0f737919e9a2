"""Cases A23 (wrong input), C16 (looking while others delete), G1 (the reason is logged)."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Literal

import pytest
import torch

import stepwell
from stepwell.errors import ConfigError, StateError
from stepwell.tiers.base import RecordKey
from stepwell.tiers.file import FileTier
from tests.cases.helpers import saved, script
from tests.cases.test_io import UNDER_SECCOMP


def test_C16_a_checkpoint_that_goes_while_one_looks_is_only_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention of this or another process deletes its manifest between the listing and the reading of it."""
    with stepwell.open(tiers=[FileTier(tmp_path, name="disk")], run="run") as store:
        for step in (1, 2, 3):
            store.save(step, {"w": torch.ones(3)}).wait()
    fetch = FileTier.fetch

    async def gone(tier: FileTier, key: RecordKey) -> bytes | None:
        return None if "step-000000001" in key.name and "manifest" in key.name else await fetch(tier, key)

    monkeypatch.setattr(FileTier, "fetch", gone)
    with stepwell.open(tiers=[FileTier(tmp_path, name="disk")], run="run", mode="r") as store:
        assert [checkpoint.step for checkpoint in store.checkpoints()] == [2, 3]
    assert stepwell.load(tmp_path / "run@2")["w"].sum() == 3


def test_G1_the_reason_is_logged_once(tmp_path: Path) -> None:
    done = script(UNDER_SECCOMP, errno.EPERM, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("stepwell") and "io_uring" in line]
    assert len(lines) == 1 and ("seccomp" in lines[0] or "built without liburing" in lines[0])


def test_A23_a_run_that_cannot_be_one_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a report, say")
    modes: tuple[Literal["w", "r"], ...] = ("w", "r")
    for target, reason in ((tmp_path / "file", "not a folder"), ("", "empty")):
        for mode in modes:
            with pytest.raises(ConfigError, match=reason):
                stepwell.open(target, mode=mode)


def test_A23_what_is_no_state_and_no_step_is_refused_by_name(tmp_path: Path) -> None:
    saved(tmp_path / "run", {"w": torch.ones(3)})
    with stepwell.open(tmp_path / "run", mode="r") as store:
        with pytest.raises(StateError, match="Linear.*dict"):
            store.restore(torch.nn.Linear(1, 1))  # type: ignore[arg-type]
        for step in ("latest", 1.0, True):
            with pytest.raises(ConfigError, match=f"integer.*{step!r}"):
                store.restore({"w": torch.ones(3)}, step)  # type: ignore[arg-type]
