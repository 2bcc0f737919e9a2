"""A state at one moment: its skeleton, its shard plans, and the memory that holds its bytes."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from stepwell.errors import StateError
from stepwell.state.alias import Array, find_aliases
from stepwell.state.cache import PlanCache
from stepwell.state.dtypes import QUANTISED
from stepwell.state.encode import Encoder
from stepwell.state.known import Changed
from stepwell.state.plan import HEADER_SPLIT_BYTES, Plan, ShardPlan
from stepwell.state.recall import Memory, Recalling, remember
from stepwell.state.skeleton import part_names
from stepwell.state.source import ShardSource, clone
from stepwell.state.structure import Span, Structure
from stepwell.state.watch import NO_GLANCE, Glance
from stepwell.state.whereabouts import HOST, places_of

_Tensor: Any = torch._C.TensorBase  # its methods and attributes, through map(), are the fastest way to ask a tensor
#: tensors that are asked everything before the next ones are: so many stay in the processor's caches meanwhile
_ASKED_TOGETHER = 512


@dataclass(frozen=True, eq=False)
class Snapshot:
    """What `capture` found. Refers to the live tensors and keeps them alive; copies none that is contiguous, and of
    the others only those on a GPU (`plan.clones`: there, in the order of the current stream).

    Until the sources' bytes have been copied, the state must not change; after that, `let_go`.
    """

    plan: Plan
    tree: list[Any]
    addresses: Array
    tensors: list[torch.Tensor]  # of each leaf, or a view of it
    storages: list[Any] = field(default_factory=list)  # see `hold`
    live: frozenset[str] = frozenset()  # parts of which each tensor is known to be the state's own, to be written to
    versions: bytes | None = None  # of each tensor, as 64-bit integers, where they were told at a glance

    @cached_property
    def skeleton(self) -> dict[str, Any]:
        """The typed tree that goes into the rank's record: see `skeleton`."""
        return {**self.plan.head, "tensors": self.plan.rows, "tree": self.tree}

    def encoded_skeleton(self) -> bytes:
        """The skeleton as JSON. Most of it is encoded once a plan."""
        return msgspec.json.encode({**self.plan.head, "tensors": self.plan.encoded_rows, "tree": self.tree})

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
        return ShardSource(self.plan.shards[shard_index], self.addresses, self.tensors, self.storages)

    def hold(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """Keeps the memory of these of the tensors (None: of all) alive also if they are given another meanwhile
        (`.data =`, `module.to`)."""
        if not self.storages:  # else that of each is kept already
            self.storages[:] = map(_Tensor.untyped_storage, self.tensors if tensors is None else tensors)

    def let_go(self) -> None:
        """Keeps the tensors alive no longer; what `source` gave must not be read any more. The rest stays."""
        self.tensors.clear()  # the sources share the lists
        self.storages.clear()


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
    if type(state) is not dict and not isinstance(state, Mapping):
        raise StateError(f"The state is a {type(state).__qualname__}", todo="Give a dict: part name -> value")
    collects = gc.isenabled()
    try:
        gc.disable()  # see `paused`, which is half a dozen calls: a training loop waits for them
        return _capture(state, rank, world, plans if plans is not None else PlanCache(), header_split_bytes)
    finally:
        if collects:
            gc.enable()


def _capture(state: Mapping[Any, Any], rank: int, world: int, plans: PlanCache, header_split_bytes: int) -> Snapshot:
    job = rank, world, header_split_bytes
    memories = [memory for memory in reversed(plans.memories) if memory.plan.structure.job == job]
    for memory in memories:
        met = memory.all_of(state)
        found = None if met is None else _recalled(*met, memory.parts, memory, plans)
        if found is not None:
            return found
    parts = part_names(state)
    for memory in memories:
        found = _recalled_by_walk(state, parts, memory, plans)
        if found is not None:
            return found
    encoder, tree, spans = _walk(state, parts, careful=False)
    answers = _ask(encoder)
    if answers is None:
        encoder, tree, spans = _walk(state, parts, careful=True)
        answers = _ask(encoder)
        assert answers is not None, "a careful walk leaves only tensors with memory"
    made = _structure(encoder, answers, spans, rank, world, header_split_bytes)
    structure = plans.known(made)
    addresses = _addresses(answers.pointers)
    aliases = find_aliases(encoder.tensors, addresses, structure.extents, structure.places)
    plan = plans.plan(structure, aliases)
    if structure is not made and not encoder.careful and plans.wants_memory:  # the state stays as it is, it seems
        kept = remember(encoder, plan, addresses)
        if kept is not None:
            plans.keep(kept)
    graphs = [leaf for leaf, grad in enumerate(made.grads) if grad and made.classes[leaf] is torch.Tensor]
    return _snapshot(plan, tree, addresses, encoder.tensors, graphs)


def _recalled_by_walk(
    state: Mapping[Any, Any], parts: Sequence[str], memory: Memory, plans: PlanCache
) -> Snapshot | None:
    """The capture of a state that is the one that the memory is about, up to values; None if it is another one."""
    structure = memory.plan.structure
    if [span.part for span in structure.spans] != parts:
        return None
    try:
        encoder, tree, spans = _walk(state, parts, careful=False, recall=Recalling(memory, state))
    except Changed:
        return None
    if not memory.knows(encoder, spans):
        return None
    live = memory.parts
    for leaf in encoder.made:  # few: the walk makes none of the tensors that it recalls
        live -= {span.part for span in spans if span.first <= leaf < span.stop}
    return _recalled(tree, encoder.tensors, live, memory, plans)


def _recalled(
    tree: list[Any], tensors: list[torch.Tensor], live: frozenset[str], memory: Memory, plans: PlanCache
) -> Snapshot | None:
    """The same, of what was found; None if the tensors are not those of the memory."""
    look = memory.look_at(tensors)
    if look is None:
        return None
    addresses, glance = look
    now = memory
    if addresses is not memory.addresses:
        structure = memory.plan.structure
        aliases = find_aliases(tensors, addresses, structure.extents, structure.places, memory.alone)
        plan = plans.plan(structure, aliases)
        now = replace(memory, plan=plan, addresses=addresses, again=memory.again.anew())
    plans.recalled(memory, now)
    return _snapshot(now.plan, tree, now.addresses, tensors, memory.graphs, live, glance)


def _addresses(pointers: list[int]) -> Array:
    """As an array that nobody changes by mistake, since snapshots share it."""
    made = np.array(pointers, dtype=np.uint64)
    made.flags.writeable = False
    return made


def _snapshot(
    plan: Plan,
    tree: list[Any],
    addresses: Array,
    tensors: list[torch.Tensor],
    graphs: Iterable[int],
    live: frozenset[str] = frozenset(),
    glance: Glance = NO_GLANCE,
) -> Snapshot:
    """graphs: leaves that keep a graph alive as they are."""
    for leaf in graphs:
        tensors[leaf] = tensors[leaf].detach()
    if plan.clones:
        addresses = addresses.copy()
        for leaf in plan.clones:
            tensors[leaf] = clone(tensors[leaf])
            addresses[leaf] = tensors[leaf].data_ptr()
    versions, storages = glance
    return Snapshot(plan, tree, addresses, tensors, storages or [], live, versions)


def _walk(
    state: Mapping[Any, Any], parts: Sequence[str], *, careful: bool, recall: Recalling | None = None
) -> tuple[Encoder, list[Any], list[Span]]:
    encoder = Encoder(state, careful=careful, recall=recall)
    tree: list[Any] = ["d"]
    spans: list[Span] = []
    for part, (key, value) in zip(parts, state.items(), strict=True):
        first = len(encoder.tensors)
        node = None if recall is None else recall.node_of_part(encoder, key, value, part)
        tree += (key, node) if node is not None else (encoder.encode_key(key, part), encoder.encode(value, part))
        spans.append(Span(part, first, len(encoder.tensors)))
    return encoder, tree, spans


class _Answers(NamedTuple):
    """What each tensor says of itself; a tensor of the walk is an index of every list."""

    pointers: list[int]
    dtypes: list[torch.dtype]
    shapes: list[torch.Size]
    grads: list[bool]
    contiguous: list[bool]
    on_cpu: list[bool]
    negated: list[bool]


_QUESTIONS: tuple[Any, ...] = (  # in the order of the answers
    _Tensor.data_ptr,
    attrgetter("dtype"),
    attrgetter("shape"),
    attrgetter("requires_grad"),
    _Tensor.is_contiguous,
    attrgetter("is_cpu"),
    _Tensor.is_neg,
)


def _ask(encoder: Encoder) -> _Answers | None:
    """The walk's tensors; None if some tensor is not plain and the walk was not careful."""
    tensors = encoder.tensors
    answers = _Answers([], [], [], [], [], [], [])
    pairs: list[tuple[list[Any], Any]] = list(zip(answers, _QUESTIONS, strict=True))
    try:
        for at in range(0, len(tensors), _ASKED_TOGETHER):
            some = tensors[at : at + _ASKED_TOGETHER]
            for answer, question in pairs:
                answer += map(question, some)
    except RuntimeError:  # sparse and other layouts have no pointer
        if encoder.careful:
            raise
        return None
    if not encoder.careful:
        if not QUANTISED.isdisjoint(answers.dtypes):
            return None
        pointers = answers.pointers
        if 0 in pointers and any(not p and (t.numel() or t.is_meta) for p, t in zip(pointers, tensors, strict=True)):
            return None
    return answers


def _structure(
    encoder: Encoder, answers: _Answers, spans: list[Span], rank: int, world: int, header_split_bytes: int
) -> Structure:
    tensors, grads = encoder.tensors, answers.grads
    classes = list(map(type, tensors))
    places = places_of(tensors, answers.on_cpu)
    lazy = [(leaf, tensors[leaf].stride()) for leaf in _indirect(tensors, answers, places)]
    return Structure(
        rank=rank,
        world=world,
        header_split_bytes=header_split_bytes,
        spans=spans,
        replicated=frozenset(encoder.replicated),
        subclasses=sorted(encoder.classes.items()),
        lazy=lazy,
        places=places,
        grads=grads,
        classes=classes,
        dtypes=answers.dtypes,
        shapes=answers.shapes,
        names=encoder.names,
    )


def _indirect(tensors: list[torch.Tensor], answers: _Answers, places: list[int]) -> list[int]:
    """The tensors whose bytes are not the memory that they point to, as a whole, in order, where it can be read."""
    direct = np.array(answers.contiguous, np.bool_)
    if places:
        direct &= np.array(places, np.intp) >= HOST
    if True in answers.negated:
        direct &= ~np.array(answers.negated, np.bool_)
    if any(dtype.is_complex for dtype in set(answers.dtypes)):
        direct &= ~np.fromiter(map(_Tensor.is_conj, tensors), np.bool_, len(tensors))
    return np.flatnonzero(~direct).tolist()
