"""What objects consist of, asked in one call. The first two answer None for what is of another kind than they expect.

A trace is a list that is equal to another one while the same is where it was: classes, sizes and keys, and None after
the key of a value that is None. Traces hold no values. Where a known trace is given, it is the answer, and no classes
are listed; the answer is None if the trace is another one now.

A record is what was found at an earlier look, as an array of words; `again` says whether all is the same, by looking at
memory that is known to belong to it. Records are made only where `state/layouts.py` says where what lies. The garbage
collector must not run meanwhile. `study_` answers None for what cannot be recorded, `_again` for what is not the same.
"""

from typing import Any, TypeVar

T = TypeVar("T")

def look(
    root: object,
    levels_max: int,
    inner: str,
    held: tuple[str, ...],
    noted: tuple[str, ...],
    absent: tuple[str, ...],
    known: list[Any] | None,
    /,
) -> tuple[list[Any], set[type], list[list[Any]]] | None:
    """(trace, classes, values of each of `held`) of an object and all inside it, level by level.

    inner: the attribute that is a dict of the objects inside an object; entries that are None are no objects.
    held: attributes that are dicts. noted: attributes that count in the trace, with their keys, if they are not empty.
    absent: attributes that count if the object has them of its own. None also for more levels than `levels_max`.
    """

def entries(outer: dict[Any, Any], known: list[Any] | None, /) -> tuple[list[Any], list[Any], list[Any]] | None:
    """(trace, keys of the dict, values) of the entries of all dicts in a dict."""

def identities(objects: list[Any], /) -> bytes:
    """The identities of the objects, one behind the other: compared at once, where numbers are objects themselves."""

def numbers(objects: list[Any] | tuple[Any, ...], question: Any, /) -> bytes:
    """What an attribute of each object is, or a method of it answers, that takes no argument: an integer, of which 64
    bits count. The question is given as the descriptor of the objects' class. Raises what asking raises, and TypeError
    for an object of another class."""

def put_together(target: int, sources: Any, sizes: Any, /) -> None:
    """Copies pieces of memory one behind the other. Addresses and sizes are arrays of 64-bit words."""

def picked(objects: list[T], places: Any, /) -> list[T]:
    """Those at these places, an array of 64-bit integers. As `itemgetter` does it, each of hundreds of places is an
    object that is in no cache any more."""

def untracked(found: T, /) -> T:
    """The object itself, which the cyclic garbage collector looks at no more. For objects that are made by the
    thousand, live long and can be in no cycle: a full collection, which stops all threads for a tenth of a second and
    more where torch is loaded, comes once so many of those that are looked at have survived."""

def study_modules(
    root: object,
    levels_max: int,
    inner: str,
    held: tuple[str, ...],
    noted: tuple[str, ...],
    absent: tuple[str, ...],
    version_at: int,
    /,
) -> bytearray | None:
    """A record of what `look` looks at. version_at: where dicts have their versions, in bytes."""

def modules_again(
    root: object,
    record: bytearray,
    inner: str,
    held: tuple[str, ...],
    noted: tuple[str, ...],
    absent: tuple[str, ...],
    version_at: int,
    /,
) -> tuple[list[Any], ...] | None:
    """The values of each of `held`. Attributes of other names may change; the record is brought up to date."""

def study_entries(outer: dict[Any, Any], version_at: int, /) -> bytearray | None:
    """A record of the entries of all dicts in a dict."""

def entries_again(outer: dict[Any, Any], record: bytearray, version_at: int, /) -> list[Any] | None:
    """Their values."""

def study_tensors(tensors: list[Any], classes: tuple[type, ...], layout: tuple[int, ...], /) -> bytearray | None:
    """A record of tensors, of these classes only, of up to 5 dimensions: all but their bytes and their gradients.
    layout: see `state/layouts.py`."""

def tensors_again(tensors: list[Any], record: bytearray, layout: tuple[int, ...], /) -> tuple[bytes, list[Any]] | None:
    """(the version of each, as 64-bit integers: how often it was changed in place; the storage of each)."""
