"""How large an arena is, and how much of it is taken, in slots and bytes."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable

from stepwell.tiers._slots import Slot

#: the part of an arena that kept chunks leave free, at least two slots and at most this many bytes
STAGING_SHARE, STAGING_BYTES_MAX = 8, 256 << 20


class Sizes:
    """The base of an arena."""

    slot_bytes: int
    count: int
    keep_limit: int | None  # the most slots that may be kept, if it is less than what is not for staging
    pinned: Counter[Hashable]
    _slots: list[Slot]
    _free: deque[Slot]
    _by_key: dict[Hashable, Slot]
    _kept: int
    _clean: int

    @property
    def capacity_bytes(self) -> int:
        return self.count * self.slot_bytes

    @property
    def beside_staging(self) -> int:
        """Slots that are not always there for staging."""
        return self.count - min(max(2, self.count // STAGING_SHARE), STAGING_BYTES_MAX // self.slot_bytes)

    @property
    def kept_max(self) -> int:
        """The most slots that may be kept."""
        return self.beside_staging if self.keep_limit is None else min(self.beside_staging, self.keep_limit)

    @property
    def ready_bytes(self) -> int:
        """Memory that has been taken from the system."""
        return len(self._slots) * self.slot_bytes

    @property
    def cached_bytes(self) -> int:
        return self._kept * self.slot_bytes

    @property
    def free_bytes(self) -> int:
        """What can be had without pushing out a chunk."""
        return (self.count - len(self._slots) + len(self._free)) * self.slot_bytes

    @property
    def keepable_bytes(self) -> int:
        """What can be kept more without waiting until something was written down."""
        stay = sum((slot := self._by_key.get(key)) is not None and slot.clean for key in self.pinned)
        return max(0, self.kept_max - self._kept + self._clean - stay) * self.slot_bytes
