"""What captures keep for the next ones: plans, and what they remember of the objects they met."""

from __future__ import annotations

from stepwell.state.alias import Aliases
from stepwell.state.plan import Plan, make_plan
from stepwell.state.recall import Memory
from stepwell.state.structure import Structure

#: plans kept; a trainer has one, an evaluation loop beside it perhaps another
PLANS_MAX = 8
#: memories kept: each that does not fit may cost a walk, and few states are saved in turns
MEMORIES_MAX = 4
#: memories of captures, one after the other, that are made although nothing was recalled of any
UNUSED_MAX = 16


class PlanCache:
    """The plans of the last few structures, and the memories of the last few captures. Safe to share between threads,
    and with a signal handler that saves while a save is being planned: there is no lock, and at worst a plan is made
    twice.

    Looked through one by one: comparing two structures costs less than hashing one, and most differ at once.
    """

    def __init__(self) -> None:
        self._plans: tuple[Plan, ...] = ()  # newest last; replaced, never changed
        self.memories: tuple[Memory, ...] = ()  # what captures have left behind for the next ones, likewise
        self._unused = 0  # memories in a row that nothing was recalled of

    def known(self, structure: Structure) -> Structure:
        """The equal structure of a kept plan, with what it has worked out already; else the one given."""
        return next((plan.structure for plan in reversed(self._plans) if plan.structure == structure), structure)

    def plan(self, structure: Structure, aliases: Aliases) -> Plan:
        """The plan kept for exactly this structure, as `known` returned it, or a new one."""
        plans = self._plans
        found = next((plan for plan in plans if plan.structure is structure and plan.aliases == aliases), None)
        if found is None:
            found = make_plan(structure, aliases)
        self._plans = (*(plan for plan in plans if plan is not found), found)[-PLANS_MAX:]
        return found

    def keep(self, memory: Memory) -> None:
        """Keeps a memory in place of the oldest; after too many that were of no use, none at all."""
        self._unused += 1
        self.memories = (*self.memories, memory)[-MEMORIES_MAX:] if self.wants_memory else ()

    def recalled(self, memory: Memory, now: Memory) -> None:
        """Notes that a memory has served; `now` is to be tried first next time."""
        self._unused = 0
        memories = self.memories
        if not memories or memories[-1] is not now:
            self.memories = (*(each for each in memories if each is not memory), now)[-MEMORIES_MAX:]

    @property
    def wants_memory(self) -> bool:
        """Whether it is worth while to remember a capture; states whose objects are new each time make it vain."""
        return self._unused < UNUSED_MAX
