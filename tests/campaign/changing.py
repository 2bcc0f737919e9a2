"""What the hunter of torn snapshots saves: groups of tensors on a GPU, on what stands for one, or in host memory, each
changed in a way of its own.

A change sets every element of a tensor to one number, that of no other change nearby. So a tensor that holds two
numbers is torn, and one pass over it tells.
"""

from __future__ import annotations

import math
import random
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import stepwell
from tests.fakecuda import FakeCuda
from tests.state.standing import Standing

#: numbers that weights are set to: with what optimizers make of them, floats hold them exactly
NUMBERS = 1 << 20
#: torch puts smaller guarded tensors aside at once; what a stand-in's stream has not yet written would be missed
WRITTEN_BYTES_MIN = 4096
#: the longest that a GPU is kept busy before a change
BUSY_S = 0.001
BUSY_CYCLES = 2_000_000


class HostPlace:
    """Host memory: what changes there has changed at once."""

    def zeros(self, count: int) -> torch.Tensor:
        return self.put(torch.zeros(count))

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, with its memory in this place."""
        return tensor

    def settle(self) -> None:
        """Returns when operations of torch may follow on what was enqueued before."""

    def dawdle(self, rng: random.Random) -> None:
        """Lets what changes next come later, by a moment."""
        if rng.random() < 0.3:
            time.sleep(rng.random() * BUSY_S)

    def fill(self, tensors: Sequence[torch.Tensor], rng: random.Random) -> list[float]:
        """Changes tensors in place, in one of several ways; returns what each holds then."""
        self.settle()
        values = numbers(rng, len(tensors))
        way = rng.randrange(3)
        if way == 0:
            torch._foreach_zero_(tensors)  # type: ignore[arg-type]
            torch._foreach_add_(tensors, values)  # type: ignore[call-overload]
        else:
            for tensor, value in zip(tensors, values, strict=True):
                tensor.fill_(value) if way == 1 else tensor.copy_(torch.full_like(tensor, value))
        return values


class CudaPlace(HostPlace):
    """A real GPU."""

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cuda()

    def dawdle(self, rng: random.Random) -> None:
        if rng.random() < 0.6:
            torch.cuda._sleep(rng.randrange(BUSY_CYCLES))  # type: ignore[no-untyped-call]


class StandInPlace(HostPlace):
    """What stands for a GPU: torch's operations run at once on its memory, so they must wait for the stream."""

    def __init__(self, driver: FakeCuda, on: Standing, stream: int) -> None:
        self._driver, self._on, self._stream = driver, on, stream

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._on.put(tensor)

    def settle(self) -> None:
        self._driver.finish(self._stream)

    def dawdle(self, rng: random.Random) -> None:
        self._driver.slow(rng.choice((0.0, 0.0, 0.0, 0.0002)))

    def fill(self, tensors: Sequence[torch.Tensor], rng: random.Random) -> list[float]:
        """Enqueued, if all are large enough; then it may run much later."""
        if min(tensor.nbytes for tensor in tensors) < WRITTEN_BYTES_MIN:
            return super().fill(tensors, rng)
        values = []
        for tensor in tensors:
            byte = rng.randrange(1, 127)
            self._driver.write(self._stream, tensor.data_ptr(), byte, tensor.nbytes)
            values.append(struct.unpack("f", bytes([byte] * 4))[0])
        return values


def numbers(rng: random.Random, count: int) -> list[float]:
    first = rng.randrange(NUMBERS)
    return [float(first + at) for at in range(count)]


