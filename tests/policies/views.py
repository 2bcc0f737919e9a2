"""Views for policy tests: checkpoints by a few words each."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import strategies as st

from stepwell.policies.base import CheckpointView, TierView, View

TIERS = ("host", "nvme", "pfs")


def checkpoint(
    step: int, on: Iterable[str] = (), *, partial: Iterable[str] = (), abandoned: bool = False, kept: bool = False,
    name: str | None = None,
) -> CheckpointView:  # fmt: skip
    return CheckpointView(
        name or f"step-{step}", step, 100, frozenset(on), frozenset(partial), abandoned=abandoned, kept=kept
    )


def view(*checkpoints: CheckpointView, promised: Iterable[tuple[str, str]] = ()) -> View:
    tiers = tuple(TierView(name, "node", "reboot", None, 0, None) for name in TIERS)
    return View(0.0, tiers, checkpoints, frozenset(promised))


@st.composite
def views(draw: st.DrawFn) -> View:
    """Any view: steps in any order and repeated (rewinds), anything anywhere."""
    found = []
    for i, step in enumerate(draw(st.lists(st.integers(0, 12), max_size=10))):
        on = draw(st.frozensets(st.sampled_from(TIERS)))
        partial = draw(st.frozensets(st.sampled_from(TIERS))) - on
        flags = draw(st.tuples(st.booleans(), st.booleans()))
        found.append(checkpoint(step, on, partial=partial, abandoned=flags[0], kept=flags[1], name=f"{step}.{i}"))
    pairs = [(c.name, tier) for c in found for tier in TIERS]
    promised = draw(st.frozensets(st.sampled_from(pairs))) if pairs else frozenset()
    return view(*found, promised=promised)
