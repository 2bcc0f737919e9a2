"""The owner's side of a shared arena: chunks for the processes beside it, each read from the disk once for all.

A client asks for a chunk. If it is in the arena, or on its way there, the client is told its slot, and the slot is
held for it; else it is read into the arena first, verified against the client's own checksums, by this process's
mover and so at most once. Clients copy from a map of the slots that they cannot write. No client gets more than its
share: its further requests wait until it has given something back, and one that holds slots and says nothing for a
while is cut off. That is safe, since whoever copies looks at the slot's row in the index afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stepwell.edges import NEIGHBOUR
from stepwell.errors import FormatError, StepwellError
from stepwell.fetching import JOIN_S
from stepwell.mover import Mover
from stepwell.native import BLOCK_BYTES
from stepwell.neighbourfiles import Places, key_of
from stepwell.ranges import Read
from stepwell.reading import Crcs, Healing, Reading
from stepwell.talking import (
    ALIVE_S,
    TALK,
    Alive,
    Back,
    Get,
    HandOver,
    Hello,
    Here,
    Message,
    Not,
    Shard,
    Source,
    Welcome,
    hear_client,
    known_as,
    listening,
    own_only,
    pack,
    streams,
)
from stepwell.tiers._shm import SOCKET
from stepwell.tiers.base import Tier
from stepwell.tiers.host import Priority, Slot

#: of what an arena may keep, one client holds at most one part in so many, and all together one in so many
CLIENT_SHARE, ALL_SHARE = 4, 2
#: a client that holds slots and says nothing for so long is cut off: copying a chunk takes milliseconds
CUT_OFF_S = 10.0
#: what one client may have asked for and not been answered, and the shards that it may have named
ASKS_MAX, SHARDS_MAX = 1024, 1024
#: clients at a time
CLIENTS_MAX = 256
#: what may lie unsent for a client that does not listen
UNSENT_BYTES_MAX = 1 << 20
#: how long the end waits for chunks on their way; a tier that hangs is not waited for
CLOSE_S = 2.0

log = logging.getLogger("stepwell")


@dataclass(slots=True)
class _Named:
    """A shard as a client named it."""

    name: Hashable  # as the arena knows it
    size: int
    sources: list[Source]
    crcs: Crcs | None


@dataclass(frozen=True, slots=True)
class _Asked:
    """A chunk that a client wants; the number of its shard may mean another one before it is its turn."""

    ask: int
    shard: _Named
    chunk: int
    fetch: bool


@dataclass(eq=False, slots=True)
class _Client:
    writer: asyncio.StreamWriter
    heard_at: float
    shards: dict[int, _Named] = field(default_factory=dict)
    asked: deque[_Asked] = field(default_factory=deque)  # what waits until the client gives something back
    busy: int = 0  # what is being looked for
    held: dict[int, Slot] = field(default_factory=dict)
    gone: bool = False

    def say(self, message: Message) -> None:
        if not self.gone:
            self.writer.write(pack([message]))

    @property
    def taken(self) -> int:
        return self.busy + len(self.held)


class Neighbours:
    """Serves the clients of one arena, on the event loop of its mover."""

    def __init__(
        self, mover: Mover, folder: Path, tiers: Sequence[Tier], on_wanted: Callable[[], bool] = lambda: False
    ) -> None:
        """folder: the arena's. tiers: those that this process has open; files on others are opened when need be.
        on_wanted: told that another process wants to own the arena; whether it will be let go of."""
        self._mover, self._arena, self._folder = mover, mover.arena, folder
        self._places, self._on_wanted = Places(tiers), on_wanted
        self._clients: set[_Client] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._listening: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._tending: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        held = sum(len(client.held) for client in self._clients)
        return f"<Neighbours of {self._folder}: {len(self._clients)} clients, {held} slots held>"

    @property
    def connected(self) -> int:
        """Clients now."""
        return len(self._clients)

    async def start(self) -> None:
        """Listens. Raises OSError where there can be no socket: the arena then serves this process alone."""
        self._listening = listening(self._folder)
        self._accepting = asyncio.ensure_future(self._accept(self._listening))

    async def close(self) -> None:
        """Takes all slots back from the clients. Idempotent."""
        if self._accepting is not None:
            self._accepting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._accepting
            self._accepting = None
        if self._listening is not None:
            with contextlib.suppress(OSError):
                (self._folder / SOCKET).unlink(missing_ok=True)
            self._listening.close()
            self._listening = None
        for client in list(self._clients):
            self._lose(client)
        if self._tending is not None:
            self._tending.cancel()
            self._tending = None
        if self._serving:
            await asyncio.wait(set(self._serving), timeout=CLOSE_S)
        await self._places.close()

    # -- clients -------------------------------------------------------------------------

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                made, _ = await loop.sock_accept(listening)
            except OSError as error:  # out of descriptors, for one: clients read by themselves meanwhile
                log.warning("no other process can use the host memory for now: %s", error)
                await asyncio.sleep(CUT_OFF_S)
                continue
            own_only(made)
            if len(self._clients) >= CLIENTS_MAX or not _same_user(made):
                made.close()
                continue
            reader, writer = await streams(made)
            client = _Client(writer, loop.time())
            self._clients.add(client)
            self._start(self._listen(client, reader))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _listen(self, client: _Client, reader: asyncio.StreamReader) -> None:
        """Until the client goes, or says what nobody understands."""
        try:
            while not client.gone and (message := await hear_client(reader)) is not None:
                client.heard_at = asyncio.get_running_loop().time()
                self._take(client, message)
        except FormatError as error:
            log.warning("%s", error)
        finally:
            self._lose(client)

    def _take(self, client: _Client, message: Message) -> None:
        match message:
            case Hello():
                client.say(Welcome(TALK, self._arena.slot_bytes, len(self._clients) - 1))
                if message.talk != TALK:
                    self._lose(client)
            case Shard():
                client.shards[message.number] = _named(message)
            case Back():
                for ask in message.asks:
                    if (slot := client.held.pop(ask, None)) is not None:
                        self._arena.release(slot)
                self._go_on()
            case Get():
                shard = client.shards.get(message.shard)
                if shard is None or message.chunk < 0 or len(client.asked) + client.taken >= ASKS_MAX:
                    client.say(Not(message.ask, "too much at once, or of nothing that was named"))
                else:
                    client.asked.append(_Asked(message.ask, shard, message.chunk, message.fetch))
                    self._go_on()
            case HandOver():
                if not self._on_wanted():
                    client.say(Not(0, "its owner saves, too"))

    def _lose(self, client: _Client) -> None:
        """The client is gone, or must go. Idempotent."""
        if client.gone:
            return
        client.gone = True
        self._clients.discard(client)
        client.asked.clear()
        held, client.held = client.held, {}
        for slot in held.values():
            self._arena.release(slot)
        client.writer.transport.abort()
        self._go_on()

    # -- chunks --------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Begins what there is room for: each client in turn, so that none waits for another's long list."""
        share = max(1, self._arena.kept_max // CLIENT_SHARE)
        free = max(1, self._arena.kept_max // ALL_SHARE) - sum(client.taken for client in self._clients)
        waiting = [client for client in self._clients if client.asked]
        while free > 0 and waiting:
            for client in list(waiting):
                if not client.asked or client.taken >= share:
                    waiting.remove(client)
                elif free > 0:
                    free -= 1
                    client.busy += 1
                    self._start(self._answer(client, client.asked.popleft()))
        if self._tending is None and any(client.taken or client.asked for client in self._clients):
            self._tending = asyncio.get_running_loop().call_later(ALIVE_S, self._tend)

    async def _answer(self, client: _Client, get: _Asked) -> None:
        why = "it is not here"
        slot = None
        try:
            slot = await self._slot(client, get)
        except (StepwellError, OSError) as error:
            why = str(error)
        finally:
            client.busy -= 1
        if client.gone or get.ask in client.held:
            if slot is not None:
                self._arena.release(slot)
        elif slot is None:
            client.say(Not(get.ask, why))
        else:
            client.held[get.ask] = slot
            client.say(Here(get.ask, slot.index, self._arena.generation(slot)))
        self._go_on()

    async def _slot(self, client: _Client, get: _Asked) -> Slot | None:
        """The chunk's slot, held once; None if the client must do without."""
        name = get.shard.name
        slot = self._arena.find(name, get.chunk)
        if slot is None and (arrival := self._arena.arrival(name, get.chunk)) is not None:
            await asyncio.wait([arrival], timeout=JOIN_S)
            slot = self._arena.find(name, get.chunk)
        if slot is None and get.fetch and not client.gone:
            slot = await self._fetched(get.shard, get.chunk)
        return slot

    async def _fetched(self, shard: _Named, number: int) -> Slot | None:
        """Reads a chunk into the arena. None if it cannot stay there until the client is told."""
        start = number * self._arena.slot_bytes
        read = Read(start, min(self._arena.slot_bytes, shard.size - start))
        if read.length <= 0 or not self._arena.keepable_bytes:
            return None
        source, tiers = await self._places.find(shard.sources)
        if source is None:
            return None
        held: list[Slot] = []

        async def hold(read: Read, address: int) -> None:
            if (slot := self._arena.find(shard.name, number)) is not None:
                held.append(slot)

        reading = Reading(
            key_of(source), tiers, shard.crcs, Healing(), Priority.RESTORE, target=NEIGHBOUR, cached_as=shard.name,
            size=shard.size, stays=True,
        )  # fmt: skip
        await self._mover.get(reading, [read], hold)
        return held[0] if held else None

    # -- time ----------------------------------------------------------------------------

    def _tend(self) -> None:
        """Tells those who wait that they are not forgotten, and cuts off who keeps others waiting."""
        self._tending = None
        now = asyncio.get_running_loop().time()
        for client in list(self._clients):
            if client.held and now - client.heard_at > CUT_OFF_S:
                log.warning("a process that holds %d slots of the host memory stands still", len(client.held))
                self._lose(client)
            elif client.writer.transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
                self._lose(client)
            elif client.busy or client.asked:
                client.say(Alive())
        self._go_on()


def _named(message: Shard) -> _Named:
    """Raises FormatError for what cannot be."""
    blocks = -(-message.size // BLOCK_BYTES)
    fits = message.size >= 0 and (message.crcs is None or len(message.crcs) == 4 * blocks)
    if not fits or not 0 <= message.number < SHARDS_MAX:
        raise FormatError(f"a neighbour's shard {message.name} makes no sense")
    crcs = None if message.crcs is None else np.frombuffer(message.crcs, "<u4")
    return _Named(known_as(message.name), message.size, message.sources, crcs)


def _same_user(made: socket.socket) -> bool:
    """The folder lets nobody else in; this holds where it was opened to others by hand, too."""
    _, uid, _ = struct.unpack("3i", made.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return uid in (os.getuid(), 0)
