"""Tensors in host memory that stand for tensors on GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from stepwell.state import whereabouts

T = TypeVar("T")


class Standing:
    """Which memory stands for which GPU's. A tensor is there with all that shares its storage.

    home: the GPU that stands for where new tensors are made, unless they must be in host memory; None: there, too.
    """

    def __init__(self) -> None:
        self.home: int | None = None
        self.made: list[torch.Tensor] = []
        self._gpus: dict[int, tuple[int, torch.UntypedStorage]] = {}

    def put(self, value: T, gpu: int = 0) -> T:
        """Lets all tensors inside a value (a tensor, module, optimizer's state, dict or list) be on a GPU."""
        if isinstance(value, torch.nn.Module):
            self.put([*value.parameters(), *value.buffers()], gpu)
        elif isinstance(value, torch.optim.Optimizer):
            self.put(list(value.state.values()), gpu)
        elif isinstance(value, torch.Tensor):
            storage = value.untyped_storage()  # held, so that its address is no other's
            self._gpus[storage.data_ptr()] = (gpu, storage)
        elif isinstance(value, dict | list | tuple):
            for item in value.values() if isinstance(value, dict) else value:
                self.put(item, gpu)
        return value

    def new(self, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A new tensor, at home."""
        made = torch.empty(shape, dtype=dtype, device=device)
        self.made.append(made)
        return made if self.home is None else self.put(made, self.home)

    def __call__(self, tensor: torch.Tensor) -> int | None:
        return self._gpus.get(tensor.untyped_storage().data_ptr(), (None,))[0]


@contextmanager
def standing() -> Iterator[Standing]:
    """What is `put` on a GPU is taken for a GPU's meanwhile."""
    assert whereabouts.stand_in is None
    found = Standing()
    whereabouts.stand_in, whereabouts.new = found, found.new
    try:
        yield found
    finally:
        whereabouts.stand_in, whereabouts.new = None, torch.empty
