"""Symbolic memory: addresses are numbers, and the content of a block of 1 MiB is one number, its token.

No byte moves, so a shard of many chunks costs as little as a small one. What would be a checksum of bytes is a
number derived from the token. Only whole blocks are ever moved: that is how the mover works.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from typing import Protocol, cast

import numpy as np

from stepwell.native import BLOCK_BYTES, AsyncEngine, Done, Job, Op, PieceMap
from tests.sim.medium import Token

#: what memory holds that nobody has written, and a block of a file that was never reached
NOTHING = 0
#: seconds that copying and checksumming one chunk takes, at most
COPY_S = 0.004
#: between two looks at a ticket, which cannot call back
TICKET_S = 0.001

_MIX = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


def crc_of(token: Token) -> int:
    """The checksum of a block that holds `token`."""
    assert isinstance(token, int)
    return ((token * _MIX) & _WORD) >> 32


def blocks_of(length: int) -> int:
    return -(-length // BLOCK_BYTES)


class Pieces(Protocol):
    """The simulated PieceMap: tokens of a shard, by number of block."""

    def load(self, block: int) -> Token: ...

    def store(self, block: int, token: Token) -> None: ...


class Memory:
    """One process's address space."""

    def __init__(self) -> None:
        self._blocks: dict[int, Token] = {}
        self._next = 1 << 20  # block number: addresses that no real memory has

    def load(self, address: int, length: int) -> list[Token]:
        """The tokens of the blocks that [address, address + length) touches."""
        first = self._block(address)
        return [self._blocks.get(block, NOTHING) for block in range(first, first + blocks_of(length))]

    def store(self, address: int, tokens: Sequence[Token], length: int) -> None:
        """`length` says nothing here: blocks are whole."""
        first = self._block(address)
        for at, token in enumerate(tokens):
            self._blocks[first + at] = token

    def region(self, size: int) -> Region:
        """A new region, as the arena asks for it."""
        address = self._next * BLOCK_BYTES
        self._next += blocks_of(size) + 1
        return Region(address, size)

    @staticmethod
    def _block(address: int) -> int:
        number, within = divmod(address, BLOCK_BYTES)
        assert within == 0, f"{address} is inside a block"
        return number


class Region:
    """Stands for `stepwell.native.Region`. It has no bytes to look at."""

    def __init__(self, address: int, size: int) -> None:
        self.address, self.size = address, size

    def populate(self, offset: int, length: int) -> None:
        pass

    def view(self, offset: int = 0, length: int | None = None) -> memoryview:
        raise AssertionError("symbolic memory has no bytes")

    def close(self) -> None:
        pass


class Copier:
    """Stands for `stepwell.native.AsyncEngine`: GATHER and SCATTER of tokens, after random time."""

    def __init__(self, memory: Memory, rng: random.Random) -> None:
        self._memory, self._rng = memory, rng

    def start(self, jobs: Sequence[Job]) -> list[asyncio.Future[Done]]:
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Done]] = [loop.create_future() for _ in jobs]
        for job, future in zip(jobs, futures, strict=True):
            loop.call_later(self._rng.random() * COPY_S, self._run, job, future)
        return futures

    async def run(self, jobs: Sequence[Job]) -> list[Done]:
        futures = self.start(jobs)
        if futures:
            await asyncio.wait(futures)
        return [future.result() for future in futures]

    def close(self) -> None:
        pass

    def engine(self) -> AsyncEngine:
        """Itself, in the type that the mover asks for."""
        return cast(AsyncEngine, self)

    def _run(self, job: Job, future: asyncio.Future[Done]) -> None:
        if job.after is not None and job.after.state == "pending":
            asyncio.get_running_loop().call_later(TICKET_S, self._run, job, future)
            return
        bad = 0
        if job.op is Op.GATHER:
            self._gather(job)
        else:
            assert job.op is Op.SCATTER, job
            bad = self._scatter(job)
        if job.signal is not None:
            job.signal.fire(bad == 0)
        if not future.done():
            future.set_result(Done(job, job.length, bad))

    def _gather(self, job: Job) -> None:
        pieces = cast(Pieces, job.pieces)
        first = job.pieces_offset // BLOCK_BYTES
        tokens: list[Token] = [pieces.load(first + at) for at in range(blocks_of(job.length))]
        for address, start, stop in _buffers(job):
            there = tokens[start // BLOCK_BYTES - first : blocks_of(stop) - first]
            self._memory.store(address, there, stop - start)
        if job.crcs is not None:
            job.crcs[:] = np.array([crc_of(token) for token in tokens], np.uint32)

    def _scatter(self, job: Job) -> int:
        bad = 0
        first = job.pieces_offset // BLOCK_BYTES
        for at, token in enumerate(self._memory.load(job.address, job.length)):
            if job.crcs is not None and int(job.crcs[at]) != crc_of(token):
                bad |= 1 << at
            elif job.pieces is not None:
                cast(Pieces, job.pieces).store(first + at, token)
        return bad


def _buffers(job: Job) -> Iterator[tuple[int, int, int]]:
    """Where the job's bytes [start, stop) of the shard go to."""
    start, stop = job.pieces_offset, job.pieces_offset + job.length
    if job.slots is None:
        yield job.address, start, stop
        return
    bounds = job.slots.offsets.tolist()
    for address, begin, end in zip(job.slots.addresses.tolist(), bounds, bounds[1:], strict=False):
        if max(begin, start) < min(end, stop):
            assert begin >= start, "the mover gives whole slots"
            yield address, begin, min(end, stop)


class Tokens:
    """A list of tokens as pieces: where a restore delivers to, or a state's own."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens

    def load(self, block: int) -> Token:
        return self.tokens[block]

    def store(self, block: int, token: Token) -> None:
        self.tokens[block] = token

    def pieces(self, start: int, stop: int) -> PieceMap:
        """As a shard's source gives them."""
        assert 0 <= start <= stop
        return cast(PieceMap, self)

    def gpu_pieces(self, start: int, stop: int) -> list[tuple[int, PieceMap]]:
        return []

    def has_host_pieces(self, start: int, stop: int) -> bool:
        return True
