"""Notes: numbered without gaps, folded by number, read without ever being fatal or holding anything up."""

from __future__ import annotations

import asyncio
import errno
import math
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.catalog import Catalog
from stepwell.errors import TierError
from stepwell.format.names import Attempt, note_file, note_of
from stepwell.format.records import Note, encode
from stepwell.notes import PAUSE_S, READ_S, READS_AT_ONCE, Notes
from stepwell.tiers.base import RecordKey, Tier
from stepwell.tiers.memory import MemoryTier
from stepwell.tiers.wrap import Fault, Faulty
from tests.core.virtual import on_virtual_time

A, B = Attempt(1, 1, 100), Attempt(1, 2, 200)
ALWAYS = 10**9


class Counting(Faulty):
    """Counts the looks at records."""

    looks = 0

    async def fetch(self, record: RecordKey) -> bytes | None:
        self.looks += 1
        return await super().fetch(record)


def on(scenario: Callable[[MemoryTier], Awaitable[None]]) -> None:
    async def run() -> None:
        await scenario(MemoryTier(name="last"))

    on_virtual_time(run)


async def put(tier: Tier, number: int, data: bytes) -> None:
    assert await tier.commit(RecordKey("run", note_file(number)), data)


def note(number: int, attempt: Attempt = A, **said: object) -> bytes:
    return encode(Note(number=number, attempt=attempt.folder, step=attempt.step, who="x", made=0.0, **said))  # type: ignore[arg-type]


def test_later_notes_win_whoever_reads_them_in_whichever_order() -> None:
    async def scenario(tier: MemoryTier) -> None:
        mine, other = Notes("run", tier), Notes("run", tier)
        assert await mine.add(A, metrics={"acc": 0.5, "loss": 1.0}, tags={"x": True}) == 1
        assert await other.add(A, metrics={"acc": 0.7}, tags={"y": True, "x": False}) == 2
        assert await mine.add(B, keep=True) == 3
        await other.refresh()
        for notes in (mine, other):
            assert notes.metrics(A, {"loss": 3.0, "lr": 0.1}) == {"loss": 1.0, "lr": 0.1, "acc": 0.7}
            assert notes.tags(A, ("saved", "x")) == ("saved", "y") and notes.tags(A) == ("y",)
            assert notes.kept(B) and not notes.kept(A) and notes.known and notes.numbers == [1, 2, 3]
        late = Notes("run", tier)
        await late.catch_up([2, 3])
        assert late.metrics(A) == {"acc": 0.7}
        await late.catch_up([1, 2, 3])
        assert late.metrics(A) == {"acc": 0.7, "loss": 1.0} and late.tags(A) == ("y",)

    on(scenario)


def test_kept_while_any_holder_keeps_it() -> None:
    async def scenario(tier: MemoryTier) -> None:
        notes = Notes("run", tier)
        await notes.add(A, keep=True)
        await notes.add(A, keep=True, holder="fork:sft2")
        await notes.add(A, keep=False)
        await notes.add(A, metrics={"acc": 1.0})  # says nothing of keeping
        assert notes.holders(A) == {"fork:sft2"} and notes.kept(A)
        await notes.add(A, keep=False, holder="fork:sft2")
        assert not notes.kept(A)

    on(scenario)


@given(st.lists(st.tuples(st.sampled_from([A, B]), st.sampled_from("uvw"), st.booleans()), max_size=12), st.randoms())
def test_the_fold_is_that_of_the_numbers(said: list[tuple[Attempt, str, bool]], order: object) -> None:
    async def scenario(tier: MemoryTier) -> None:
        writer, reader = Notes("run", tier), Notes("run", tier)
        last: dict[tuple[Attempt, str], bool] = {}
        for attempt, name, yes in said:
            await writer.add(attempt, tags={name: yes}, keep=yes, holder=name)
            last[attempt, name] = yes
        numbers = list(range(1, len(said) + 1))
        order.shuffle(numbers)  # type: ignore[attr-defined]
        for number in numbers:
            await reader.catch_up([number])
        for notes in (writer, reader):
            for attempt in (A, B):
                true = {name for (of, name), yes in last.items() if of == attempt and yes}
                assert notes.holders(attempt) == true == set(notes.tags(attempt))

    on(scenario)


def test_many_at_once_lose_no_number() -> None:
    async def scenario(tier: MemoryTier) -> None:
        numbers = await asyncio.gather(*(Notes("run", tier).add(A, metrics={f"m{i}": float(i)}) for i in range(40)))
        assert sorted(numbers) == list(range(1, 41))
        reader = Notes("run", tier)
        await reader.refresh()
        assert reader.metrics(A) == {f"m{i}": float(i) for i in range(40)}

    on(scenario)


def test_no_news_costs_one_fetch_and_a_listing_none() -> None:
    async def scenario(memory: MemoryTier) -> None:
        tier = Counting(memory, [])
        writer, reader = Notes("run", memory), Notes("run", tier)
        for _ in range(3 * READS_AT_ONCE):
            await writer.add(A, keep=True)
        await reader.refresh()
        before, version = tier.looks, reader.version
        await reader.refresh()
        assert (tier.looks - before, reader.version) == (1, version)
        await reader.catch_up(range(1, 3 * READS_AT_ONCE + 1))
        assert tier.looks - before == 1
        await writer.add(A, keep=False)
        await reader.refresh()
        assert not reader.kept(A) and reader.version == version + 1

    on(scenario)


