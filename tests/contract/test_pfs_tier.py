"""The driver for shared file systems keeps the contract, with all its wrappers around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepwell.native import probe_uring
from stepwell.tiers.base import Tier
from stepwell.tiers.pfs import PfsTier
from tests.contract.suite import Place, TierContract
from tests.contract.test_file_tier import WAYS, FilePlace


class PfsPlace(FilePlace):
    def make(self, *, capacity_bytes: int | None = None) -> Tier:
        self.root.mkdir(exist_ok=True)
        return PfsTier(self.root, capacity_bytes=capacity_bytes, delete_pause_s=0, **self.options)


class TestPfs(TierContract):
    @pytest.fixture(params=["ring-direct", "threads-buffered"])
    def place(self, request: pytest.FixtureRequest, tmp_path: Path) -> Place:
        if request.param.startswith("ring") and not probe_uring()[0]:
            pytest.skip(f"no io_uring: {probe_uring()[1]}")
        return PfsPlace(tmp_path / "root", WAYS[request.param])
