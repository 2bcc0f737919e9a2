"""What objects consist of, asked in one call. The first two answer None for what is of another kind than they expect.

A trace is a list that is equal to another one while the same is where it was: classes, sizes and keys, and None after
the key of a value that is None. Traces hold no values.
"""

from typing import Any

def look(
    root: object,
    levels_max: int,
    inner: str,
    held: tuple[str, ...],
    noted: tuple[str, ...],
    absent: tuple[str, ...],
    /,
) -> tuple[list[Any], set[type], list[list[Any]]] | None:
    """(trace, classes, values of each of `held`) of an object and all inside it, level by level.

    inner: the attribute that is a dict of the objects inside an object; entries that are None are no objects.
    held: attributes that are dicts. noted: attributes that count in the trace, with their keys, if they are not empty.
    absent: attributes that count if the object has them of its own. None also for more levels than `levels_max`.
    """

def entries(outer: dict[Any, Any], /) -> tuple[list[Any], list[Any], list[Any]] | None:
    """(trace, keys of the dict, values) of the entries of all dicts in a dict."""

def identities(objects: list[Any], /) -> bytes:
    """The identities of the objects, one behind the other: compared at once, where numbers are objects themselves."""