BAD = {
    "flipped": note(2).replace(b'"keep": null', b'"keep": true'),
    "no JSON": b"\x00\xff",
    "another's number": note(7, keep=True),
    "no number": note(2, metrics={"acc": "high"}, keep=True),
    "of the future": note(2, format=99, keep=True),
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
def test_a_bad_note_is_passed_over_and_said_once(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(tier: MemoryTier) -> None:
        await put(tier, 1, note(1, tags={"a": True}))
        await put(tier, 2, data)
        await put(tier, 3, note(3, tags={"b": True}))
        notes = Notes("run", tier)
        await notes.refresh()
        await notes.catch_up([1, 2, 3])
        assert notes.tags(A) == ("a", "b") and not notes.kept(A) and notes.known
        assert await notes.add(A, keep=True) == 4 and notes.kept(A)

    on(scenario)
    assert len([record for record in caplog.records if "note 2 of run run is passed over" in record.message]) == 1


def test_one_that_cannot_be_read_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(memory: MemoryTier) -> None:
        await put(memory, 1, note(1, tags={"a": True}))
        await put(memory, 2, note(2, tags={"b": True}))
        notes = Notes("run", Faulty(memory, [Fault("fetch", 1, errno=errno.EACCES, times=2)]))
        await notes.catch_up([1])  # the first is hit by the first fault
        await notes.catch_up([1, 2])  # and by the second one; the second note is read
        assert notes.tags(A) == ("b",)
        await notes.catch_up([1, 2])
        assert notes.tags(A) == ("a", "b")

    on(scenario)
    assert len(caplog.records) == 1


def test_a_note_that_is_lost_with_its_writer_is_forgotten_and_its_number_read_again() -> None:
    """It was read before it was durable."""

    async def scenario(memory: MemoryTier) -> None:
        notes = Notes("run", memory)
        await put(memory, 1, note(1, tags={"a": True}))
        await put(memory, 2, note(2, tags={"b": True}, keep=True))
        await notes.refresh()
        await memory.drop([RecordKey("run", note_file(2))])
        await notes.catch_up([1])
        assert notes.tags(A) == ("a",) and not notes.kept(A) and notes.numbers == [1]
        await put(memory, 2, note(2, tags={"c": True}))
        await notes.refresh()
        assert notes.tags(A) == ("a", "c")

    on(scenario)


def test_a_note_that_is_younger_than_a_listing_stays() -> None:
    async def scenario(memory: MemoryTier) -> None:
        notes = Notes("run", memory)
        await notes.add(A, tags={"a": True}, keep=True)
        await notes.catch_up([])
        assert notes.tags(A) == ("a",) and notes.kept(A) and notes.known
        assert await notes.add(A, tags={"b": True}) == 2

    on(scenario)


@pytest.mark.parametrize("kind", ["error", "stall"])
def test_a_tier_that_does_not_answer_leaves_what_was_known(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(memory: MemoryTier) -> None:
        loop = asyncio.get_running_loop()
        tier = Faulty(memory, [Fault("fetch", 3, kind, errno.ETIMEDOUT, times=2)])  # type: ignore[arg-type]
        await put(memory, 1, note(1, tags={"a": True}))
        notes = Notes("run", tier)
        await notes.refresh()
        await put(memory, 2, note(2, tags={"b": True}))
        began = loop.time()
        await notes.refresh()
        assert loop.time() - began <= READ_S and notes.tags(A) == ("a",)
        await notes.refresh()  # not asked again at once
        assert loop.time() - began <= READ_S and notes.tags(A) == ("a",)
        await asyncio.sleep(PAUSE_S)
        await notes.refresh()
        await asyncio.sleep(PAUSE_S)
        await notes.refresh()
        assert notes.tags(A) == ("a", "b")
        tier.release()

    on(scenario)
    assert len([record for record in caplog.records if "stay as they were" in record.message]) == 1


def test_notes_that_were_never_read_are_not_known() -> None:
    async def scenario(memory: MemoryTier) -> None:
        notes = Notes("run", Faulty(memory, [Fault("fetch", 1, errno=errno.ETIMEDOUT, times=ALWAYS)]))
        await notes.refresh()
        assert not notes.known

    on(scenario)


def test_without_permission_the_error_names_the_folder() -> None:
    async def scenario(memory: MemoryTier) -> None:
        notes = Notes("run", Faulty(memory, [Fault("commit", 1, errno=errno.EACCES)]))
        with pytest.raises(TierError, match=r"run/notes.*chmod g\+rwxs") as caught:
            await notes.add(A, keep=True)
        assert caught.value.errno == errno.EACCES and not notes.kept(A)

    on(scenario)


def test_a_catalog_reads_the_notes_of_the_last_tier_and_a_gap_hides_none() -> None:
    async def scenario(last: MemoryTier) -> None:
        near = MemoryTier(name="near")
        await put(near, 1, note(1, tags={"elsewhere": True}))
        await put(last, 1, note(1, metrics={"acc": math.inf.__repr__()}))
        await put(last, 3, note(3, tags={"after the gap": True}))
        catalog = Catalog("run", [near, last])
        await catalog.refresh()
        assert catalog.notes.tags(A) == ("after the gap",) and catalog.notes.metrics(A) == {"acc": math.inf}
        assert await catalog.notes.add(A, keep=True) == 4

    on(scenario)


def test_names_of_notes() -> None:
    assert note_file(12) == "notes/0000012.json" and note_of("0000012.json") == 12 and note_of("123456789.json")
    assert note_of("12.json") is None and note_of(".0000012.json.1-ab.tmp") is None
