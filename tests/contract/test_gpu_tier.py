"""The gpu driver keeps the contract, on a driver that stands for a GPU and with slots of one page."""

from __future__ import annotations

import pytest

from stepwell.gpus import Gpus
from stepwell.policies.evict import LRU
from stepwell.tiers.base import Tier
from stepwell.tiers.gpu import GpuTier
from tests.contract.suite import Place, TierContract
from tests.contract.test_host_tier import SLOT_BYTES, HostPlace
from tests.fakecuda import FakeCuda

DEFAULT_BYTES = 256 << 20


class _Tier(GpuTier):
    """Takes the engines of its GPU along when it is closed: each scenario has an event loop of its own."""

    gpus: Gpus

    async def close(self) -> None:
        await super().close()
        self.gpus.close()


class GpuPlace(HostPlace):
    """Its arena's table and its books are looked at alike."""

    def __init__(self, driver: FakeCuda) -> None:
        self.driver = driver

    def make(self, *, capacity_bytes: int | None = None) -> Tier:
        gpus = Gpus(self.driver.path, stream=lambda gpu: 0, kernels=lambda engine, index: None)
        tier = _Tier(
            LRU(), capacity_bytes or DEFAULT_BYTES, chunk_bytes=SLOT_BYTES, headroom_bytes=0, device=gpus.device
        )
        tier.gpus = gpus
        self.tier = tier
        return tier


class TestGpu(TierContract):
    @pytest.fixture
    def place(self, driver: FakeCuda) -> Place:
        return GpuPlace(driver)
