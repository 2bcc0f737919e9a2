"""What an earlier look has found, found again at a glance while nothing of it has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
Found = TypeVar("Found")

#: a record that is of no use costs a look; of a state that changes each time, one look in so many makes one
SKIPPED_MAX = 63


class Again(Generic[T, Found]):
    """A record of objects, made anew when it does not fit any more: at once if it had been of use, and the later the
    more records in a row were of none."""

    def __init__(self, study: Callable[[T], bytearray | None], glance: Callable[[T, bytearray], Found | None]) -> None:
        """study: makes a record, if there can be one. glance: what is found; None if that is not certain."""
        self._study, self._glance = study, glance
        self._record: bytearray | None = None
        self._skipped = 0  # looks for which no record is made, from now on
        self._pause = 0  # and after the next record that is of no use

    def anew(self) -> Again[T, Found]:
        """One for a state that differs from the one that this was about: it begins without a record."""
        made = Again(self._study, self._glance)
        made._skipped, made._pause = self._skipped, self._pause
        return made

    def look(self, at: T, closely: Callable[[T], Found | None]) -> Found | None:
        """What is found, at a glance or closely; None if that is not what is known."""
        before = self._record
        if before is not None:
            found = self._glance(at, before)
            if found is not None:
                self._pause = 0
                return found
            self._in_vain()
        if self._skipped:
            self._skipped -= 1
            return closely(at)
        record = self._study(at)
        found = closely(at)
        # what looks the same now as before the close look is what that has seen
        if found is not None and record is not None and self._glance(at, record) is not None:
            self._record = record
        elif record is not None and before is None:  # else that has been counted
            self._in_vain()
        return found

    def _in_vain(self) -> None:
        self._record = None
        self._skipped, self._pause = self._pause, min(2 * self._pause + 1, SKIPPED_MAX)
