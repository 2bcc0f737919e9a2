"""The other processes' side of a shared arena: chunks taken from the memory of the process that owns it.

The mover asks before it reads (`stepwell.fetching.Neighbour`). The owner answers with a slot that it holds for this
process; the chunk is copied from a map of the slots that cannot be written, and the slot's row in the index, looked at
afterwards, tells whether it was this chunk until then. An owner that does not answer is left alone for a while: nothing
here waits longer than a moment for one that stands still, and everything can be read without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Hashable
from pathlib import Path

from stepwell.errors import FormatError
from stepwell.native import Mapping, fence
from stepwell.ranges import Read
from stepwell.reading import Reading
from stepwell.talking import (
    SILENT_S,
    TALK,
    Back,
    FileName,
    Get,
    HandOver,
    Hello,
    Here,
    Message,
    Not,
    OwnName,
    Shard,
    Source,
    Welcome,
    connected,
    hear_owner,
    name_of,
    pack,
    root_of,
    streams,
)
from stepwell.tiers._index import SlotState
from stepwell.tiers._index import name_of as index_name
from stepwell.tiers._sharedindex import IndexView, Unusable
from stepwell.tiers._shm import SLOTS
from stepwell.tiers.base import Tier

#: silence is counted in looks, so that a loop of our own that was late does not take itself for a silent owner
LOOKS = 8
#: an owner that has not brought a chunk after so long is left, too: its disk may hang where another tier need not
LONGEST_S = 20.0
#: one that was left is not asked again for so long; one that has ended may have a successor soon
PAUSE_S, ENDED_S = 30.0, 0.1
#: how long an owner that only reads may take to let go of its arena
HAND_OVER_S = 5.0
#: shards that the owner is told of at a time; the oldest number is used again
SHARDS_MAX = 256

log = logging.getLogger("stepwell")


class Neighbouring:
    """Chunks from the arena in `folder`, which another process owns. Lives on the event loop."""

    def __init__(self, folder: Path, slot_bytes: int) -> None:
        """slot_bytes: of this process's own arena; one whose slots are of another size is of no use."""
        self._folder, self._slot_bytes = folder, slot_bytes
        self._link: _Link | None = None
        self._linking: asyncio.Task[None] | None = None
        self._not_before = 0.0
        self._closed = False

    def __repr__(self) -> str:
        return f"<Neighbouring {self._folder}: {'no owner answers' if self._link is None else self._link!r}>"

    @property
    def connected(self) -> bool:
        """Whether an owner answers."""
        return self._link is not None and not self._link.ended

    async def start(self) -> None:
        """Finds the owner, if it answers at once; else it is looked for again when something is read."""
        self._look()
        assert self._linking is not None
        await asyncio.wait([self._linking])

    async def close(self) -> None:
        """Gives everything back. Idempotent."""
        self._closed = True
        if self._linking is not None:
            self._linking.cancel()
            await asyncio.wait([self._linking])
        if self._link is not None:
            await self._link.close()

    async def get(self, reading: Reading, read: Read) -> Lent | None:
        """The chunk that `read` lies in, from the owner's memory. None if it must be read here; it takes SILENT_S to
        say so if the owner stands still, and LONGEST_S if its disk does."""
        name = name_of(reading.known_as)
        if name is None:
            return None
        if not self.connected:
            self._look()
            if self._linking is not None:
                await asyncio.wait([self._linking])
        link = self._link
        return None if link is None or link.ended else await link.get(name, reading, read)

    def _look(self) -> None:
        """Looks for an owner, unless that is under way or was tried a moment ago."""
        if self._linking is not None or self._closed:
            return
        if asyncio.get_running_loop().time() >= max(self._not_before, self._link.shunned_until if self._link else 0.0):
            self._linking = asyncio.ensure_future(self._find())

    async def _find(self) -> None:
        pause_s = ENDED_S
        try:
            if self._link is not None:
                await self._link.close()
                self._link = None
            async with asyncio.timeout(SILENT_S):
                self._link = await _linked(self._folder, self._slot_bytes)
        except (OSError, FormatError, Unusable) as error:
            log.debug("the owner of %s does not answer: %s", self._folder, error)
            if not isinstance(error, FileNotFoundError | ConnectionError):  # it stands still, or is of no use
                pause_s = PAUSE_S
        finally:
            self._linking = None
            self._not_before = asyncio.get_running_loop().time() + pause_s


