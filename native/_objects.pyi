"""What objects consist of, asked in one call. The first two answer None for what is of another kind than they expect.

A trace is a list that is equal to another one while the same is where it was: classes, sizes and keys, and None after
the key of a value that is None. Traces hold no values. Where a known trace is given, it is the answer, and no classes
are listed; the answer is None if the trace is another one now.

Hints are the addresses of memory that the objects consist of, as 64-bit words, and how many of them there are for each
object: they are fetched before they are needed, and never looked at. The lowest six bits of each say how many lines of
64 bytes follow the first.
"""

from typing import Any, TypeVar

Hints = tuple[bytes, int]
T = TypeVar("T")

def look(
    root: object,
    levels_max: int,
    inner: str,
    held: tuple[str, ...],
    noted: tuple[str, ...],
    absent: tuple[str, ...],
    hints: Hints,
    known: list[Any] | None,
    /,
) -> tuple[list[Any], set[type], list[list[Any]]] | None:
    """(trace, classes, values of each of `held`) of an object and all inside it, level by level.

    inner: the attribute that is a dict of the objects inside an object; entries that are None are no objects.
    held: attributes that are dicts. noted: attributes that count in the trace, with their keys, if they are not empty.
    absent: attributes that count if the object has them of its own. None also for more levels than `levels_max`.
    """

def entries(
    outer: dict[Any, Any], hints: Hints, known: list[Any] | None, /
) -> tuple[list[Any], list[Any], list[Any]] | None:
    """(trace, keys of the dict, values) of the entries of all dicts in a dict."""

def identities(objects: list[Any], /) -> bytes:
    """The identities of the objects, one behind the other: compared at once, where numbers are objects themselves."""

def numbers(objects: list[Any] | tuple[Any, ...], question: Any, hints: Hints, /) -> bytes:
    """What an attribute of each object is, or a method of it answers, that takes no argument: an integer, of which 64
    bits count. The question is given as the descriptor of the objects' class. Raises what asking raises, and TypeError
    for an object of another class."""

def put_together(target: int, sources: Any, sizes: Any, /) -> None:
    """Copies pieces of memory one behind the other. Addresses and sizes are arrays of 64-bit words."""

def untracked(found: T, /) -> T:
    """The object itself, which the cyclic garbage collector looks at no more. For objects that are made by the
    thousand, live long and can be in no cycle: a full collection, which stops all threads for a tenth of a second and
    more where torch is loaded, comes once so many of those that are looked at have survived."""
