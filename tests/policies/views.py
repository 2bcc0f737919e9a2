"""Views for policy tests: checkpoints by a few words each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hypothesis import strategies as st

from stepwell.policies.base import CheckpointView, TierView, View

TIERS = ("host", "nvme", "pfs")
PARTS = ("model", "optimizer", "sched")

#: (checkpoint, tier) pairs that are promised whole, or the parts of each
Promises = Iterable[tuple[str, str]] | Mapping[tuple[str, str], frozenset[str] | None]


def checkpoint(
    step: int, on: Iterable[str] = (), *, partial: Iterable[str] = (), some: Iterable[str] = ("model",),
    parts: Iterable[str] = PARTS, abandoned: bool = False, kept: bool = False, name: str | None = None,
    tags: tuple[str, ...] = (), metrics: Mapping[str, float] | None = None, made: float = 0.0,
) -> CheckpointView:  # fmt: skip
    """One checkpoint; some: the parts that are where it is partial."""
    on, partial, every = frozenset(on), frozenset(partial), frozenset(parts)
    if every <= frozenset(some):
        on, partial = on | partial, frozenset()
    there = {tier: every for tier in on} | {tier: frozenset(some) for tier in partial - on}
    return CheckpointView(
        name or f"step-{step}", step, 100, on, partial - on, abandoned=abandoned, kept=kept, tags=tags,
        metrics=metrics or {}, made=made, parts=every, parts_on=there,
    )  # fmt: skip


def view(
    *checkpoints: CheckpointView, promised: Promises = (), running: Iterable[tuple[str, str]] = (),
    idle: Iterable[str] = (), wall: float = 0.0,
) -> View:  # fmt: skip
    survives = {"host": "nothing", "nvme": "reboot", "pfs": "node-loss"}
    tiers = tuple(TierView(name, "node", survives[name], None, 0, None, idle=name in idle) for name in TIERS)  # type: ignore[arg-type]
    promises = dict(promised) if isinstance(promised, Mapping) else dict.fromkeys(promised)
    return View(0.0, tiers, checkpoints, promises, frozenset(running), wall)


def subsets(of: Sequence[str], min_size: int = 0) -> st.SearchStrategy[frozenset[str]]:
    """One number each, which is much quicker to draw than a set. min_size: 0 or 1."""
    numbers = st.integers(min_size, 2 ** len(of) - 1)
    return numbers.map(lambda number: frozenset(each for i, each in enumerate(of) if number >> i & 1))


_SOME_TIERS, _SOME_PARTS = subsets(TIERS), subsets(PARTS, 1)
_METRICS = st.tuples(*[st.none() | st.integers(0, 3).map(float)] * 2)
_PROMISES = st.sampled_from(["nothing", "nothing", "all", "running", "some", "some running"])
_TAGS = st.sampled_from([(), ("release",), ("good", "old")])


@st.composite
def checkpoints(draw: st.DrawFn, i: int) -> CheckpointView:
    parts, step = draw(_SOME_PARTS), draw(st.integers(0, 12))
    metrics = zip(("acc", "loss"), draw(_METRICS), strict=True)
    return checkpoint(
        step, draw(_SOME_TIERS), partial=draw(_SOME_TIERS), parts=parts, some=(parts & draw(_SOME_PARTS)) or parts,
        abandoned=draw(st.booleans()), kept=draw(st.booleans()), name=f"{step}.{i}", tags=draw(_TAGS),
        made=draw(st.integers(0, 40)), metrics={name: value for name, value in metrics if value is not None},
    )  # fmt: skip


@st.composite
def views(draw: st.DrawFn) -> View:
    """Any view: steps in any order and repeated (rewinds), clocks that jump, anything anywhere."""
    found = [draw(checkpoints(i)) for i in range(draw(st.integers(0, 8)))]
    promised: dict[tuple[str, str], frozenset[str] | None] = {}
    running = set()
    for c in found:
        for tier in TIERS:
            how = draw(_PROMISES)
            if how != "nothing":
                promised[c.name, tier] = draw(_SOME_PARTS) if "some" in how else None
            if "running" in how:
                running.add((c.name, tier))
    return view(*found, promised=promised, running=running, idle=draw(_SOME_TIERS), wall=draw(st.integers(0, 50)))
