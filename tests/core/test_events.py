"""The event log: bounded, readable line by line, and never in anybody's way."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from stepwell.events import ENTRIES_MAX, LOGS_MAX, WRITE_S, Entry, EventLog, LogKeeper, Outlook, decode_log, log_file
from stepwell.format.names import Attempt
from stepwell.tiers.base import RecordKey
from stepwell.tiers.memory import MemoryTier
from stepwell.tiers.wrap import Fault, Faulty
from tests.core.virtual import LoopClock, on_virtual_time, turns

ATTEMPT = Attempt(100, 7, 31)


def test_it_is_bounded_and_tells_whoever_listens() -> None:
    async def main() -> None:
        log = EventLog(LoopClock())
        heard: list[Entry] = []
        log.listeners.append(heard.append)
        for step in range(ENTRIES_MAX + 5):
            log.add("failed", step, reason="disk full")
        assert len(log.entries) == ENTRIES_MAX and log.entries[0].step == 5 and len(heard) == ENTRIES_MAX + 5

    on_virtual_time(main)


def test_what_is_refused_again_and_again_is_told_once() -> None:
    async def main() -> None:
        log = EventLog(LoopClock())
        for reason in ("it is kept", "it is kept", "it is being read", "it is kept"):
            log.add("not done", ATTEMPT, "nvme", reason)
        assert [entry.reason for entry in log.entries] == ["it is kept", "it is being read", "it is kept"]

    on_virtual_time(main)


@given(st.lists(st.tuples(st.sampled_from(["saved", "deleted"]), st.integers(0, 10**9), st.text())), st.binary())
def test_lines_come_back_and_what_is_none_is_left_out(told: list[tuple[str, int, str]], torn: bytes) -> None:
    async def main() -> None:
        log = EventLog(LoopClock())
        for what, step, reason in told:
            log.add(what, Attempt(step, 1, 1), "pfs", reason, size_bytes=step, seconds=0.5)  # type: ignore[arg-type]
        outlook = Outlook(1, "step-1", "pfs", "stays")
        log.outlook = lambda: [outlook]
        lines = log.encode().splitlines()
        assert decode_log(lines) == [*log.entries, outlook]
        assert decode_log([*lines[:-1], lines[-1][:-1], torn.replace(b"{", b"")]) == list(log.entries)

    on_virtual_time(main)


def test_it_is_kept_beside_the_run_and_old_ones_go() -> None:
    async def main() -> None:
        tier, log = MemoryTier("pfs"), EventLog(LoopClock())
        keeper = LogKeeper(log, "run", tier, LoopClock())
        for epoch in range(1, LOGS_MAX + 3):
            keeping = asyncio.ensure_future(keeper.keep(epoch))
            log.add("saved", epoch, "nvme")
            await asyncio.sleep(WRITE_S + 1)
            keeping.cancel()
        there = [e for e in range(LOGS_MAX + 5) if await tier.fetch(RecordKey("run", log_file(e))) is not None]
        assert there == list(range(3, LOGS_MAX + 3))
        newest = await tier.fetch(RecordKey("run", log_file(LOGS_MAX + 2)))
        assert newest is not None and isinstance(decode_log(newest.splitlines())[-1], Entry)

    on_virtual_time(main)


def test_a_tier_that_refuses_it_stops_nothing() -> None:
    async def main() -> None:
        tier, log = Faulty(MemoryTier("pfs"), [Fault("beat", 1, "error")]), EventLog(LoopClock())
        keeper = LogKeeper(log, "run", tier, LoopClock())
        keeping = asyncio.ensure_future(keeper.keep(1))
        for step in (1, 2):
            log.add("saved", step, "nvme")
            await asyncio.sleep(WRITE_S + 1)
        await turns()
        assert not keeping.done()
        kept = await tier.fetch(RecordKey("run", log_file(1)))
        assert kept is not None and len(kept.splitlines()) == 2
        keeping.cancel()

    on_virtual_time(main)
