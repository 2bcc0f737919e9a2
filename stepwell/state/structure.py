"""What a plan depends on, and what follows from it alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import torch

from stepwell.state.alias import Array, Places, extent_bytes
from stepwell.state.whereabouts import HOST


@dataclass(frozen=True, slots=True)
class Span:
    """One part: its name and the range of its leaves."""

    part: str
    first: int
    stop: int


@dataclass(frozen=True)
class Structure:
    """All of a state that a plan depends on, compared by value; what differs most cheaply comes first."""

    rank: int
    world: int
    header_split_bytes: int
    spans: list[Span]
    replicated: frozenset[int]
    subclasses: list[tuple[int, str]]
    lazy: list[tuple[int, tuple[int, ...]]]  # leaves that cannot be read where they are: index, strides
    places: list[int]  # where each leaf is, as `places_of` says
    grads: list[bool]
    classes: list[type]
    dtypes: list[torch.dtype]
    shapes: list[torch.Size]
    names: list[str]

    @cached_property
    def job(self) -> tuple[int, int, int]:
        """What is known before a walk: rank, world and where headers are split."""
        return self.rank, self.world, self.header_split_bytes

    @cached_property
    def widths(self) -> Array:
        """Bytes of an element of each leaf."""
        widths = {dtype: dtype.itemsize for dtype in set(self.dtypes)}
        return np.fromiter(map(widths.__getitem__, self.dtypes), np.uint64, len(self.dtypes))

    @cached_property
    def sizes(self) -> Array:
        """Bytes of each leaf's data."""
        return np.fromiter(map(prod, self.shapes), np.uint64, len(self.shapes)) * self.widths

    @cached_property
    def gpus(self) -> Places:
        """The GPU of each leaf; HOST for a leaf that is in no GPU's memory."""
        if not self.places:
            return np.full(len(self.names), HOST, np.intp)
        return np.maximum(np.array(self.places, np.intp), HOST)

    @cached_property
    def extents(self) -> Array:
        """Bytes of memory that each leaf reaches over."""
        extents = self.sizes.copy()
        for leaf, strides in self.lazy:
            extents[leaf] = extent_bytes(self.shapes[leaf], strides, self.dtypes[leaf].itemsize)
        return extents
