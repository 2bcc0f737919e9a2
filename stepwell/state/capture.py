"""A state at one moment: its skeleton, its shard plans, and the memory that holds its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stepwell.errors import StateError
from stepwell.format.collecting import paused
from stepwell.state.alias import NO_ALIASES, Array, extent_bytes, find_aliases
from stepwell.state.dtypes import QUANTISED
from stepwell.state.encode import Encoder
from stepwell.state.plan import HEADER_SPLIT_BYTES, Plan, PlanCache, ShardPlan, Span, Structure, make_plan
from stepwell.state.skeleton import VERSION, part_names
from stepwell.state.source import ShardSource

_Tensor: Any = torch._C.TensorBase  # its descriptors, through map(), are the fastest way to ask 20,000 tensors


@dataclass(frozen=True, eq=False)
class Snapshot:
    """What `capture` found. Refers to the live tensors and keeps them alive; copies none that is contiguous.

    Until the sources' bytes have been copied, the state must not change.
    """

    skeleton: dict[str, Any]
    plan: Plan
    addresses: Array
    tensors: list[torch.Tensor]

    @property
    def shards(self) -> list[ShardPlan]:
        """The files to write, none if the state has no tensors."""
        return self.plan.shards

    @property
    def parts(self) -> dict[str, list[str]]:
        """Part name -> the files that hold its tensors (ties may make it refer to another part's file)."""
        return self.plan.parts

    @property
    def part_bytes(self) -> dict[str, int]:
        """Part name -> bytes of its tensors; every part of the state is named."""
        return self.plan.part_bytes

    @property
    def sidecars(self) -> dict[str, bytes]:
        """Small files to write beside the shards: the index of a split model."""
        return self.plan.sidecars

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return self.plan.nbytes

    def source(self, shard_index: int) -> ShardSource:
        """The bytes of one shard."""
        return ShardSource(self.plan.shards[shard_index], self.addresses, self.tensors)


def capture(
    state: Mapping[Any, Any],
    *,
    rank: int = 0,
    world: int = 1,
    plans: PlanCache | None = None,
    header_split_bytes: int = HEADER_SPLIT_BYTES,
) -> Snapshot:
    """Looks through a state; its top-level keys are its parts.

    Raises StateError, naming the key, if anything in it cannot be saved. plans: keeps the plan for the next
    capture of the same structure.
    """
    if not isinstance(state, Mapping):
        raise StateError(f"The state is a {type(state).__qualname__}", todo="Give a dict: part name -> value")
    with paused():
        return _capture(state, rank, world, plans if plans is not None else PlanCache(), header_split_bytes)


def _capture(state: Mapping[Any, Any], rank: int, world: int, plans: PlanCache, header_split_bytes: int) -> Snapshot:
    encoder, tree, spans = _walk(state, careful=False)
    addresses = _addresses(encoder)
    if addresses is None:
        encoder, tree, spans = _walk(state, careful=True)
        addresses = _addresses(encoder)
        assert addresses is not None, "a careful walk leaves only tensors with memory"
    tensors = encoder.tensors
    structure = _structure(encoder, spans, rank, world, header_split_bytes)
    lazy = dict(structure.lazy)
    extents = np.fromiter(map(_Tensor.nbytes.__get__, tensors), np.uint64, len(tensors))
    sizes = extents.tolist()
    for leaf, strides in lazy.items():
        extents[leaf] = extent_bytes(structure.shapes[leaf], strides, structure.dtypes[leaf].itemsize)
    aliases = find_aliases(tensors, addresses, extents) if tensors else NO_ALIASES
    plan = plans.plan((structure, aliases), lambda: make_plan(structure, aliases, sizes))
    skeleton = {
        "version": VERSION,
        "rank": rank,
        "world": world,
        "parts": [span.part for span in spans],
        "groups": plan.groups,
        "tensors": plan.rows,
        "tree": tree,
    }
    return Snapshot(skeleton, plan, addresses, tensors)


def _walk(state: Mapping[Any, Any], *, careful: bool) -> tuple[Encoder, list[Any], list[Span]]:
    encoder = Encoder(state, careful=careful)
    tree: list[Any] = ["d"]
    spans: list[Span] = []
    for part, (key, value) in zip(part_names(state), state.items(), strict=True):
        first = len(encoder.tensors)
        tree += encoder.encode_key(key, part), encoder.encode(value, part)
        spans.append(Span(part, first, len(encoder.tensors)))
    return encoder, tree, spans


def _addresses(encoder: Encoder) -> Array | None:
    """Where each tensor's data is; None if some tensor is not plain and the walk was not careful."""
    tensors = encoder.tensors
    try:
        pointers = list(map(_Tensor.data_ptr, tensors))
    except (RuntimeError, NotImplementedError):  # sparse and other layouts have no pointer
        return None
    if not encoder.careful:
        if not QUANTISED.isdisjoint(map(_Tensor.dtype.__get__, tensors)):
            return None
        if not all(pointers) and any(
            not p and (t.numel() or t.is_meta) for p, t in zip(pointers, tensors, strict=True)
        ):
            return None
    return np.array(pointers, dtype=np.uint64)


def _structure(encoder: Encoder, spans: list[Span], rank: int, world: int, header_split_bytes: int) -> Structure:
    tensors = encoder.tensors
    count = len(tensors)
    dtypes = tuple(map(_Tensor.dtype.__get__, tensors))
    grads = tuple(map(_Tensor.requires_grad.__get__, tensors))
    direct = np.fromiter(map(_Tensor.is_contiguous, tensors), np.bool_, count)
    direct &= np.fromiter(map(_Tensor.is_cpu.__get__, tensors), np.bool_, count)
    direct &= ~np.fromiter(map(_Tensor.is_neg, tensors), np.bool_, count)
    if any(dtype.is_complex for dtype in set(dtypes)):
        direct &= ~np.fromiter(map(_Tensor.is_conj, tensors), np.bool_, count)
    classes = tuple(map(type, tensors))
    if True in grads:
        for leaf, grad in enumerate(grads):
            if grad and classes[leaf] is torch.Tensor:
                tensors[leaf] = tensors[leaf].detach()  # so that no graph stays alive with the snapshot
    return Structure(
        names=tuple(encoder.names),
        spans=tuple(spans),
        dtypes=dtypes,
        shapes=tuple(map(_Tensor.shape.__get__, tensors)),
        classes=classes,
        grads=grads,
        lazy=tuple((int(leaf), tensors[leaf].stride()) for leaf in np.flatnonzero(~direct)),
        subclasses=tuple(sorted(encoder.classes.items())),
        replicated=frozenset(encoder.replicated),
        rank=rank,
        world=world,
        header_split_bytes=header_split_bytes,
    )
