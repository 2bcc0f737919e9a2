"""GPUs for tests of whole stores, where there is none: see `fakecuda` and `standing`."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from stepwell.gpus import Gpus
from stepwell.native import DeviceEngine
from stepwell.runtime import Runtime
from tests.fakecuda import GATHER, MOVE, SCATTER, FakeCuda
from tests.state.standing import Standing, standing


@contextmanager
def stand_in(driver: FakeCuda, patch: pytest.MonkeyPatch, *, kernels: bool) -> Iterator[tuple[Standing, int]]:
    """What is put on a GPU's memory meanwhile, and the stream that training enqueues on; all that was taken of the
    driver is given back at the end."""
    driver.reset()
    before, stream, runtime = driver.owned(), driver.stream(), Runtime.get()

    def use(engine: DeviceEngine, index: int) -> None:
        if kernels:
            engine.use_kernels(GATHER, SCATTER, MOVE)

    made = Gpus(driver.path, stream=lambda gpu: stream, kernels=use)
    patch.setattr(runtime, "gpus", made)

    async def close() -> None:
        made.close()

    try:
        with standing() as on:
            yield on, stream
    finally:
        driver.reset()
        driver.finish(stream)
        runtime.run(close())
        driver.end_stream(stream)
    gc.collect()  # an error that was raised knows the marks of its reads
    assert driver.owned() == before, f"{driver.owned()}, and before {before}"
