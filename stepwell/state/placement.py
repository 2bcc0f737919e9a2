"""Where stored bytes go: one buffer a label, in place where a live tensor can take the bytes as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from stepwell.format.collecting import paused
from stepwell.state import whereabouts
from stepwell.state.alias import extent_bytes
from stepwell.state.classes import loaded_class
from stepwell.state.dtypes import CASTABLE, RAW, STORED
from stepwell.state.skeleton import Leaf, Skeleton
from stepwell.state.whereabouts import HOST, memory_for, places_of


@dataclass(frozen=True, slots=True)
class Fill:
    """`tensor` (contiguous, in host memory or on a GPU: see `gpu_of`) must receive the stored bytes of `label`."""

    label: str
    tensor: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes


@dataclass
class Placement:
    """What must be read, and what happens after. Nothing live changes before `finish`, except by the fills."""

    fills: list[Fill]
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)
    _finish: Callable[[], Any] | None = None

    @property
    def gpus(self) -> list[int]:
        """The GPUs that fills are on."""
        tensors = [fill.tensor for fill in self.fills]
        places = places_of(tensors, [tensor.is_cpu for tensor in tensors])
        return sorted({place for place in places if place > HOST})

    def finish(self) -> Any:
        """Once all fills hold their bytes: completes the restore and returns the state or the new tree. Once only."""
        finish, self._finish = self._finish, None
        if finish is None:
            raise RuntimeError("this placement is finished already")
        with paused(), torch.no_grad():
            return finish()


class Tensors:
    """The tensors of one restore. Before the read: who wants which leaf; after it: the values.

    device: where new tensors shall be; None: in host memory, unless a target is elsewhere.
    """

    def __init__(
        self, skeleton: Skeleton, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        self.leaves = skeleton.leaves
        self.groups = skeleton.groups
        self.device = device
        self.dtype = dtype
        self._fills: dict[str, torch.Tensor] = {}
        self._memory = memory_for(device)
        self._wanted: dict[
            str, tuple[int, torch.device | None]
        ] = {}  # label -> leaf whose memory is not made yet, where
        self._taken: set[int] = set()  # addresses of live tensors that are filled
        self._images: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._buffers: dict[int, torch.Tensor] = {}

    def fills(self) -> list[Fill]:
        """All buffers to be read, none of them empty. Only now is memory taken."""
        for label, (index, device) in self._wanted.items():
            leaf = self.leaves[index]
            if leaf.notes.of is not None:
                leaf = self.leaves[leaf.notes.of]
            self._fills[label] = _empty(leaf.shape, leaf.dtype, None, device)
        self._wanted.clear()
        return [Fill(label, tensor) for label, tensor in self._fills.items() if tensor.nbytes]

    def want(self, index: int, device: torch.device | None = None) -> None:
        """A new tensor will be made of this leaf, where all are made or, without such a place, on `device`."""
        self._want_in(index, self._memory if device is None else memory_for(device))

    def want_for(self, index: int, target: torch.Tensor) -> None:
        """A new tensor will be made of this leaf, only to be copied into `target`."""
        same = target.dtype is self.leaves[index].dtype  # else it may be much larger than what is there
        self._want_in(index, memory_for(target.device) if same else None)

    def want_bytes(self, index: int) -> None:
        """The bytes of this leaf will be asked for."""
        self._want_in(index, None)

    def _want_in(self, index: int, memory: torch.device | None) -> None:
        label = self.leaves[index].label
        if label not in self._fills and label not in self._wanted:
            self._wanted[label] = index, memory

    def take(self, index: int, target: torch.Tensor) -> bool:
        """True if `target` itself will be filled with the stored bytes of the leaf: nothing else is to be done."""
        leaf = self.leaves[index]
        if (
            target.dtype is not leaf.dtype
            or target.shape != leaf.shape
            or leaf.label in self._fills
            or leaf.label in self._wanted
            or not (target.is_cpu or target.is_cuda)
            or not target.is_contiguous()
            or target.is_neg()
            or target.is_conj()
            or (leaf.notes.of is not None and leaf.notes.strides is not None)
        ):
            return False
        address = target.data_ptr()
        if address in self._taken or not address:
            return False  # two stored tensors for one live one (the last wins, in `put`), or no memory
        self._taken.add(address)
        plain = target.detach() if target.requires_grad or type(target) is not torch.Tensor else target
        self._fills[leaf.label] = plain
        return True

    def fit(self, index: int, target: torch.Tensor) -> str:
        """Why the leaf cannot be restored into this tensor; "" if it can (perhaps with a cast)."""
        leaf = self.leaves[index]
        if tuple(target.shape) != leaf.shape:
            return f"saved shape {list(leaf.shape)}, here {list(target.shape)}"
        if target.layout is not torch.strided:
            return f"saved dense, here {target.layout}"
        if leaf.dtype != target.dtype:
            both = leaf.dtype in CASTABLE and target.dtype in CASTABLE
            if not both or (leaf.dtype.is_complex and not target.dtype.is_complex):
                return f"saved {leaf.dtype}, here {target.dtype}: there is no conversion"
        strides = zip(target.shape, target.stride(), strict=True)
        if target.numel() and any(size > 1 and stride == 0 for size, stride in strides):
            return "elements of the tensor here share memory, so it cannot be written"
        return ""

    def put(self, index: int, target: torch.Tensor) -> None:
        """After the read: gives `target` the values of the leaf."""
        filled = self._fills.get(self.leaves[index].label)
        if filled is not None and filled.data_ptr() == target.data_ptr():
            if filled.shape == target.shape and target.is_contiguous():
                return
        source = self._image(index)
        plain = target.detach()
        if plain.dtype == source.dtype and not (plain.is_conj() or plain.is_neg()):
            raw = RAW[source.itemsize]
            plain.view(raw).copy_(source.view(raw))
        else:
            plain.copy_(source.to(plain.device))  # there first: it converts faster

    def value(self, index: int) -> torch.Tensor:
        """After the read: a new tensor with the leaf's values, sharing memory as it did when it was saved."""
        found = self._values.get(index)
        if found is None:
            found = self._values[index] = self._make(index)
        return found

    def bytes_of(self, index: int) -> torch.Tensor:
        """After the read: the stored bytes of a leaf, as a flat tensor of uint8 in host memory."""
        return self._fills[self.leaves[index].label].reshape(-1).view(torch.uint8).cpu()

    def _make(self, index: int) -> torch.Tensor:
        leaf = self.leaves[index]
        notes = leaf.notes
        if notes.same and notes.of is not None:
            return self.value(notes.of)
        tensor = self._image(index)
        tensor = tensor.detach() if notes.of is not None else tensor
        if notes.cls is not None:
            tensor = _as_class(tensor, notes.cls, notes.grad)
        if notes.grad and not tensor.requires_grad and (tensor.is_floating_point() or tensor.is_complex()):
            tensor.requires_grad_(True)
        return tensor

    def _image(self, index: int) -> torch.Tensor:
        """The leaf as plain data, in memory laid out as it was."""
        found = self._images.get(index)
        if found is not None:
            return found
        leaf = self.leaves[index]
        notes = leaf.notes
        if notes.of is not None:
            base = self._image(notes.of)
            tied = base if notes.strides is None else base.as_strided(leaf.shape, notes.strides, base.storage_offset())
            self._images[index] = tied
            return tied
        filled = self._fills[leaf.label]
        image = filled
        if notes.strides is not None and notes.place is None:
            image = _copied(filled, _empty(leaf.shape, leaf.dtype, notes.strides, filled.device))
        elif notes.place is not None and not self._casts(leaf):
            image = _copied(filled, self._placed(leaf, notes.place, filled.device))
        if self.device is not None and image.device != self.device:
            image = image.to(self.device)
        if self._casts(leaf):
            image = image.to(self.dtype)
        if image is not filled and index not in self._tied:
            del self._fills[leaf.label]  # so that there are not two of all
        self._images[index] = image
        return image

    @cached_property
    def _tied(self) -> set[int | None]:
        """Leaves whose bytes are others', too."""
        return {leaf.notes.of for leaf in self.leaves}

    def _casts(self, leaf: Leaf) -> bool:
        return self.dtype is not None and leaf.dtype.is_floating_point and leaf.dtype != self.dtype

    def _placed(self, leaf: Leaf, place: tuple[int, int, tuple[int, ...]], device: torch.device) -> torch.Tensor:
        group, offset, strides = place
        buffer = self._buffers.get(group)
        if buffer is None:
            buffer = self._buffers[group] = torch.zeros(
                -(-self.groups[group] // 16) * 16, dtype=torch.uint8, device=self.device or device
            )
        itemsize = leaf.dtype.itemsize
        assert offset + extent_bytes(leaf.shape, strides, itemsize) <= self.groups[group]
        return buffer.view(leaf.dtype).as_strided(leaf.shape, strides, offset // itemsize)


def _empty(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    strides: tuple[int, ...] | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """New memory, by way of a dtype that torch can allocate without warnings. device: None for host memory."""
    made = dtype if dtype in STORED else RAW[dtype.itemsize]
    if strides is not None:
        empty = torch.empty_strided(shape, strides, dtype=made, device=device or "cpu")
    elif device is None:
        empty = torch.empty(shape, dtype=made)
    else:
        empty = whereabouts.new(shape, dtype=made, device=device)
    return empty if made is dtype else empty.view(dtype)


def _copied(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    raw = RAW[source.itemsize]
    target.view(raw).copy_(source.view(raw))
    return target


def _as_class(tensor: torch.Tensor, name: str, grad: bool) -> torch.Tensor:
    """The tensor as the class it was saved with, if that class is loaded here; its plain data otherwise."""
    if name == "torch.nn.parameter:Parameter":
        return torch.nn.Parameter(tensor, requires_grad=grad)
    cls = loaded_class(name)
    if cls is None or not issubclass(cls, torch.Tensor):
        return tensor
    if getattr(cls, "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__:
        return tensor  # it would not know its data
    return tensor.as_subclass(cls)
