"""Notes: what was said of a run's checkpoints after they were saved, such as evaluation results and keeps.

Each is a small file that is never replaced, on the run's last tier: `notes/0000001.json` and so on. The number is
taken by exclusive create, so the order needs no clock, whoever writes from wherever, and one fetch of the next
number tells whether there is news. (Alternative considered: files named by time and a random id; then every look
would be a listing, and the last word would be that of the clock that runs fast.)
"""

from __future__ import annotations

import asyncio
import bisect
import errno
import logging
import operator
import os
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from stepwell.checkpoint import numbers
from stepwell.epochs import user_name
from stepwell.errors import CorruptData, StepwellError, TierError, TierUnavailable
from stepwell.format.names import Attempt, note_file
from stepwell.format.records import Note, decode, encode
from stepwell.tiers.base import NOTES, RecordKey, Tier

log = logging.getLogger("stepwell")

#: notes fetched at once when there may be many
READS_AT_ONCE = 32
#: what so many may take together: whoever decides about a save or a delete must not wait for a tier that hangs
READ_S = 10.0
#: after a tier did not answer, the cheap look is not repeated for so long
PAUSE_S = 30.0
#: numbers that one note tries; each that is taken is one that another process has added meanwhile
TRIES = 10_000

_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


@dataclass(slots=True)
class _Said:
    """All notes about one checkpoint, and what they come to."""

    notes: list[Note] = field(default_factory=list)  # by number
    metrics: dict[str, float] = field(default_factory=dict)
    tags: dict[str, bool] = field(default_factory=dict)
    keeps: dict[str, bool] = field(default_factory=dict)  # holder -> its last word

    def add(self, note: Note) -> None:
        bisect.insort(self.notes, note, key=operator.attrgetter("number"))
        self._sum_up()

    def remove(self, number: int) -> None:
        self.notes = [note for note in self.notes if note.number != number]
        self._sum_up()

    def _sum_up(self) -> None:
        self.metrics, self.tags, self.keeps = {}, {}, {}
        for each in self.notes:
            self.metrics |= numbers(each.metrics)
            self.tags |= each.tags
            if each.keep is not None:
                self.keeps[each.holder] = each.keep


