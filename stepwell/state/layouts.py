"""Where in memory the metadata of tensors and the versions of dicts lie: found out, and proven, once in a process.

Asking 1,000 tensors through Python what they are takes a good part of a millisecond, for which training waits at every
save; and almost always they are what they were. Their metadata are bytes, so equal bytes say that. Neither torch nor
CPython promises where these lie. So it is found out from tensors and dicts that are changed in known ways, and relied
on only if each way to change them is seen. Else everything is asked, as ever.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from stepwell.native._objects import entries_again, study_entries, study_tensors, tensors_again

_WORD = 8
_COUNTS = 1  # the word of torch's object that counts references
_NEAR_BYTES = 32  # of an object that a word points to, a counter lies in these
_Tensor = torch.Tensor
#: classes that say nothing of their own; see `study_tensors`
PLAIN = (torch.Tensor, torch.nn.Parameter)


class Layout(NamedTuple):
    """In bytes from the begin of: the Python object; torch's object; its storage; its counter of versions."""

    torch_at: int
    size: int  # of torch's object
    storage_at: int
    data_at: int
    version_at: int
    counter_at: int
    gradients_at: int
    table: int  # what a plain tensor's object begins with: where its virtual functions are


class _Unknown(Exception):
    """It cannot be found out."""


@cache
def dict_version_at() -> int | None:
    """Where a dict has its version, in bytes; None where it has none (CPython 3.13), or this is not CPython."""
    try:
        sample = {"a": 1}
        before = _words(id(sample), dict.__basicsize__)
        sample["a"] = 2
        at = _only(_changed(before, _words(id(sample), dict.__basicsize__))) * _WORD
    except (_Unknown, OSError, struct.error):
        return None
    return at if all(_is_seen(change, at) for change in _DICT_CHANGES) else None


class _Thing:
    pass


def _set(thing: Any, value: object) -> None:
    thing.a = value


def _set_often(thing: Any) -> None:
    """The interpreter has shorter ways to do what it has done before."""
    for _ in range(100):
        _set(thing, object())


_DICT_CHANGES: tuple[Callable[[Any], object], ...] = (
    lambda thing: thing.__dict__.update(a=3),
    lambda thing: thing.__dict__.update(b=1),
    lambda thing: thing.__dict__.pop("a"),
    lambda thing: thing.__dict__.popitem(),
    lambda thing: thing.__dict__.clear(),
    lambda thing: thing.__dict__.setdefault("c", 1),
    lambda thing: thing.__dict__.__delitem__("a"),
    lambda thing: thing.__dict__.__ior__({"a": 4}),
    lambda thing: setattr(thing, "a", 5),
    lambda thing: setattr(thing, "z", 6),
    lambda thing: delattr(thing, "a"),
    _set_often,
)


def _is_seen(change: Callable[[Any], object], version_at: int) -> bool:
    """Whether a change of an object's dict is seen, and its looks are not; and that a dict in its place is another."""
    thing: Any = _Thing()
    thing.a, thing.b = 1, 2
    outer = {"k": thing.__dict__}
    record = study_entries(outer, version_at)
    if record is None or thing.a != 1 or len(thing.__dict__) != 2 or entries_again(outer, record, version_at) is None:
        return False
    change(thing)
    if entries_again(outer, record, version_at) is not None:
        return False
    record = study_entries(outer, version_at)
    outer["k"] = dict(thing.__dict__)
    return record is not None and entries_again(outer, record, version_at) is None


@cache
def tensor_layout() -> Layout | None:
    """None if it is not proven for this torch."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            layout = _found()
            proven = all(_tells(layout, make, change) for make, changes in _CHANGES for change in changes)
            return layout if proven and _counts(layout) else None
    except (_Unknown, OSError, struct.error, AttributeError, RuntimeError, TypeError):
        return None


def _found() -> Layout:
    plain, other = _plain(), torch.frombuffer(bytearray(64), dtype=torch.float32)
    inside = plain._cdata
    size = min(map(_usable_bytes, (inside, other._cdata))) // _WORD * _WORD
    words = _words(inside, size)
    storage_at = _only(_equal(words, plain.untyped_storage()._cdata))
    places = [
        {at for at in _equal(_words(storage, _usable_bytes(storage)), each.data_ptr())}
        for each in (plain, other)
        for storage in [each.untyped_storage()._cdata]
    ]
    wanting = _plain()
    before = _words(wanting._cdata, size)
    wanting.requires_grad_()
    gradients_at = _only(at for at in _changed(before, _words(wanting._cdata, size)) if not before[at])
    version_at, counter_at = _counter(size, {0, _COUNTS, storage_at, gradients_at})
    return Layout(
        torch_at=_only(_equal(_words(id(plain), type(plain).__basicsize__), inside)) * _WORD,
        size=size,
        storage_at=storage_at * _WORD,
        data_at=_only(set.intersection(*places)) * _WORD,
        version_at=version_at * _WORD,
        counter_at=counter_at,
        gradients_at=gradients_at * _WORD,
        table=words[0],
    )


def _counter(size: int, others: set[int]) -> tuple[int, int]:
    """The word that points to what counts a tensor's versions, and in which bytes that is."""
    found: list[set[tuple[int, int]]] = []
    for times in (3, 8, 77):
        tensor = _plain()
        for _ in range(times):
            tensor.add_(1)
        here = set()
        for at, word in enumerate(_words(tensor._cdata, size)):
            near = b"" if at in others else _read(word, _NEAR_BYTES)
            here |= {(at, 4 * part) for part, (value,) in enumerate(struct.iter_unpack("I", near)) if value == times}
        found.append(here)
    place: tuple[int, int] = _only(set.intersection(*found))
    return place


