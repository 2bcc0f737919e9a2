"""Many ranks flush as one: rank 0 asks the policies what goes down, and the other ranks do what it has decided.

Each rank looks at another moment: if all asked for themselves, two of them might choose different checkpoints, and each
flush would wait for a part that never comes. The decisions are a numbered list in the job's store, which the other
ranks follow while the store is open.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection
from typing import Literal

import msgspec

from stepwell.chain import Chain
from stepwell.format.names import Attempt
from stepwell.ownership import Ownership, group_of
from stepwell.policies.base import Cancel, Flush

log = logging.getLogger("stepwell")

#: between two looks for the next decision: while something here waits for it, and else
NEAR_S, FAR_S = 0.02, 1.0


class _Said(msgspec.Struct, frozen=True):
    """A line of the list. saved: that is all that follows from the save of a checkpoint. closing: that is all that
    must get down before the store is closed or drained, as far as checkpoints up to this one go. closed: no more."""

    what: Literal["flush", "cancel", "saved", "closing", "closed"]
    checkpoint: str
    tier: str = ""
    reason: str = ""
    parts: tuple[str, ...] | None = None

    @property
    def move(self) -> Flush | Cancel:
        if self.what == "flush":
            return Flush(self.checkpoint, self.tier, self.reason, self.parts)
        return Cancel(self.checkpoint, self.tier, self.reason)


class Decisions:
    """Of one store. Lives on the event loop."""

    def __init__(self, chain: Chain, owner: Ownership, carry_out: Callable[[Flush | Cancel, str], object]) -> None:
        """carry_out: does what rank 0 has decided, by a name that all ranks know the decision by."""
        self._chain, self._owner, self._carry_out = chain, owner, carry_out
        self.saving: Callable[[], Collection[str]] = tuple  # checkpoints of this rank's saves under way
        self.committed: Callable[[], Collection[str]] = tuple  # those of them that are where they go first
        self._said: set[str] = set()  # those of them of which rank 0 has said what follows
        self._calls = 0  # the last save that has ended
        self._early: list[tuple[str, _Said]] = []  # on checkpoints that this rank has no part of yet
        self._closing: Attempt | None = None  # up to it rank 0 has said what must get down
        self._closed = False
        self._next = 0  # the number of the next decision
        self._following: asyncio.Task[None] | None = None
        self._heard, self._ask = asyncio.Event(), asyncio.Event()
        self._waiting = 0

    # -- rank 0 ----------------------------------------------------------------------------

    def tell(self, move: Flush | Cancel) -> str:
        """This is done, or begun, by all ranks; returns the name that they know the decision by."""
        name = self._name()
        if isinstance(move, Flush):
            self._tell(_Said("flush", move.checkpoint, move.tier, move.reason, move.parts))
        else:
            self._tell(_Said("cancel", move.checkpoint, move.tier, move.reason))
        return name

    def tell_saved(self, checkpoint: str) -> None:
        """All is decided that follows from this save."""
        self._said.add(checkpoint)
        self._tell(_Said("saved", checkpoint))

    def tell_closing(self, newest: str) -> None:
        """All is decided that must get down before the end."""
        self._tell(_Said("closing", newest))

    def tell_closed(self) -> None:
        """Nothing more will be decided."""
        self._tell(_Said("closed", ""))

    def _tell(self, said: _Said) -> None:
        if not self._owner.taken or self._owner.job.world == 1 or not self._owner.job.leader:
            return
        try:
            self._owner.job.store.put(self._key(), msgspec.json.encode(said))
        except Exception as error:  # the job's store is gone, and the others with it
            log.warning("could not tell the other ranks what to do with %s: %s", said.checkpoint, error)
        self._next += 1

    # -- the others ------------------------------------------------------------------------

    def begin(self) -> None:
        """Follows the list, unless this is the rank that makes it."""
        if self._owner.job.world > 1 and not self._owner.job.leader:
            self._following = asyncio.ensure_future(self._follow())

    @property
    def follows(self) -> bool:
        """Whether another rank decides."""
        return self._following is not None and not self._following.done()

    async def in_step(self) -> None:
        """Returns once rank 0 has said what follows from all that this rank has committed: before that, what may be
        deleted here is not known."""
        if not self.follows:
            return
        self._catch_up()
        await self._until(lambda: self._said.issuperset(self.committed()), "what follows from a save")
        self._said.update(self.committed())

    def ended(self, checkpoint: str) -> None:
        """A save of this rank is over, however it went."""
        if checkpoint not in self._said and not self.follows:
            self.tell_saved(checkpoint)
        self._said.discard(checkpoint)
        attempt = Attempt.parse(checkpoint)
        self._calls = max(self._calls, attempt.call if attempt is not None else 0)
        self._catch_up()

    async def closing(self, newest: Attempt) -> None:
        """Returns once rank 0 has said what must get down before the end."""

        def said() -> bool:
            return self._closed or (self._closing is not None and self._closing >= newest)

        await self._until(said, "what must get down at the end")

    def close(self) -> None:
        """Follows the list no more."""
        if self._following is not None:
            self._following.cancel()

    async def _until(self, true: Callable[[], bool], what: str) -> None:
        """Asks often meanwhile; gives up after the time that ranks have for each other."""
        patience_s = self._chain.settings.rank_timeout_seconds
        self._waiting += 1
        self._ask.set()
        try:
            async with asyncio.timeout(patience_s):
                while self.follows and not true():
                    await self._heard.wait()
        except TimeoutError:
            log.warning("rank 0 has not said within %.0f s %s: nothing is flushed for it", patience_s, what)
        finally:
            self._waiting -= 1

    async def _follow(self) -> None:
        job = self._owner.job
        try:
            while True:
                try:
                    told = job.store.poll(self._key())
                except Exception as error:  # it has ended with rank 0: nobody decides any more
                    log.debug("rank 0 decides no more: %s", error)
                    return
                if told is None:
                    await self._pause()
                    continue
                name = self._name()
                self._next += 1
                self._hear(name, msgspec.json.decode(told, type=_Said))
        finally:
            self._tell_waiters()

    async def _pause(self) -> None:
        self._ask.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(NEAR_S if self._waiting else FAR_S):
                await self._ask.wait()

    def _hear(self, name: str, said: _Said) -> None:
        if said.what == "saved":
            self._said.update({said.checkpoint}.intersection(self.saving()))
        elif said.what == "closing":
            self._closing = Attempt.parse(said.checkpoint)
        elif said.what == "closed":
            self._closed = True
        else:
            self._early.append((name, said))
            self._catch_up()
        self._tell_waiters()

    def _catch_up(self) -> None:
        """Carries out what it can: rank 0 may decide on a checkpoint that it has in memory, and this rank has not."""
        waiting = {said.checkpoint for _, said in self._early if self._is_to_come(said.checkpoint)}
        ready = [(name, said) for name, said in self._early if said.checkpoint not in waiting]
        self._early = [(name, said) for name, said in self._early if said.checkpoint in waiting]
        for name, said in ready:
            try:
                self._carry_out(said.move, name)
            except Exception:  # the next ones may go
                log.exception("could not do what rank 0 has decided: %s", said.move)

    def _is_to_come(self, checkpoint: str) -> bool:
        attempt = Attempt.parse(checkpoint)
        if attempt is None or attempt in self._chain.catalog.holdings or attempt.epoch != self._owner.writership.epoch:
            return False
        return attempt.call > self._calls or checkpoint in self.saving()

    def _tell_waiters(self) -> None:
        self._heard.set()
        self._heard = asyncio.Event()

    def _name(self) -> str:
        return f"decision-{self._next}"

    def _key(self) -> str:
        return f"{group_of(self._chain, self._owner.job)}/{self._name()}"
