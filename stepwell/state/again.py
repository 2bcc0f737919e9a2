"""What an earlier look has found, found again at a glance while nothing of it has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
Found = TypeVar("Found")


class Again(Generic[T, Found]):
    """A record of objects, and when to make it anew: after it did not fit any more, unless it never did."""

    def __init__(self, study: Callable[[T], bytearray | None], glance: Callable[[T, bytearray], Found | None]) -> None:
        """study: makes a record, if there can be one. glance: what is found; None if that is not certain."""
        self._study, self._glance = study, glance
        self._record: bytearray | None = None
        self._useful = True

    def look(self, at: T, closely: Callable[[T], Found | None]) -> Found | None:
        """What is found, at a glance or closely; None if that is not what is known."""
        record = self._record
        if record is not None:
            found = self._glance(at, record)
            if found is not None:
                self._useful = True
                return found
            self._record = None
        record = self._study(at) if self._useful else None
        found = closely(at)
        # what looks the same now as before the close look is what that has seen
        if found is not None and record is not None and self._glance(at, record) is not None:
            self._record, self._useful = record, False
        return found
