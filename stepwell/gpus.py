"""The GPUs of this process: for each a native engine that copies to slots, one that copies from them, and the order
between those copies and what training has enqueued on its streams."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from stepwell.errors import StepwellError
from stepwell.fetching import Copier
from stepwell.hostmem import local_rank
from stepwell.native import AsyncEngine, DeviceEngine, Gathering, Latch, Mark, _kernels
from stepwell.tiers.host import Arena
from stepwell.tripwire import arm

log = logging.getLogger("stepwell")

CUDA = "libcuda.so.1"
_NONE: Mapping[int, Gathering] = {}


def current_stream(gpu: int) -> int:
    """The handle of the stream that torch enqueues work on now, on this thread."""
    import torch  # not before there is a tensor to copy: the command line does without

    return int(torch._C._cuda_getCurrentRawStream(gpu))  # as compiled code asks; `current_stream` makes an object


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    index: int
    down: AsyncEngine
    up: AsyncEngine
    stream: Callable[[int], int]
    make: Callable[[int, str], AsyncEngine]

    @cached_property
    def across(self) -> AsyncEngine:
        """What copies within its memory, made when first used."""
        return self.make(self.index, "across")

    @property
    def ways(self) -> list[AsyncEngine]:
        """All that have been made."""
        return [self.down, self.up, *([self.across] if "across" in self.__dict__ else [])]

    def mark(self, first: Gathering | None = None) -> Mark:
        """Copies with this mark come after all that the current stream was given until now. first: what it
        is given before."""
        return self._down.mark(self.stream(self.index), first)

    def release(self, latch: Latch) -> None:
        """The current stream goes on after the copies that a latch, which is at zero, stands for."""
        stream = self.stream(self.index)
        for way in self.ways:
            assert isinstance(way.engine, DeviceEngine)
            way.engine.release(latch, stream)

    def trouble(self, way: Copier) -> str:
        """The error that one of the two had last, in the driver's words; empty if it had none."""
        engine = way.engine if isinstance(way, AsyncEngine) else None
        return engine.last_error if isinstance(engine, DeviceEngine) and not engine.closed else ""

    def allocate(self, size_bytes: int) -> int:
        """The address of new memory of the GPU. Raises OSError if there is none. Any thread, as the next two."""
        return self._down.allocate(size_bytes)

    def free(self, address: int) -> None:
        """Gives it back; nothing may be using it."""
        self._down.free(address)

    def memory(self) -> tuple[int, int]:
        """Free and total bytes."""
        return self._down.memory()

    def lend(self, addresses: Sequence[int]) -> None:
        """Memory of the GPU that torch may have once it has no more of its own (see `tripwire`)."""
        self._down.lend(addresses)

    def take_back(self, addresses: Sequence[int]) -> list[bool]:
        """It may not any more; False for what it has taken."""
        return self._down.take_back(addresses)

    def trips(self) -> tuple[int, int]:
        """How often it has taken all that was lent, and how many bytes these were."""
        return self._down.trips()

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
        self._pinning: weakref.WeakKeyDictionary[Arena, asyncio.Task[None]] = weakref.WeakKeyDictionary()

    def marks(
        self,
        indices: Iterable[int],
        run: Callable[[Coroutine[Any, Any, None]], None],
        first: Mapping[int, Gathering] = _NONE,
    ) -> dict[int, Mark]:
        """For each of these GPUs, this moment of the caller's current stream. run: runs a coroutine on the event loop,
        for one that is not open yet. first: what those streams are given before."""
        for index in indices:
            if index not in self._open:
                run(self.open(index))
        return {index: self._open[index].mark(first.get(index)) for index in indices}

    def get(self, index: int) -> Gpu:
        return self._open[index]

    async def open(self, index: int) -> None:
        """Raises StepwellError if there is no such GPU."""
        if index in self._open:
            return
        down, up = (self._make(index, way) for way in ("down", "up"))
        self._open[index] = Gpu(index, down, up, self._stream, self._make)

    def _make(self, index: int, way: str) -> AsyncEngine:
        engine = DeviceEngine(f"gpu{index}-{way}", index, library=self._library)
        self._kernels.append(self._use_kernels(engine, index))
        return AsyncEngine(engine)

    async def device(self, index: int | None) -> Gpu:
        """A GPU, opened if it is not. None: this process's, of those of its node, or the first one where
        each process sees only its own. Raises StepwellError or OSError if there is no such GPU."""
        if index is None:
            index = next(iter(self._open), local_rank())
            try:
                await self.open(index)
            except (StepwellError, OSError):
                index = 0
        await self.open(index)
        arm(index)
        return self._open[index]

    def release(self, gpu: int, latch: Latch) -> None:
        """See `Gpu.release`."""
        self._open[gpu].release(latch)

    async def pin(self, arena: Arena, address: int | None = None, /) -> None:
        """Registers an arena's memory, also what it gets later, so that GPUs copy at their full rate, and without
        making the thread wait that asks them to. Returns once what is at `address` is registered; None: all that there
        is. What is in use first is registered first."""
        if not self._open:
            return
        pinning = self._pinning.get(arena)
        if pinning is None:
            pinning = self._pinning[arena] = asyncio.ensure_future(self._register(arena))
        if address is not None and not pinning.done():
            await asyncio.sleep(0)  # it has begun
            await arena.registered(address)
        elif address is None:
            await asyncio.shield(pinning)

    async def _register(self, arena: Arena) -> None:
        engine = next(iter(self._open.values()))._down

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
        for arena in list(self._pinning):
            arena.unregister()
        for gpu in self._open.values():
            for way in gpu.ways:
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
            handles = [module.get_function(name).kernel.ptr for name in _kernels.NAMES]
    except Exception as error:  # whatever NVRTC and the driver say: copies work without
        log.warning("small tensors are copied one by one: the GPU's kernels cannot be compiled: %s", error)
        return None
    engine.use_kernels(*handles)
    kept: object = module
    return kept
