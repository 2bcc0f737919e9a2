"""The GPUs of this process: for each a native engine that copies to slots, one that copies from them, and the order
between those copies and what training has enqueued on its streams."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from stepwell.fetching import Copier
from stepwell.native import AsyncEngine, DeviceEngine, Latch, Mark, _kernels
from stepwell.tiers.host import Arena

log = logging.getLogger("stepwell")

CUDA = "libcuda.so.1"


def current_stream(gpu: int) -> int:
    """The handle of the stream that torch enqueues work on now, on this thread."""
    import torch  # not before there is a tensor to copy: the command line does without

    return int(torch.cuda.current_stream(gpu).cuda_stream)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU."""

    index: int
    down: AsyncEngine
    up: AsyncEngine
    stream: Callable[[int], int]

    def mark(self) -> Mark:
        """Copies with this mark come after all that the current stream was given until now."""
        return self._down.mark(self.stream(self.index))

    def release(self, latch: Latch) -> None:
        """The current stream goes on after the copies that a latch, which is at zero, stands for."""
        self._down.release(latch, self.stream(self.index))

    def trouble(self, way: Copier) -> str:
        """The error that one of the two had last, in the driver's words; empty if it had none."""
        engine = way.engine if isinstance(way, AsyncEngine) else None
        return engine.last_error if isinstance(engine, DeviceEngine) and not engine.closed else ""

    @property
    def _down(self) -> DeviceEngine:
        assert isinstance(self.down.engine, DeviceEngine)
        return self.down.engine


class Gpus:
    """Opened when first used. `open` runs on the event loop, `get` on any thread."""

    def __init__(
        self,
        library: str = CUDA,
        stream: Callable[[int], int] = current_stream,
        kernels: Callable[[DeviceEngine, int], object | None] | None = None,
    ) -> None:
        """stream: the handle of the current stream of a GPU. kernels: gives an engine its kernels."""
        self._library, self._stream, self._use_kernels = library, stream, kernels or use_kernels
        self._kernels: list[object | None] = []  # held as long as engines may launch them
        self._open: dict[int, Gpu] = {}
        self._pinned: weakref.WeakSet[Arena] = weakref.WeakSet()

    def marks(self, indices: Iterable[int], run: Callable[[Coroutine[Any, Any, None]], None]) -> dict[int, Mark]:
        """For each of these GPUs, this moment of the caller's current stream. run: runs a coroutine on the event loop,
        for one that is not open yet."""
        for index in indices:
            if index not in self._open:
                run(self.open(index))
        return {index: self._open[index].mark() for index in indices}

    def get(self, index: int) -> Gpu:
        return self._open[index]

    async def open(self, index: int) -> None:
        """Raises StepwellError if there is no such GPU."""
        if index in self._open:
            return
        down, up = (DeviceEngine(f"gpu{index}-{way}", index, library=self._library) for way in ("down", "up"))
        self._kernels += [self._use_kernels(engine, index) for engine in (down, up)]
        self._open[index] = Gpu(index, AsyncEngine(down), AsyncEngine(up), self._stream)

    def release(self, gpu: int, latch: Latch) -> None:
        """See `Gpu.release`."""
        self._open[gpu].release(latch)

    async def pin(self, arena: Arena) -> None:
        """Registers an arena's memory, also what it gets later, so that GPUs copy at their full rate, and without
        making the thread wait that asks them to."""
        if arena in self._pinned or not self._open:
            return
        engine = next(iter(self._open.values()))._down
        self._pinned.add(arena)

        def pin(address: int, size_bytes: int) -> bool:
            with contextlib.suppress(RuntimeError):  # the engine was closed meanwhile: nothing is copied any more
                if engine.pin(address, size_bytes):
                    return True
                refusal = engine.pin_refusal
                log.warning("host memory cannot be pinned, so copies from and to GPUs are slow: %s", refusal)
            return False

        await arena.register(pin, engine.unpin)

    def close(self) -> None:
        """What was pinned is given back before."""
        for arena in list(self._pinned):
            arena.unregister()
        for gpu in self._open.values():
            for way in (gpu.down, gpu.up):
                way.close()
                way.engine.close()
        self._open.clear()


def use_kernels(engine: DeviceEngine, index: int) -> object | None:
    """Lets an engine gather small tensors on the GPU, where CuPy can compile that. Returns what must live as long."""
    try:
        import cupy  # type: ignore[import-not-found, unused-ignore]  # where there is a GPU
    except ImportError:
        return None
    try:
        with cupy.cuda.Device(index):
            module = cupy.RawModule(code=_kernels.SOURCE)
            handles = [module.get_function(name).kernel.ptr for name in (_kernels.GATHER, _kernels.SCATTER)]
    except Exception as error:  # whatever NVRTC and the driver say: copies work without
        log.warning("small tensors are copied one by one: the GPU's kernels cannot be compiled: %s", error)
        return None
    engine.use_kernels(*handles)
    kept: object = module
    return kept
