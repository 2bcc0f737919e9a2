"""Cases B15 (errors keep no state) and G1 (the reason is logged)."""

from __future__ import annotations

import errno
import gc
import weakref
from pathlib import Path

import pytest
import torch

import stepwell
from stepwell.tiers.file import FileTier
from tests.cases.helpers import script
from tests.cases.test_io import UNDER_SECCOMP


def test_B15_a_failed_save_keeps_nothing_either(tmp_path: Path) -> None:
    disk = FileTier(tmp_path / "disk", name="disk", capacity_bytes=1_000_000)
    weight = torch.ones(1_000_000)
    alive = weakref.ref(weight)
    with pytest.raises(stepwell.SaveFailed) as caught, stepwell.open(tiers=[disk], run="run") as store:
        save = store.save(1, {"w": weight})
        del weight
        save.wait()
    caught.value.__traceback__ = None
    gc.collect()
    assert alive() is None


def test_G1_the_reason_is_logged_once(tmp_path: Path) -> None:
    done = script(UNDER_SECCOMP, errno.EPERM, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("stepwell") and "io_uring" in line]
    assert len(lines) == 1 and ("seccomp" in lines[0] or "built without liburing" in lines[0])
