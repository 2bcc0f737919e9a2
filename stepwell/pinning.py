"""Pins: what stays in host memory until it is unpinned, or the process ends. Lives on the event loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stepwell.errors import StepwellError, TierFull
from stepwell.lifting import Lifter
from stepwell.prefetching import Prefetch, Urgency
from stepwell.units import format_bytes
from stepwell.wanted import Item

#: pins come before all prefetches: their room is taken already
PIN_PRIORITY = 1 << 30


@dataclass(frozen=True, slots=True)
class _Pin:
    name: object  # as the caller named it
    item: Item


class Pins:
    """What one store has pinned. Each slot counts once, however often its chunk is pinned."""

    def __init__(self, lifter: Lifter) -> None:
        self._lifter = lifter
        self._pins: list[_Pin] = []

    def add(self, name: object, item: Item) -> Prefetch:
        """Promises memory to all chunks of `item`, and returns the prefetch that is to bring what is not here.

        Raises TierFull, with the numbers, if that does not fit beside what is pinned and what saves under way were
        promised. What is left for staging is never touched.
        """
        host, arena = self._lifter.host, self._lifter.host.arena
        if self._lifter.is_served:
            raise StepwellError(
                f"the memory of tier {host.info.name} belongs to another process",
                todo="Pin it there, or close it first",
            )
        self._lifter.fit([item], None)
        new = {arena.key(item.names[at], number) for at, number, _ in item.chunks} - arena.pinned.keys()
        free = arena.kept_max - len(arena.pinned) - host.promised_slots
        if len(new) > free:
            pinned, slot = len(arena.pinned), arena.slot_bytes
            raise TierFull(
                f"{item.label} needs {format_bytes(len(new) * slot)} more of host memory to be pinned, and "
                f"{format_bytes(max(0, free) * slot)} can be: of the {format_bytes(arena.kept_max * slot)} kept there "
                f"{format_bytes(pinned * slot)} are pinned and {format_bytes(host.promised_slots * slot)} promised to "
                "saves",
                todo="Give the host tier more memory, pin less (parts, keys), or unpin something",
                tier=host.info.name,
            )
        for shard, numbers in _by_shard(item):
            arena.pin(shard, numbers)
        self._pins.append(_Pin(name, item))
        return Prefetch(Urgency.of(PIN_PRIORITY, None), pinned=True)

    def remove(self, name: object) -> None:
        """Takes back the newest pin of this name. Raises StepwellError if there is none."""
        pin = next((pin for pin in reversed(self._pins) if pin.name == name), None)
        if pin is None:
            known = ", ".join(dict.fromkeys(str(pin.name) for pin in self._pins))
            raise StepwellError(f"{name} is not pinned", todo=f"Pinned are: {known or 'none'}")
        self._take_back(pin)

    def give_up(self, item: Item) -> None:
        """Takes a pin back whose chunks did not come."""
        for pin in [pin for pin in self._pins if pin.item is item]:
            self._take_back(pin)

    def _take_back(self, pin: _Pin) -> None:
        self._pins.remove(pin)
        for shard, numbers in _by_shard(pin.item):
            self._lifter.host.arena.pin(shard, numbers, -1)


def _by_shard(item: Item) -> list[tuple[object, Sequence[int]]]:
    return [
        (name, [number for at, number, _ in item.chunks if at == place]) for place, name in enumerate(item.names)
    ]  # fmt: skip
