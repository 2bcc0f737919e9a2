"""Where tensors are: in host memory, in a GPU's, or in the memory of another device.

The one place that knows. `stand_in` and `new` are for tests: with them, tensors in host memory stand for tensors of a
GPU, so that everything that GPUs need runs without one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

import torch

#: the place of host memory; GPUs are 0, 1, …, other devices are below it
HOST = -1
#: tensor -> the GPU that it shall be on; None: it is where it is
stand_in: Callable[[torch.Tensor], int | None] | None = None
#: makes tensors on a device
new: Callable[..., torch.Tensor] = torch.empty


def gpu_of(tensor: torch.Tensor) -> int | None:
    """The index of the GPU whose memory holds the tensor; None if none does."""
    if stand_in is not None:
        pretended = stand_in(tensor)
        if pretended is not None:
            return pretended
    return tensor.get_device() if tensor.is_cuda else None


def memory_for(device: torch.device | None) -> torch.device | None:
    """The device to make a tensor on so that it can be filled there, in the end for `device`; None: host memory."""
    if device is None or device.type == "cuda" or new is not torch.empty:
        return device
    return None


def places_of(tensors: Sequence[torch.Tensor], on_cpu: Sequence[bool]) -> list[int]:
    """Each tensor's GPU, HOST, or a number below it for memory of another device; empty if all are in host memory.

    on_cpu: `is_cpu` of each, which costs nothing more where the caller knows it.
    """
    if stand_in is None:
        if False not in on_cpu:
            return []
        if all(map(attrgetter("is_cuda"), tensors)):
            return list(map(torch.Tensor.get_device, tensors))
    places = [_place(tensor, here) for tensor, here in zip(tensors, on_cpu, strict=True)]
    return places if set(places) != {HOST} else []


def _place(tensor: torch.Tensor, on_cpu: bool) -> int:
    gpu = None if on_cpu and stand_in is None else gpu_of(tensor)
    if gpu is not None:
        return gpu
    return HOST if on_cpu else HOST - 1 - max(tensor.get_device(), 0)
