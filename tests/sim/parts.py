"""What a simulated tier is made of: what it is given, and what it has open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from stepwell.tiers.base import ChunkIO, Lease, Reservation, ShardKey
from tests.sim.medium import File, Token
from tests.sim.weather import Trouble


class Dead(BaseException):
    """The process of this handle was killed."""


class Memory(Protocol):
    """What addresses stand for, in blocks of the medium's grain."""

    def load(self, address: int, length: int) -> Sequence[Token]: ...

    def store(self, address: int, tokens: Sequence[Token], length: int) -> None: ...


class Weather(Protocol):
    full_at: float  # when something last found no room here

    def draw(self) -> Trouble: ...

    def number(self) -> int: ...

    async def pass_time(self, blocks: int = 0) -> None: ...


@dataclass(eq=False, slots=True)
class OpenShard:
    """A reserved shard's file."""

    file: File
    reservation: Reservation
    writes: int = 0  # under way
    closed: bool = False  # synced: nothing may be written any more


@dataclass(eq=False, slots=True)
class Flying:
    """A write under way."""

    chunk: ChunkIO
    file: File


class SimLease(Lease):
    def __init__(
        self, give_back: Callable[[Sequence[tuple[ShardKey, File]]], None], held: list[tuple[ShardKey, File]]
    ) -> None:
        self._give_back, self._held = give_back, held

    async def close(self) -> None:
        held, self._held = self._held, []
        self._give_back(held)
