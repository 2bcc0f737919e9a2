"""Two movers and one arena: what the client of an owner gets, and what becomes of it when things go wrong.

Both are in one process here; that they need not be is what test_processes shows.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
from pathlib import Path

import pytest

from stepwell import neighbouring, neighbours
from stepwell.errors import CorruptData
from stepwell.talking import connected, pack, streams
from tests.core.moving import MIB, MODEL
from tests.neighbours.nearby import asking, lend, load, on_disk, owning, reading, run


def test_two_that_load_at_once_read_every_chunk_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        shard = on_disk(tmp_path / "disk")
        own, other = shard.tier(), shard.tier()
        async with owning(tmp_path / "arena", own) as (owner, _), asking(tmp_path / "arena", other) as (mover, _):
            first, second = await asyncio.gather(load(owner, shard, own), load(mover, shard, other))
            assert own.read_bytes == len(shard.data) and other.read_bytes == 0
            assert first["disk"] + second.get("disk", 0) == len(shard.data)

    run(scenario)


def test_what_is_in_memory_is_not_read_again_and_what_is_not_is_fetched_by_the_owner(tmp_path: Path) -> None:
    async def scenario() -> None:
        shard = on_disk(tmp_path / "disk")
        own, other = shard.tier(), shard.tier()
        async with owning(tmp_path / "arena", own) as (owner, _), asking(tmp_path / "arena", other) as (mover, _):
            assert await load(mover, shard, other) == {"host": len(shard.data)}
            assert await load(owner, shard, own) == {"host": len(shard.data)}
            assert own.read_bytes == len(shard.data) and other.read_bytes == 0

    run(scenario)


def test_the_owner_opens_files_that_it_has_no_tier_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        shard = on_disk(tmp_path / "disk")
        other = shard.tier()
        async with owning(tmp_path / "arena") as (owner, _), asking(tmp_path / "arena", other) as (mover, _):
            assert await load(mover, shard, other) == {"host": len(shard.data)}
            assert len(owner.arena.chunks(MODEL)) == 21 and other.read_bytes == 0

    run(scenario)


def test_a_chunk_on_its_way_is_waited_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        shard = on_disk(tmp_path / "disk")
        own, other = shard.tier(), shard.tier()
        async with (
            owning(tmp_path / "arena", own) as (owner, serving),
            asking(tmp_path / "arena", other) as (_, client),
        ):
            own.go.clear()
            first = asyncio.ensure_future(load(owner, shard, own))
            await own.asked.wait()
            asked = asyncio.ensure_future(lend(client, shard, other, 0))
            while not any(each.busy for each in serving._clients):
                await asyncio.sleep(0)
            assert not asked.done()
            own.go.set()
            lent = await asked
            assert lent is not None and ctypes.string_at(lent.address, MIB) == shard.data[:MIB]
            assert lent.still_good()
            lent.release()
            await first
            assert own.read_bytes == len(shard.data)

    run(scenario)


def test_a_bad_block_is_never_lent(tmp_path: Path) -> None:
    async def scenario() -> None:
        shard = on_disk(tmp_path / "disk")
        with open(shard.path, "r+b") as file:
            file.seek(3 * MIB + 5)
            file.write(bytes([shard.data[3 * MIB + 5] ^ 1]))
        own, other = shard.tier(), shard.tier()
        async with owning(tmp_path / "arena", own) as (_, _), asking(tmp_path / "arena", other) as (mover, client):
            assert await lend(client, shard, other, 3) is None
            with pytest.raises(CorruptData, match="checksum of block 3"):
                await load(mover, shard, other)

    run(scenario)


def test_an_arena_that_is_too_small_for_both_serves_what_it_can(tmp_path: Path) -> None:
    async def scenario() -> None:
        shard = on_disk(tmp_path / "disk", 40 * MIB)
        own, other = shard.tier(), shard.tier()
        folder = tmp_path / "arena"
        async with owning(folder, own, slots=8) as (owner, serving), asking(folder, other) as (mover, _):
            for _ in range(3):
                await asyncio.gather(load(owner, shard, own), load(mover, shard, other))
            assert own.read_bytes + other.read_bytes <= 6 * len(shard.data)
            assert "0 slots held" in repr(serving)

    run(scenario)


def test_who_goes_away_holds_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        shard = on_disk(tmp_path / "disk")
        own, other = shard.tier(), shard.tier()
        async with owning(tmp_path / "arena", own) as (owner, serving):
            async with asking(tmp_path / "arena", other) as (_, client):
                lent = [await lend(client, shard, other, chunk) for chunk in range(4)]
                assert None not in lent and owner.arena.in_use == 4 and serving.connected == 1
            while serving.connected:
                await asyncio.sleep(0.001)
            assert owner.arena.in_use == 0
            assert all(each is not None and each.still_good() for each in lent)  # nothing has changed there yet
            owner.arena.drop(MODEL)
            assert not any(each is not None and each.still_good() for each in lent)

    run(scenario)


def test_a_slot_that_gets_another_chunk_is_noticed(tmp_path: Path) -> None:
    async def scenario() -> None:
        shard = on_disk(tmp_path / "disk")
        own, other = shard.tier(), shard.tier()
        async with owning(tmp_path / "arena", own) as (owner, _), asking(tmp_path / "arena", other) as (_, client):
            lent = await lend(client, shard, other, 2)
            assert lent is not None and lent.still_good()
            lent.release()
            while owner.arena.in_use:
                await asyncio.sleep(0.001)
            owner.arena.drop(MODEL)
            await load(owner, shard, own)
            assert not lent.still_good()

    run(scenario)


def test_one_client_gets_its_share_and_no_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        shard = on_disk(tmp_path / "disk")
        own, other = shard.tier(), shard.tier()
        folder = tmp_path / "arena"
        async with (
            owning(folder, own) as (owner, _),
            asking(folder, other) as (_, greedy),
            asking(folder, other) as (_, modest),
        ):
            asked = [asyncio.ensure_future(lend(greedy, shard, other, chunk)) for chunk in range(20)]
            share = owner.arena.kept_max // neighbours.CLIENT_SHARE
            while sum(each.done() for each in asked) < share:
                await asyncio.sleep(0.001)
            lent = await lend(modest, shard, other, 20)
            assert lent is not None and owner.arena.in_use == share + 1
            lent.release()
            for each in asked:  # each that is given back lets another one come
                got = await each
                assert got is not None
                got.release()

    run(scenario)


def test_who_holds_slots_and_says_nothing_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "CUT_OFF_S", 0.3)
    monkeypatch.setattr(neighbours, "ALIVE_S", 0.1)

    async def scenario() -> None:
        shard = on_disk(tmp_path / "disk")
        own, other = shard.tier(), shard.tier()
        async with (
            owning(tmp_path / "arena", own) as (owner, serving),
            asking(tmp_path / "arena", other) as (_, client),
        ):
            lent = await lend(client, shard, other, 0)
            assert lent is not None and owner.arena.in_use == 1
            while serving.connected:
                await asyncio.sleep(0.01)
            assert owner.arena.in_use == 0
            while client.connected:
                await asyncio.sleep(0.01)
            again = await lend(client, shard, other, 1)  # it may come back
            assert again is not None and again.still_good() and owner.arena.in_use == 1
            again.release()

    run(scenario)


def test_an_owner_that_stands_still_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbouring, "SILENT_S", 0.2)

    async def scenario() -> None:
        shard = on_disk(tmp_path / "disk")
        own, other = shard.tier(), shard.tier()
        async with (
            owning(tmp_path / "arena", own) as (_, serving),
            asking(tmp_path / "arena", other) as (mover, client),
        ):
            monkeypatch.setattr(serving, "_take", lambda client, message: None)  # it hears, and never answers
            assert await load(mover, shard, other) == {"disk": len(shard.data)}
            assert not client.connected
            began = asyncio.get_running_loop().time()
            await load(mover, shard, other)
            assert not client.connected and asyncio.get_running_loop().time() - began < neighbouring.PAUSE_S

    run(scenario)


def test_an_owner_whose_disk_hangs_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbouring, "SILENT_S", 0.5)
    monkeypatch.setattr(neighbouring, "LONGEST_S", 1.0)
    monkeypatch.setattr(neighbours, "ALIVE_S", 0.05)

    async def scenario() -> None:
        shard = on_disk(tmp_path / "disk")
        own, other = shard.tier(), shard.tier()
        async with owning(tmp_path / "arena", own), asking(tmp_path / "arena", other) as (mover, client):
            own.go.clear()
            assert await load(mover, shard, other) == {"disk": len(shard.data)}
            assert not client.connected
            own.go.set()

    run(scenario)


def test_a_successor_of_the_owner_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbouring, "ENDED_S", 0.0)

    async def scenario() -> None:
        shard = on_disk(tmp_path / "disk")
        own, other, last = shard.tier(), shard.tier(), shard.tier()
        folder = tmp_path / "arena"
        async with owning(folder, own):
            pass
        async with asking(folder, other) as (mover, client):
            assert not client.connected
            assert await load(mover, shard, other) == {"disk": len(shard.data)}
            mover.arena.drop(MODEL)
            async with owning(folder, last):
                assert await load(mover, shard, other) == {"host": len(shard.data)} and client.connected

    run(scenario)


def test_what_is_no_message_ends_that_connection_only(tmp_path: Path) -> None:
    async def scenario() -> None:
        shard = on_disk(tmp_path / "disk")
        own, other = shard.tier(), shard.tier()
        folder = tmp_path / "arena"
        async with owning(folder, own) as (_, serving), asking(folder, other) as (mover, _):
            for noise in (b"\xff" * 64, (1 << 31).to_bytes(4, "little"), pack([])[:2] + b"\x05\0\0\0abcde"):
                reader, writer = await streams(await connected(folder))
                writer.write(noise)
                assert await reader.read() == b""
                writer.transport.abort()
            assert await load(mover, shard, other) == {"host": len(shard.data)} and serving.connected == 1

    run(scenario)


def test_parts_of_chunks_are_lent_from_memory_and_never_fetched(tmp_path: Path) -> None:
    """A slice of a few blocks must not cost whole chunks: those that are there serve, others are not read."""

    async def scenario() -> None:
        shard = on_disk(tmp_path / "disk")
        own, other = shard.tier(), shard.tier()
        async with owning(tmp_path / "arena", own) as (owner, _), asking(tmp_path / "arena", other) as (_, client):
            how = reading(shard, other)
            unknown = dataclasses.replace(how, size=0)
            first = owner.all_of(len(shard.data))[0]
            assert await client.get(unknown, first) is None and own.read_bytes == 0
            await load(owner, shard, own)
            lent = await client.get(unknown, first)
            assert lent is not None and lent.still_good()
            lent.release()

    run(scenario)