class Notes:
    """The notes of one run, as they were last read. Lives on the event loop; what only looks does no I/O.

    tier: the run's last one. A note that is damaged or unreadable is passed over with a warning; a tier that does not
    answer leaves what was known.
    """

    def __init__(self, run: str, tier: Tier | None) -> None:
        self.run, self.tier = run, tier
        self.version = 0  # grows with whatever changes
        self.known = False  # whether they have been read since the tier last answered for the first time
        self._said: dict[str, _Said] = {}
        self._last = 0  # the highest number that is there
        self._unread: set[int] = set()  # numbers that are there, and have not been read
        self._warned: set[int] = set()  # those of them that cannot be
        self._done: set[int] = set()  # read, or damaged for good
        self._quiet_until = 0.0
        self._reading = asyncio.Lock()

    # -- looking ---------------------------------------------------------------------------

    def metrics(self, attempt: Attempt, saved: Mapping[str, float] | None = None) -> dict[str, float]:
        """What notes say of a checkpoint, over what it was `saved` with."""
        said = self._said.get(attempt.folder)
        return {**(saved or {}), **(said.metrics if said is not None else {})}

    def tags(self, attempt: Attempt, saved: Sequence[str] = ()) -> tuple[str, ...]:
        """What notes say of a checkpoint, over what it was `saved` with."""
        said = self._said.get(attempt.folder)
        changed = said.tags if said is not None else {}
        stay = [tag for tag in saved if changed.get(tag, True)]
        return tuple(dict.fromkeys([*stay, *(tag for tag, there in changed.items() if there)]))

    @property
    def numbers(self) -> list[int]:
        """The numbers that are there, those of bad notes included."""
        return sorted(self._done | self._unread)

    def holders(self, attempt: Attempt) -> frozenset[str]:
        """Who keeps the checkpoint: "user", or the names of others such as forks."""
        said = self._said.get(attempt.folder)
        return frozenset(holder for holder, keeps in said.keeps.items() if keeps) if said is not None else frozenset()

    def kept(self, attempt: Attempt) -> bool:
        """Whether anybody keeps it."""
        return bool(self.holders(attempt))

    # -- reading ---------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Reads what is new: one fetch if nothing is. Never raises for a tier that does not answer; waits no longer
        than READ_S for an answer, and then does not ask again for PAUSE_S."""
        if self.tier is None:
            return
        async with self._reading:
            if asyncio.get_running_loop().time() >= self._quiet_until:
                await self._read_on()

    async def catch_up(self, listed: Collection[int]) -> None:
        """As `refresh`, from a listing of all numbers that are there: a gap in them hides nothing, and what could not
        be read is tried again."""
        if self.tier is None:
            return
        async with self._reading:
            await self._forget_lost(sorted(self._done.difference(listed)))
            self._unread |= set(listed) - self._done
            self._last = max(self._done | self._unread, default=0)
            if await self._fetch(sorted(self._unread)) is not None:
                self.known = True

    async def _forget_lost(self, missing: Sequence[int]) -> None:
        """Of notes that a listing lacks: some are younger than it; but one that was read before it was durable may have
        been lost with its writer, and its number may be another note's by now."""
        assert self.tier is not None
        for number in missing:
            try:
                async with asyncio.timeout(READ_S):
                    data = await self.tier.fetch(RecordKey(self.run, note_file(number)))
            except (TimeoutError, StepwellError):
                return  # what was known stays
            if data is None:
                self._done.discard(number)
                self._warned.discard(number)
                for said in self._said.values():
                    said.remove(number)
                self.version += 1

    async def _read_on(self) -> None:
        """What is known to be there, and on from the last number until one is not there."""
        wanted, at_once = sorted(self._unread - self._warned), 1
        while True:
            ahead = list(range(self._last + 1, self._last + 1 + at_once))
            there = await self._fetch([*wanted, *ahead])
            if there is None:
                return
            if not there.issuperset(ahead):
                break
            wanted, at_once = [], min(2 * at_once, READS_AT_ONCE)
        self.known = True

    async def _fetch(self, wanted: Sequence[int]) -> set[int] | None:
        """The numbers that are there; None if the tier does not answer."""
        there: set[int] = set()
        for begin in range(0, len(wanted), READS_AT_ONCE):
            batch = wanted[begin : begin + READS_AT_ONCE]
            try:
                async with asyncio.timeout(READ_S):
                    answers = await asyncio.gather(*(self._read(number) for number in batch))
            except (TimeoutError, TierUnavailable) as error:
                self._away(error)
                return None
            there |= {number for number, found in zip(batch, answers, strict=True) if found}
        self._quiet_until = 0.0
        return there

    async def _read(self, number: int) -> bool:
        """Whether a note has this number, be it good or bad."""
        assert self.tier is not None
        name = note_file(number)
        try:
            data = await self.tier.fetch(RecordKey(self.run, name))
            if data is None:
                return False
            note = decode(data, Note, run=self.run, tier=self.tier.info.name, path=name)
            if note.number != number:
                raise CorruptData(f"it is a copy of note {note.number}", path=name)
            numbers(note.metrics)  # raises if they are none, before anything counts on it
            self._take(note)
        except TierUnavailable:
            raise
        except (StepwellError, ValueError) as error:
            self._last = max(self._last, number)
            self._pass_over(number, error)
        return True

    def _take(self, note: Note) -> None:
        self._last = max(self._last, note.number)
        self._unread.discard(note.number)
        if note.number not in self._done:
            self._said.setdefault(note.attempt, _Said()).add(note)
            self._done.add(note.number)
            self.version += 1

    def _pass_over(self, number: int, error: Exception) -> None:
        if isinstance(error, TierError):
            self._unread.add(number)
        else:  # it will not get better
            self._unread.discard(number)
            self._done.add(number)
        if number not in self._warned:
            self._warned.add(number)
            log.warning("note %d of run %s is passed over: %s", number, self.run, error)

    def _away(self, error: Exception) -> None:
        assert self.tier is not None
        if not self._quiet_until:
            why = str(error) or f"no answer within {READ_S:.0f} s"
            log.warning("notes of run %s stay as they were last read: tier %s: %s", self.run, self.tier.info.name, why)
        self._quiet_until = asyncio.get_running_loop().time() + PAUSE_S

    # -- writing ---------------------------------------------------------------------------

    async def add(
        self,
        attempt: Attempt,
        *,
        metrics: Mapping[str, float | str | None] | None = None,
        tags: Mapping[str, bool] | None = None,
        keep: bool | None = None,
        holder: str = "user",
        made: float | None = None,
    ) -> int:
        """Adds a note, durably, and returns its number; what it says is there at once, in `metrics` and so on.

        Raises TierError, which names the folder, if nobody may write there; TierUnavailable after the tier's own time.
        """
        note = Note(
            number=0,
            attempt=attempt.folder,
            step=attempt.step,
            metrics=dict(metrics or {}),
            tags=dict(tags or {}),
            keep=keep,
            holder=holder,
            who=f"{user_name()}@{socket.gethostname()}, pid {os.getpid()}",
            made=time.time() if made is None else made,
        )
        if self.tier is None:
            raise TierUnavailable("the tier of the notes is not there", run=self.run)
        await self.refresh()
        note.number = self._last
        for _ in range(TRIES):
            note.number = max(note.number, self._last) + 1
            try:
                added = await self.tier.commit(RecordKey(self.run, note_file(note.number)), encode(note))
            except TierError as error:
                raise (self._forbidden(error) if error.errno in _FORBIDDEN else error) from error
            if added:
                self._take(note)
                return note.number
            if note.number not in self._done:
                self._unread.add(note.number)
                self._last = max(self._last, note.number)
            await self.refresh()
        raise TierError(f"{TRIES} numbers for a note were taken", todo="Try again", run=self.run)

    def _forbidden(self, error: TierError) -> TierError:
        assert self.tier is not None
        folder = os.path.join(self.tier.info.detail.get("path", ""), self.run, NOTES)
        todo = f"The owner of the run allows it: mkdir -p '{folder}' && chmod g+rwxs '{folder}'"
        if error.errno == errno.EROFS:
            todo = "Annotate where the file system is mounted for writing"
        user = user_name()
        forbidden = TierError(f"Notes need a folder that user {user} may write to", todo=todo, path=folder)
        forbidden.errno = error.errno
        return forbidden
