"""Which checkpoints count: timelines and the choice of the newest, as plain functions.

A rewind to step s at attempt a abandons every earlier attempt at a step above s. The list of rewinds
travels in each manifest, so the newest manifest alone tells which of the folders beside it are abandoned,
and no other manifest needs to be read for that. A rewind by hand, which no save follows for now, is a record
of its own; `merged` puts it among them. (Alternative considered: a timeline id in each folder's name, which
would make a rewind a rename.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stepwell.format.names import Attempt
from stepwell.format.records import Rewind


def abandoned(attempt: Attempt, rewinds: Iterable[Rewind]) -> bool:
    """Whether a later rewind left this attempt behind."""
    return any(attempt.step > r.to and (attempt.epoch, attempt.call) < (r.epoch, r.call) for r in rewinds)


def add_rewind(rewinds: Sequence[Rewind], new: Rewind) -> list[Rewind]:
    """`rewinds` with `new` at its end, without those that it makes redundant."""
    return [old for old in rewinds if old.to < new.to] + [new]


def merged(*told: Iterable[Rewind]) -> list[Rewind]:
    """All rewinds that were told of, wherever and in whatever order, as one list without redundant ones."""
    line: list[Rewind] = []
    for rewind in sorted({r for some in told for r in some}, key=lambda r: (r.epoch, r.call, -r.to)):
        line = add_rewind(line, rewind)
    return line


def current(attempts: Iterable[Attempt], rewinds: Sequence[Rewind]) -> list[Attempt]:
    """The attempts on the current timeline, newest (highest step) first, one for each step."""
    best: dict[int, Attempt] = {}
    for attempt in attempts:
        if not abandoned(attempt, rewinds) and (attempt.step not in best or best[attempt.step] < attempt):
            best[attempt.step] = attempt
    return sorted(best.values(), key=lambda a: a.step, reverse=True)


def by_step(attempts: Iterable[Attempt], step: int, rewinds: Sequence[Rewind]) -> list[Attempt]:
    """All attempts at `step`, the one on the current timeline first, then the later ones."""
    found = [attempt for attempt in attempts if attempt.step == step]
    return sorted(found, key=lambda a: (abandoned(a, rewinds), -a.epoch, -a.call))