def _plain() -> torch.Tensor:
    return torch.zeros(4, 6, dtype=torch.float16, device="cpu")


def _deep() -> torch.Tensor:
    return torch.zeros(1, 2, 3, 4, 5, dtype=torch.float16, device="cpu")


def _parameter() -> torch.Tensor:
    return torch.nn.Parameter(_plain())


def _frozen() -> torch.Tensor:
    return torch.nn.Parameter(_plain(), requires_grad=False)


def _set_data(make: Callable[[_Tensor], _Tensor]) -> Callable[[_Tensor], object]:
    def change(tensor: _Tensor) -> None:
        tensor.data = make(tensor.detach())

    return change


def _exchange(tensor: _Tensor) -> None:
    torch.utils.swap_tensors(tensor, type(tensor)(_plain().double()))  # type: ignore[no-untyped-call]


#: what makes a tensor another one that is to be saved otherwise
_METADATA_CHANGES: tuple[Callable[[_Tensor], object], ...] = (
    _set_data(torch.clone),
    _set_data(lambda tensor: tensor.transpose(0, 1)),
    _set_data(lambda tensor: tensor.view(torch.bfloat16)),
    _set_data(lambda tensor: tensor[1:]),
    _set_data(lambda tensor: tensor.flatten()[1:].reshape(-1)),
    _set_data(torch.Tensor.double),
    lambda tensor: tensor.detach().untyped_storage().resize_(1 << 20),
)
_PLAIN_CHANGES: tuple[Callable[[_Tensor], object], ...] = (
    *_METADATA_CHANGES,
    lambda tensor: tensor.requires_grad_(True),
    lambda tensor: tensor.t_() if tensor.ndim == 2 else tensor.transpose_(1, 2),
    lambda tensor: tensor.unsqueeze_(0).squeeze_(0).unsqueeze_(0),
    lambda tensor: tensor.resize_(2, 3),
    lambda tensor: tensor.resize_(100, 100),
    lambda tensor: tensor.as_strided_((2, 2), (3, 1), 1),
    lambda tensor: tensor.set_(torch.zeros_like(tensor)),  # type: ignore[call-overload]
)
_PARAMETER_CHANGES: tuple[Callable[[_Tensor], object], ...] = (
    *_METADATA_CHANGES,
    lambda tensor: tensor.requires_grad_(not tensor.requires_grad),
    _exchange,
)
_CHANGES = (
    (_plain, _PLAIN_CHANGES),
    (_deep, _PLAIN_CHANGES),
    (_parameter, _PARAMETER_CHANGES),
    (_frozen, _PARAMETER_CHANGES),
)


def _tells(layout: Layout, make: Callable[[], _Tensor], change: Callable[[_Tensor], object]) -> bool:
    """Whether a tensor looks the same until it is changed, and then another one, but the same to who looks anew."""
    tensors = [_plain(), make(), _parameter()]
    record = study_tensors(tensors, PLAIN, layout)
    kept = [tensor.detach() for tensor in tensors]  # references that are counted
    if record is None or tensors_again(tensors, record, layout) is None:
        return False
    with torch.no_grad():
        change(tensors[1])
    del kept
    anew = study_tensors(tensors, PLAIN, layout)
    same = anew is None or tensors_again(tensors, anew, layout) is not None  # None: too many dimensions now
    return same and tensors_again(tensors, record, layout) is None


def _counts(layout: Layout) -> bool:
    """Whether the versions are those that torch gives, also of views, which share them."""
    base, parameter = _plain(), _parameter()
    tensors = [base, base.view(24), base.detach(), parameter, parameter.detach(), parameter.data]
    record = study_tensors(tensors, PLAIN, layout)
    with torch.no_grad():
        for tensor in (base, tensors[1], tensors[1], parameter, tensors[4], parameter, tensors[5]):
            now = None if record is None else tensors_again(tensors, record, layout)
            if now is None or [count for (count,) in struct.iter_unpack("q", now[0])] != [t._version for t in tensors]:
                return False
            tensor.mul_(2)
    return True


def _words(address: int, size_bytes: int) -> Sequence[int]:
    return (ctypes.c_uint64 * (size_bytes // _WORD)).from_address(address)[:]


def _read(address: int, size_bytes: int) -> bytes:
    """What may not be memory at all; nothing then."""
    if not address or address >= 1 << 63:
        return b""
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        try:
            return os.pread(memory.fileno(), size_bytes, address)
        except OSError:
            return b""


def _usable_bytes(address: int) -> int:
    """How much memory an object has that was allocated by itself."""
    ask = ctypes.CDLL(None).malloc_usable_size
    ask.restype, ask.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
    return int(ask(address))


def _equal(words: Sequence[int], wanted: int) -> Iterator[int]:
    return (at for at, word in enumerate(words) if word == wanted)


def _changed(before: Sequence[int], after: Sequence[int]) -> Iterator[int]:
    return (at for at, (old, new) in enumerate(zip(before, after, strict=True)) if old != new)


def _only(found: Iterable[Any]) -> Any:
    places = list(found)
    if len(places) != 1:
        raise _Unknown
    return places[0]