def sizes(rng: random.Random, count: int, largest_bytes: int, least_bytes: int = 4) -> list[int]:
    """Elements of so many tensors: as many small ones as large ones."""
    least, largest = math.log2(least_bytes // 4), math.log2(largest_bytes // 4)
    return [round(2 ** rng.uniform(least, largest)) for _ in range(count)]


class Group(ABC):
    """Tensors that are changed together."""

    def __init__(self, place: HostPlace, seed: int) -> None:
        self.place, self.rng = place, random.Random(seed)

    @property
    @abstractmethod
    def state(self) -> Mapping[str, Any]:
        """As it is saved and restored."""

    @property
    @abstractmethod
    def tensors(self) -> list[torch.Tensor]:
        """All that are in the state."""

    @property
    @abstractmethod
    def values(self) -> list[float]:
        """What each holds, once all that is enqueued has run."""

    @abstractmethod
    def guard(self, stores: Sequence[stepwell.CheckpointStore]) -> None:
        """Lets saves of these stores copy its tensors lazily. At most once."""

    @abstractmethod
    def change(self) -> None:
        """Changes all of them, when the stores let it."""


class Free(Group):
    """Guarded by nobody, and changed without a word."""

    def __init__(self, place: HostPlace, counts: Sequence[int], seed: int) -> None:
        super().__init__(place, seed)
        self._tensors, self._values = [place.zeros(count) for count in counts], [0.0] * len(counts)

    @property
    def state(self) -> Mapping[str, Any]:
        return {str(at): tensor for at, tensor in enumerate(self._tensors)}

    @property
    def tensors(self) -> list[torch.Tensor]:
        return self._tensors

    @property
    def values(self) -> list[float]:
        return self._values

    def guard(self, stores: Sequence[stepwell.CheckpointStore]) -> None:
        pass

    def change(self) -> None:
        self.place.dawdle(self.rng)
        self._values = HostPlace.fill(self.place, self._tensors, self.rng)


class Announced(Free):
    """Changed by a loop of one's own, after `before_update`."""

    def guard(self, stores: Sequence[stepwell.CheckpointStore]) -> None:
        self._stores = stores
        for store in stores:
            store.guard(*self._tensors)

    def change(self) -> None:
        self.place.dawdle(self.rng)
        for store in self._stores:
            store.before_update()
        self._values = self.place.fill(self._tensors, self.rng)


class Stepped(Group):
    """Changed by an optimizer's steps, together with its momentum, which the first step makes.

    With a learning rate and a momentum of one a step is m += g; w -= m: whole numbers stay whole numbers.
    """

    def __init__(self, place: HostPlace, counts: Sequence[int], seed: int, *, as_object: bool) -> None:
        """as_object: the optimizer itself is in the state; else its tensors."""
        super().__init__(place, seed)
        self._as_object = as_object
        self._weights = [torch.nn.Parameter(place.zeros(count)) for count in counts]
        self._gradients = [place.zeros(count) for count in counts]
        for weight, gradient in zip(self._weights, self._gradients, strict=True):
            weight.grad = gradient
        how: dict[str, bool] = self.rng.choice(({"fused": True}, {"foreach": True}, {"foreach": False}))
        self._optimizer = torch.optim.SGD(self._weights, lr=1.0, momentum=1.0, **how)
        self._now, self._momentum = [0.0] * len(counts), [0.0] * len(counts)

    def begin(self) -> Stepped:
        """The first step, which makes the rest of its state."""
        self.change()
        for tensor in self.momentum:
            self.place.put(tensor)
        return self

    @property
    def momentum(self) -> list[torch.Tensor]:
        return [self._optimizer.state[weight]["momentum_buffer"] for weight in self._weights]

    @property
    def state(self) -> Mapping[str, Any]:
        return {"weights": self._weights, "steps": self._optimizer if self._as_object else self.momentum}

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*self._weights, *self.momentum]

    @property
    def values(self) -> list[float]:
        return [*self._now, *self._momentum]

    def guard(self, stores: Sequence[stepwell.CheckpointStore]) -> None:
        for store in stores:
            store.guard(self._optimizer)
        self._optimizer.register_step_pre_hook(lambda *_: self.place.settle())

    def change(self) -> None:
        self.place.dawdle(self.rng)
        self.place.settle()
        wanted = numbers(self.rng, len(self._now))
        momentum = [old - new for old, new in zip(self._now, wanted, strict=True)]
        change = [new - old for old, new in zip(self._momentum, momentum, strict=True)]
        torch._foreach_zero_(self._gradients)
        torch._foreach_add_(self._gradients, change)
        self._optimizer.step()
        self._now, self._momentum = wanted, momentum


def wrong_tensors(groups: Sequence[Group], values: Sequence[Sequence[float]]) -> int:
    """How many tensors do not hold what they should, everywhere. They hold something else afterwards."""
    wrong = 0
    by_device: dict[torch.device, tuple[list[torch.Tensor], list[float]]] = {}
    for group, mine in zip(groups, values, strict=True):
        group.place.settle()
        for tensor, value in zip(group.tensors, mine, strict=True):
            tensors, expected = by_device.setdefault(tensor.device, ([], []))
            tensors.append(tensor.detach())
            expected.append(value)
    for device, (tensors, expected) in by_device.items():
        if device.type == "cpu":
            found = (tensor.aminmax() for tensor in tensors)
            wrong += sum(not low == high == value for (low, high), value in zip(found, expected, strict=True))
            torch._foreach_zero_(tensors)
        else:  # few kernels for all of them
            torch._foreach_sub_(tensors, expected)
            largest = torch.stack(list(torch._foreach_norm(tensors, math.inf)))
            wrong += int((largest != 0).sum())  # what is not a number is not zero
    return wrong
