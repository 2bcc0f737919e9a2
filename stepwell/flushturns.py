"""Flushes of one checkpoint to one tier, on all ranks in the order of the rank that commits them there.

Several may be wanted: some parts by a rule, all of them by hand. They share files, so a rank does one after the other.
Two ranks that began with different ones would each wait for the other's part. So the lowest rank on the tier tells
which one it is at, in a list in the job's store, and a rank that is at another one lets that one pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from stepwell.chain import Chain
from stepwell.errors import NotPlanned, StepwellError, TierError
from stepwell.flushing import Goal
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


class FlushTurns:
    """Of one run's writer. Lives on the event loop."""

    def __init__(self, chain: Chain, owner: Ownership) -> None:
        self._chain, self._owner = chain, owner
        self._next: dict[str, int] = {}  # tier -> the number of its list's next line
        self._at: dict[tuple[str, str], _Turn] = {}  # (tier, checkpoint) -> what the lowest rank is at
        self._ended: Counter[_Place] = Counter()  # tries of each flush
        self._why: dict[_Place, str] = {}  # what ended the last of them for good
        self._read_at: dict[str, float] = {}  # tier -> when its list was read

    def leads(self, tier: Tier) -> bool:
        """Whether this rank commits what is flushed to the tier."""
        return self._owner.committer.covered(tier)[0] == self._owner.job.rank

    @contextmanager
    def taken(self, tier: Tier, goal: Goal) -> Iterator[None]:
        """On the rank that leads: a try is made inside."""
        self._tell(tier, _Turn(goal.attempt.folder, goal.parts, True))
        why = ""
        try:
            yield
        except StepwellError as error:
            why = "" if error.retry or isinstance(error, TierError | NotPlanned) else str(error)
            raise
        finally:
            turn = _Turn(goal.attempt.folder, goal.parts, False, why)
            self._tell(tier, turn)
            self._note(tier, turn)

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
        place = (tier.info.name, goal.attempt.folder, goal.parts)
        group, parts = group_of(self._chain, self._owner.job), "+".join(goal.parts or ("all",))
        leader = self._owner.committer.covered(tier)[0]
        return f"{group}/turns/{tier.info.name}/{leader}/{goal.attempt.folder}/{parts}/refused-{self._ended[place]}"

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
        now = self._at.get((tier.info.name, goal.attempt.folder))
        return now is not None and now.parts != goal.parts

    def _read(self, tier: Tier) -> None:
        name, store, now = tier.info.name, self._owner.job.store, self._chain.clock.monotonic()
        if now - self._read_at.get(name, -READ_S) < READ_S:
            return
        self._read_at[name] = now
        while (data := store.poll(self._key(tier))) is not None:
            turn = msgspec.json.decode(data, type=_Turn)
            self._next[name] = self._next.get(name, 0) + 1
            if turn.begins:
                self._at[name, turn.checkpoint] = turn
            else:
                self._at.pop((name, turn.checkpoint), None)
                self._note(tier, turn)

    def _note(self, tier: Tier, turn: _Turn) -> None:
        place = (tier.info.name, turn.checkpoint, turn.parts)
        self._ended[place] += 1
        self._why[place] = turn.why

    def _tell(self, tier: Tier, turn: _Turn) -> None:
        if self._owner.job.world > 1:
            self._owner.job.store.put(self._key(tier), msgspec.json.encode(turn))
            self._next[tier.info.name] = self._next.get(tier.info.name, 0) + 1

    def _key(self, tier: Tier) -> str:
        name = tier.info.name
        leader = self._owner.committer.covered(tier)[0]
        return f"{group_of(self._chain, self._owner.job)}/turns/{name}/{leader}/{self._next.get(name, 0)}"
