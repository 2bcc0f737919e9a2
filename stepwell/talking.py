"""What neighbours say to each other: processes of one node that use one shared arena.

A message is a length of four bytes, little-endian, and that many bytes of msgpack. The client says *Hello* and is
answered *Welcome*; it names each *Shard* once, under a number of its own, and then asks for its chunks by that number
(*Get*), many at a time. Each is answered once, in any order, with *Here* or *Not*. What is here stays until the client
gives it *Back*. While a client waits, the owner says *Alive* now and then, so that a slow disk is told from an owner
that stands still. Both sides run the same version of stepwell or do not talk.
"""

from __future__ import annotations

import asyncio
import os
import socket
import weakref
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from stepwell.errors import FormatError
from stepwell.tiers._shm import SOCKET
from stepwell.tiers.base import CheckpointKey, ShardKey, Tier

#: both sides say which version of these messages they know
TALK = 1
#: the longest message: the block checksums of a shard of 16 TiB
MESSAGE_BYTES_MAX = 64 << 20
#: a client waits no longer than this without hearing anything, and then reads by itself
SILENT_S = 2.0
#: how often the owner says that it lives, while somebody waits for it
ALIVE_S = 0.5
assert 3 * ALIVE_S < SILENT_S

#: clients that may wait to be accepted
BACKLOG = 128
#: what Linux takes for the path of a socket, without the closing zero
ADDRESS_BYTES_MAX = 107

_LENGTH_BYTES = 4

T = TypeVar("T")


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The base of all."""


class Hello(Message, frozen=True):
    """From a client, first of all."""

    talk: int
    pid: int


class Welcome(Message, frozen=True):
    """The answer, with what both sides must have alike."""

    talk: int
    slot_bytes: int
    clients: int  # other processes that are connected


class Source(Message, frozen=True):
    """Where a file driver finds a shard."""

    root: str
    run: str
    attempt: str
    name: str


class OwnName(Message, frozen=True):
    """How an arena knows a shard of a run."""

    run: str
    attempt: str
    name: str


class FileName(Message, frozen=True):
    """How it knows any other file."""

    kind: str
    path: str
    size: int
    mtime_ns: int
    inode: int


class Shard(Message, frozen=True):
    """From a client: the shard that is meant by `number` from now on."""

    number: int
    name: OwnName | FileName
    size: int  # 0: not known, and only what is in memory is asked for
    sources: list[Source]  # nearest first
    crcs: bytes | None  # of each block, 32 bits little-endian; None: there are none


class Get(Message, frozen=True):
    """From a client: a chunk of a shard. fetch: read it if it is not in memory."""

    ask: int  # a number that this client has not used yet
    shard: int
    chunk: int
    fetch: bool


class Here(Message, frozen=True):
    """The chunk is in this slot, and stays there until it is given back."""

    ask: int
    slot: int
    generation: int


class Not(Message, frozen=True):
    """The client must read it by itself; of number 0: the arena is not handed over."""

    ask: int
    why: str


class Back(Message, frozen=True):
    """From a client: these are not needed any more."""

    asks: list[int]


class HandOver(Message, frozen=True):
    """From a client that saves: the arena is wanted. Who only reads lets go of it, and the connection ends then."""


class Alive(Message, frozen=True):
    """The owner has not forgotten."""


FromClient = Hello | Shard | Get | Back | HandOver
FromOwner = Welcome | Here | Not | Alive

_encoder = msgspec.msgpack.Encoder()
_from_client = msgspec.msgpack.Decoder(FromClient)
_from_owner = msgspec.msgpack.Decoder(FromOwner)


def root_of(tier: Tier) -> str | None:
    """The folder in which another process finds a tier's shards by their keys; None if it cannot."""
    root = tier.info.detail.get("path") if tier.info.driver in ("file", "pfs") else None
    return root if root is not None and _is_text(root) else None


def name_of(known_as: Hashable) -> OwnName | FileName | None:
    """How a shard's name travels; None for a name of another kind, or one that is no text (bytes of a file's name)."""
    match known_as:
        case ShardKey() if _is_text(str(known_as)):
            return OwnName(known_as.checkpoint.run, known_as.checkpoint.attempt, known_as.name)
        case (str(kind), str(path), int(size), int(mtime_ns), int(inode)) if _is_text(path):
            return FileName(kind, path, size, mtime_ns, inode)
    return None


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def known_as(name: OwnName | FileName) -> Hashable:
    """The reverse of `name_of`."""
    if isinstance(name, OwnName):
        return ShardKey(CheckpointKey(name.run, name.attempt), name.name)
    return (name.kind, name.path, name.size, name.mtime_ns, name.inode)


def pack(messages: Iterable[Message]) -> bytes:
    """Messages as bytes, one after the other."""
    out = bytearray()
    for message in messages:
        data = _encoder.encode(message)
        out += len(data).to_bytes(_LENGTH_BYTES, "little") + data
    return bytes(out)


async def hear_client(reader: asyncio.StreamReader) -> FromClient | None:
    """The next message of a client; None once it has gone. Raises FormatError for what is none."""
    data = await _frame(reader)
    return None if data is None else _decoded(_from_client, data)


async def hear_owner(reader: asyncio.StreamReader) -> FromOwner | None:
    """The next message of the owner; None once it has gone. Raises FormatError for what is none."""
    data = await _frame(reader)
    return None if data is None else _decoded(_from_owner, data)


async def _frame(reader: asyncio.StreamReader) -> bytes | None:
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "little")
        if length > MESSAGE_BYTES_MAX:
            raise FormatError(f"a neighbour's message of {length} bytes", todo="Run one version of stepwell on a node")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, OSError):
        return None


def _decoded(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except msgspec.MsgspecError as error:
        todo = "Run one version of stepwell on a node"
        raise FormatError(f"a neighbour's message cannot be read: {error}", todo=todo) from error


# -- sockets -----------------------------------------------------------------------------


def listening(folder: Path) -> socket.socket:
    """A socket for clients of the arena in `folder`, in the place of an earlier owner's. Raises OSError."""
    (folder / SOCKET).unlink(missing_ok=True)
    made = _new_socket()
    try:
        with _address(folder) as address:
            made.bind(address)
        made.listen(BACKLOG)
    except BaseException:
        made.close()
        raise
    return made


async def connected(folder: Path) -> socket.socket:
    """A socket to the owner of the arena in `folder`. Raises OSError if nobody listens."""
    made = _new_socket()
    try:
        with _address(folder) as address:
            await asyncio.get_running_loop().sock_connect(made, address)
    except BaseException:
        made.close()
        raise
    return made


async def streams(made: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Both directions of a connection."""
    own_only(made)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await loop.connect_accepted_socket(lambda: protocol, made)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


def _new_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.setblocking(False)
    own_only(made)
    return made


def own_only(made: socket.socket) -> None:
    """A forked child does not hold it: else nobody would see that this process has died."""
    _own.add(made)


@contextmanager
def _address(folder: Path) -> Iterator[str]:
    """The socket's path; through a descriptor of the folder where it is too long for an address."""
    path = os.fspath(folder / SOCKET)
    if len(os.fsencode(path)) <= ADDRESS_BYTES_MAX:
        yield path
        return
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)


_own: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_parents() -> None:
    """Without a shutdown: the parent goes on with them."""
    for inherited in list(_own):
        if (descriptor := inherited.detach()) >= 0:
            os.close(descriptor)
    _own.clear()


os.register_at_fork(after_in_child=_close_parents)
