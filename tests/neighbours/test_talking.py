"""What neighbours say to each other: names that arrive as they were, what is no message, sockets in deep folders."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from stepwell import talking
from stepwell.errors import FormatError
from stepwell.talking import Back, Get, Hello, OwnName, Shard, Source, hear_client, known_as, name_of, pack
from stepwell.tiers._shm import SOCKET
from stepwell.tiers.base import CheckpointKey, ShardKey

words = some.text(min_size=1, max_size=20)
numbers = some.integers(0, 2**63 - 1)
own = some.builds(ShardKey, some.builds(CheckpointKey, words, words), words)
files = some.tuples(some.just("file"), words, numbers, numbers, numbers)


async def heard(data: bytes) -> list[object]:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    found: list[object] = []
    while (message := await hear_client(reader)) is not None:
        found.append(message)
    return found


@given(own | files)
def test_a_shards_name_arrives_as_it_was(name: ShardKey | tuple[str, str, int, int, int]) -> None:
    sent = name_of(name)
    assert sent is not None
    [message] = asyncio.run(heard(pack([Shard(0, sent, 5, [Source("/d", "r", "a", "n")], None)])))
    assert isinstance(message, Shard) and known_as(message.name) == name


@pytest.mark.parametrize(
    "name", ["text", 7, ("file", "\udc80", 1, 2, 3), ("file", "p", 1, 2), ("file", 3, 1, 2, 3), None]
)
def test_other_names_are_not_sent(name: object) -> None:
    assert name_of(name) is None


@given(
    some.lists(some.builds(Get, numbers, numbers, numbers, some.booleans()) | some.builds(Back, some.lists(numbers)))
)
def test_messages_arrive_in_order(messages: list[Get | Back]) -> None:
    assert asyncio.run(heard(pack(messages))) == messages


@given(some.binary(min_size=1, max_size=200))
def test_what_is_no_message_is_refused(noise: bytes) -> None:
    """Whatever comes, it is a message, or the end, or an error; never another exception."""
    for data in (noise, len(noise).to_bytes(4, "little") + noise):
        try:
            found = asyncio.run(heard(data))
        except FormatError:
            continue
        assert all(isinstance(each, talking.Message) for each in found)


def test_a_message_that_is_too_long_is_refused_before_it_is_read() -> None:
    data = (talking.MESSAGE_BYTES_MAX + 1).to_bytes(4, "little")
    with pytest.raises(FormatError, match="a neighbour's message of"):
        asyncio.run(heard(data))


def test_a_message_that_breaks_off_is_the_end() -> None:
    assert asyncio.run(heard(pack([Hello(1, 2)])[:-1])) == []


def test_a_socket_in_a_folder_with_a_long_path(tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = tmp_path / ("deep" * 40)
        folder.mkdir()
        there = talking.listening(folder)
        assert (folder / SOCKET).is_socket()
        here = await talking.connected(folder)
        other, _ = await asyncio.get_running_loop().sock_accept(there)
        await asyncio.get_running_loop().sock_sendall(here, pack([Hello(1, 2)]))
        assert pack([Hello(1, 2)]) == await asyncio.get_running_loop().sock_recv(other, 100)
        for each in (there, here, other):
            each.close()
        again = talking.listening(folder)  # in the place of the one that is gone
        again.close()

    asyncio.run(scenario())


def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        asyncio.run(talking.connected(tmp_path))
    talking.listening(tmp_path).close()
    with pytest.raises(ConnectionRefusedError):
        asyncio.run(talking.connected(tmp_path))


def test_names_of_a_run_and_of_a_file_do_not_mix() -> None:
    assert name_of(ShardKey(CheckpointKey("r", "a"), "n")) == OwnName("r", "a", "n")