class Lent:
    """A chunk in the owner's memory; see `stepwell.fetching.Lent`."""

    __slots__ = ("_here", "_link", "_name", "address", "chunk")

    def __init__(self, link: _Link, here: Here, name: str, chunk: int) -> None:
        self._link, self._here, self._name, self.chunk = link, here, name, chunk
        self.address = link.address_of(here.slot)

    def still_good(self) -> bool:
        return self._link.maps.holds(self._here.slot, self._here.generation, self._name, self.chunk)

    def release(self) -> None:
        self._link.give_back(self._here.ask)


class _Maps:
    """An arena's slots and index, as they are in memory; nothing in it can be written through them."""

    def __init__(self, folder: Path, slot_bytes: int) -> None:
        """Raises Unusable for what is no such arena, OSError if there is none."""
        self._index = IndexView(folder)
        if self._index.slot_bytes != slot_bytes:
            raise Unusable(f"its slots have {self._index.slot_bytes} bytes, and those of this process {slot_bytes}")
        self.count = self._index.count
        descriptor = os.open(folder / SLOTS, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # some of it may not be there yet: only slots that the owner has named are looked at
            self._slots = Mapping(descriptor, 0, self.count * slot_bytes, writable=False)
        finally:
            os.close(descriptor)
        self.address = self._slots.address
        self._owner = self._index.generation

    def holds(self, slot: int, generation: int, name: str, chunk: int) -> bool:
        """Whether all that was copied from a slot until now was this filling of it, with this chunk: the owner changes
        the row before it changes the slot, and the next owner the index before any row."""
        fence()
        row = self._index.look(slot)
        found = (row.generation, row.name, row.chunk, row.state)
        return found == (generation, name, chunk, SlotState.FILLED) and self._index.generation == self._owner


class _Asked:
    """A chunk that the owner was asked for."""

    __slots__ = ("answer", "chunk", "looks", "name")

    def __init__(self, name: str, chunk: int) -> None:
        self.name, self.chunk, self.looks = name, chunk, 0
        self.answer: asyncio.Future[Lent | None] = asyncio.get_running_loop().create_future()


class _Link:
    """One connection to an owner, and the maps of its arena."""

    def __init__(
        self, maps: _Maps, slot_bytes: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.maps, self._slot_bytes, self._reader, self._writer = maps, slot_bytes, reader, writer
        self._asks: dict[int, _Asked] = {}
        self._shards: dict[Hashable, tuple[int, str]] = {}  # what was named -> its number, its name in the index
        self._back: list[int] = []
        self._number = 0
        self._silent = 0  # looks since something was heard
        self._looking: asyncio.TimerHandle | None = None
        self.ended = False
        self.shunned_until = 0.0
        self._listening = asyncio.ensure_future(self._listen())

    def __repr__(self) -> str:
        return f"{'ended' if self.ended else 'linked'}, {len(self._asks)} chunks asked for"

    async def get(self, name: OwnName | FileName, reading: Reading, read: Read) -> Lent | None:
        chunk = read.start // self._slot_bytes
        start = chunk * self._slot_bytes
        whole = read.start == start and read.length == min(self._slot_bytes, reading.size - start)
        shard, told = self._shard(name, reading)
        self._number += 1
        ask = self._number
        asked = self._asks[ask] = _Asked(told, chunk)
        self._say(Get(ask, shard, chunk, whole))
        if self._looking is None:
            self._look_later()
        try:
            return await asked.answer
        except asyncio.CancelledError:
            if asked.answer.done() and not asked.answer.cancelled() and asked.answer.result() is not None:
                self.give_back(ask)
            raise

    def address_of(self, slot: int) -> int:
        return self.maps.address + slot * self._slot_bytes

    def _shard(self, name: OwnName | FileName, reading: Reading) -> tuple[int, str]:
        """The number under which the owner knows the shard, and its name in the index; tells the owner if it is new."""
        sources = [source for tier in reading.tiers if (source := _source(tier, reading)) is not None]
        key = (name, reading.size, *sources)
        known = self._shards.pop(key, None)
        if known is None:
            number = len(self._shards)
            if number >= SHARDS_MAX:
                number, _ = self._shards.pop(next(iter(self._shards)))
            known = number, index_name(reading.known_as)
            crcs = None if reading.crcs is None or not reading.size else reading.crcs.astype("<u4").tobytes()
            self._say(Shard(number, name, reading.size, sources, crcs))
        self._shards[key] = known  # the one used last comes last
        return known

    def give_back(self, ask: int) -> None:
        """The slot is not needed any more."""
        if not self._back:
            asyncio.get_running_loop().call_soon(self._give_back)
        self._back.append(ask)

    def _give_back(self) -> None:
        back, self._back = self._back, []
        self._say(Back(back))

    def _say(self, message: Message) -> None:
        if not self.ended:
            self._writer.write(pack([message]))

    # -- what the owner says -------------------------------------------------------------

    async def _listen(self) -> None:
        try:
            while (message := await hear_owner(self._reader)) is not None:
                self._silent = 0
                match message:
                    case Here():
                        self._here(message)
                    case Not():
                        self._settle(message.ask, None)
        except FormatError as error:
            log.warning("%s", error)
        finally:
            self._end()

    def _here(self, message: Here) -> None:
        asked = self._asks.get(message.ask)
        if asked is None or asked.answer.done() or message.slot >= self.maps.count:
            self.give_back(message.ask)  # nobody waits for it any more, or it is in no map of ours
            self._settle(message.ask, None)
        else:
            self._settle(message.ask, Lent(self, message, asked.name, asked.chunk))

    def _settle(self, ask: int, lent: Lent | None) -> None:
        asked = self._asks.pop(ask, None)
        if asked is not None and not asked.answer.done():
            asked.answer.set_result(lent)

    # -- time ----------------------------------------------------------------------------

    def _look_later(self) -> None:
        self._looking = asyncio.get_running_loop().call_later(SILENT_S / LOOKS, self._look)

    def _look(self) -> None:
        """Leaves an owner that stands still, and gives up what it does not get."""
        self._looking = None
        self._silent += 1
        for asked in self._asks.values():
            asked.looks += 1
        longest = max((asked.looks for asked in self._asks.values()), default=0)
        if self._silent > LOOKS or longest > LONGEST_S / SILENT_S * LOOKS:
            what = "stands still" if self._silent > LOOKS else "waits for its disk"
            log.warning("the process that owns the shared host memory %s: going on without it", what)
            self.shunned_until = asyncio.get_running_loop().time() + PAUSE_S
            self._end()
        elif self._asks:
            self._look_later()
        else:
            self._silent = 0

    def _end(self) -> None:
        """Nothing more comes: whoever waits reads by itself. Idempotent."""
        if self.ended:
            return
        self.ended = True
        self._writer.transport.abort()
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        for ask in list(self._asks):
            self._settle(ask, None)

    async def close(self) -> None:
        """What is lent may still be copied: the maps go with the last of it. Idempotent."""
        self._end()
        self._listening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._listening


async def _linked(folder: Path, slot_bytes: int) -> _Link:
    """Connects. Raises OSError, FormatError, Unusable, or hangs with an owner that does."""
    reader, writer = await streams(await connected(folder))
    try:
        writer.write(pack([Hello(TALK, os.getpid())]))
        answer = await hear_owner(reader)
        if not isinstance(answer, Welcome) or (answer.talk, answer.slot_bytes) != (TALK, slot_bytes):
            raise FormatError(f"the owner of {folder} answers {answer}", todo="Use one config on all of a node")
        maps = _Maps(folder, slot_bytes)
    except BaseException:
        writer.transport.abort()
        raise
    return _Link(maps, slot_bytes, reader, writer)


async def asked_for(folder: Path) -> bool:
    """Asks the owner of an arena to let go of it; whether it does, within HAND_OVER_S."""
    try:
        async with asyncio.timeout(HAND_OVER_S):
            reader, writer = await streams(await connected(folder))
            try:
                writer.write(pack([Hello(TALK, os.getpid()), HandOver()]))
                while (answer := await hear_owner(reader)) is not None:
                    if isinstance(answer, Not):
                        return False
                return True
            finally:
                writer.transport.abort()
    except (OSError, FormatError) as error:
        log.debug("the owner of %s does not answer: %s", folder, error)
        return False


def _source(tier: Tier, reading: Reading) -> Source | None:
    root = root_of(tier)
    return (
        None
        if root is None
        else Source(root, reading.key.checkpoint.run, reading.key.checkpoint.attempt, reading.key.name)
    )
