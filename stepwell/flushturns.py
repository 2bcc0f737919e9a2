"""Flushes of one checkpoint to one tier, on all ranks in the order of the rank that commits them there.

Several may be wanted: some parts by a rule, all of them by hand. They share files, so a rank does one after the other.
Two ranks that began with different ones would each wait for the other's part. So the lowest rank on the tier tells
which one it is at, in a list in the job's store, and a rank that is at another one lets that one pass.

That rank also deletes on the tier. So it says as well what is there when all ask for a flush by hand, and when all that
has asked for a flush has its answer: whoever comes later must neither wait for it nor trust what was said of an
earlier copy. The number of a try's line in the list is what ranks know it by.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from stepwell.chain import Chain
from stepwell.errors import CheckpointGone, NotPlanned, StepwellError, TierError
from stepwell.flushing import TELL_AFTER, Goal
from stepwell.format.names import Attempt
from stepwell.ownership import Ownership, group_of
from stepwell.tiers.base import Tier

#: between two looks at a tier's list, however many flushes are on their way there
READ_S = 0.1

_Place = tuple[str, str, tuple[str, ...] | None]  # tier, checkpoint, parts


class _Turn(msgspec.Struct, frozen=True):
    checkpoint: str
    parts: tuple[str, ...] | None
    begins: bool
    why: str = ""  # what ended the try, if there will be no other one
    over: list[str] = []  # the asks that are answered by that


class FlushTurns:
    """Of one run's writer. Lives on the event loop."""

    def __init__(self, chain: Chain, owner: Ownership) -> None:
        self._chain, self._owner = chain, owner
        self._next: dict[str, int] = {}  # tier -> the number of its list's next line
        self._at: dict[tuple[str, str], tuple[int, _Turn]] = {}  # (tier, checkpoint) -> what the lowest rank is at
        self._ended: Counter[_Place] = Counter()  # tries of each flush
        self._why: dict[_Place, str] = {}  # what ended the last of them for good
        self._read_at: dict[str, float] = {}  # tier -> when its list was read
        self._over: dict[tuple[str, str], str] = {}  # (tier, ask) that is answered -> what it failed with
        self._asked: Counter[_Place] = Counter()  # flushes by hand

    def leader(self, tier: Tier) -> int:
        """The rank that commits what is flushed to the tier, and deletes there."""
        return self._owner.committer.covered(tier)[0]

    def leads(self, tier: Tier) -> bool:
        """Whether this rank does."""
        return self.leader(tier) == self._owner.job.rank

    # -- flushes by hand: all ranks ask for the same ones ----------------------------------

    @contextmanager
    def answering(
        self, tier: Tier, attempt: Attempt, parts: Sequence[str] | None
    ) -> Iterator[tuple[str, Callable[[bool], object]]]:
        """On the rank that leads: yields the name of what is asked, and what tells the others whether all is there
        already. If something is raised in its place they hear that."""
        key = self._ask(tier, attempt, parts)
        try:
            yield key, lambda there: self._put(key, b"there" if there else b"comes")
        except BaseException as error:
            self._put(key, f"not: {error or type(error).__name__}".encode())
            raise

    async def answered(self, tier: Tier, attempt: Attempt, parts: Sequence[str] | None) -> str | None:
        """On the others: the name of what is asked; None: all is there already. Raises WaitTimeout; CheckpointGone if
        something was raised there; StoreClosed."""
        key, leader = self._ask(tier, attempt, parts), self.leader(tier)
        what = f"the flush of step {attempt.step} to {tier.info.name} by rank {leader}"
        answer = (await self._owner.committer.word(leader, key, what)).decode()
        if answer.startswith("not: "):
            raise cannot(answer[5:], attempt, tier)
        return None if answer == "there" else key

    def _ask(self, tier: Tier, attempt: Attempt, parts: Sequence[str] | None) -> str:
        """Counts a flush by hand; the name that all ranks know it by."""
        wanted = None if parts is None else tuple(sorted(parts))
        place = (tier.info.name, attempt.folder, wanted)
        self._asked[place] += 1
        return f"{self._key_of(tier, attempt.folder, wanted)}/asked-{self._asked[place]}"

    # -- tries -----------------------------------------------------------------------------

    @contextmanager
    def ending(self, tier: Tier, goal: Goal) -> Iterator[None]:
        """On the rank that leads: a try is made inside, and its end is told."""
        why, over = "", False
        try:
            yield
            over = True
        except StepwellError as error:
            again = isinstance(error, TierError) or (error.retry and goal.tries + 1 < TELL_AFTER)
            over = not (again or isinstance(error, NotPlanned))
            why = str(error) if over else ""
            raise
        except Exception as error:  # what nobody expects ends the flush, too
            why, over = f"{type(error).__name__}: {error}", True
            raise
        finally:
            turn = _Turn(goal.attempt.folder, goal.parts, False, why, sorted(goal.asks) if over else [])
            self._tell(tier, turn)
            self._note(tier, turn)

    def begin(self, tier: Tier, goal: Goal) -> int:
        """On the rank that leads: a try begins, and nothing of what was there before is removed any more. Returns the
        number that all ranks know the try by."""
        return self._tell(tier, _Turn(goal.attempt.folder, goal.parts, True))

    def begun(self, tier: Tier, goal: Goal) -> int | None:
        """On the others: that number; None: the rank that leads is not at this flush."""
        self._read(tier)
        number, now = self._at.get((tier.info.name, goal.attempt.folder), (0, None))
        return number if now is not None and now.parts == goal.parts else None

    def over(self, tier: Tier, goal: Goal) -> str | None:
        """On the others: if the rank that leads is at the end of all that has asked for this flush, what that failed
        with, or "". Who was not needed for it need not find it there: it may have been deleted since."""
        self._read(tier)
        ends = [self._over.get((tier.info.name, ask)) for ask in sorted(goal.asks)]
        if not ends or None in ends:
            return None
        return next((end for end in ends if end), "")

    def refuse(self, tier: Tier, goal: Goal, error: StepwellError) -> None:
        """On the others: this rank cannot do its part, and will not try again."""
        self._read_at.pop(tier.info.name, None)
        self._read(tier)  # which try that is
        self._owner.job.store.put(self._refusal(tier, goal), f"rank {self._owner.job.rank}: {error}".encode())

    def refused(self, tier: Tier, goal: Goal) -> str | None:
        """On the rank that leads: why another rank cannot do its part in this try."""
        said = self._owner.job.store.poll(self._refusal(tier, goal))
        return None if said is None else said.decode()

    def _refusal(self, tier: Tier, goal: Goal) -> str:
        ended = self._ended[tier.info.name, goal.attempt.folder, goal.parts]
        return f"{self._key_of(tier, goal.attempt.folder, goal.parts)}/refused-{ended}"

    def ended(self, tier: Tier, goal: Goal) -> int:
        """On the others: how many tries of this flush the rank that leads has ended, well or not."""
        self._read(tier)
        return self._ended[tier.info.name, goal.attempt.folder, goal.parts]

    def why(self, tier: Tier, goal: Goal) -> str:
        """What ended the last of these tries, if there will be no other one."""
        return self._why.get((tier.info.name, goal.attempt.folder, goal.parts), "")

    def crosses(self, tier: Tier, goal: Goal) -> bool:
        """On the others: whether the rank that leads is at another flush of this checkpoint."""
        self._read(tier)
        _, now = self._at.get((tier.info.name, goal.attempt.folder), (0, None))
        return now is not None and now.parts != goal.parts

    def _read(self, tier: Tier) -> None:
        name, store, now = tier.info.name, self._owner.job.store, self._chain.clock.monotonic()
        if now - self._read_at.get(name, -READ_S) < READ_S:
            return
        self._read_at[name] = now
        while (data := store.poll(self._key(tier))) is not None:
            turn = msgspec.json.decode(data, type=_Turn)
            number = self._next.get(name, 0)
            self._next[name] = number + 1
            if turn.begins:
                self._at[name, turn.checkpoint] = number, turn
            else:
                self._at.pop((name, turn.checkpoint), None)
                self._note(tier, turn)

    def _note(self, tier: Tier, turn: _Turn) -> None:
        place = (tier.info.name, turn.checkpoint, turn.parts)
        self._ended[place] += 1
        self._why[place] = turn.why
        self._over |= {(tier.info.name, ask): turn.why for ask in turn.over}

    def _tell(self, tier: Tier, turn: _Turn) -> int:
        number = self._next.get(tier.info.name, 0)
        if self._owner.job.world > 1:
            self._put(self._key(tier), msgspec.json.encode(turn))
            self._next[tier.info.name] = number + 1
        return number

    def _put(self, key: str, data: bytes) -> None:
        if self._owner.job.world > 1:
            self._owner.job.store.put(key, data)

    def _key(self, tier: Tier) -> str:
        return f"{self._list(tier)}/{self._next.get(tier.info.name, 0)}"

    def _key_of(self, tier: Tier, checkpoint: str, parts: tuple[str, ...] | None) -> str:
        return f"{self._list(tier)}/{checkpoint}/{'*' if parts is None else '+'.join(parts)}"

    def _list(self, tier: Tier) -> str:
        return f"{group_of(self._chain, self._owner.job)}/turns/{tier.info.name}/{self.leader(tier)}"


def cannot(why: str, attempt: Attempt, tier: Tier) -> CheckpointGone:
    """What is raised where another rank's reason ends a flush."""
    return CheckpointGone(f"another rank cannot flush its part: {why}", step=attempt.step, tier=tier.info.name)
