"""What no policy can undo: each rule in a table, and all of them against policies that answer anything."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.policies.base import CheckpointView, Drop, Flush, Move, TierView, View
from stepwell.promises import refusal

SURVIVES = {"host": "nothing", "nvme": "reboot", "pfs": "node-loss", "mirror": "node-loss"}
TIERS = tuple(TierView(name, "node", survives, None, 0, None) for name, survives in SURVIVES.items())  # type: ignore[arg-type]


def made(
    step: int, *on: str, partial: Iterable[str] = (), kept: bool = False, abandoned: bool = False, name: str = ""
) -> CheckpointView:
    return CheckpointView(
        name or f"s{step}", step, 1, frozenset(on), frozenset(partial), kept=kept, abandoned=abandoned
    )


def view(*checkpoints: CheckpointView, promised: Iterable[tuple[str, str]] = ()) -> View:
    return View(0.0, TIERS, checkpoints, frozenset(promised))


def flush(name: str, tier: str) -> Move:
    return Flush(name, tier, "because")


def drop(name: str, tier: str) -> Move:
    return Drop(name, tier, "because")


OLD_AND_NEW = (made(1, "nvme", "pfs"), made(2, "nvme", "pfs"))
PROMISED = (("s1", "pfs"),)

RULES: dict[str, tuple[Move, View, str | None]] = {
    "no such checkpoint": (drop("x", "nvme"), view(*OLD_AND_NEW), "no such checkpoint"),
    "no such tier": (drop("s1", "tape"), view(*OLD_AND_NEW), "no such tier"),
    "flush": (flush("s1", "pfs"), view(made(1, "nvme")), None),
    "flush of a part": (flush("s1", "pfs"), view(made(1, "nvme", partial=["pfs"])), None),
    "flush up": (flush("s1", "nvme"), view(made(1, "pfs")), None),
    "flush of what is there": (flush("s1", "pfs"), view(*OLD_AND_NEW), "there already"),
    "flush of nothing": (flush("s1", "pfs"), view(made(1)), "on no tier"),
    "flush to host memory": (flush("s1", "host"), view(made(1, "nvme")), "saves and prefetches alone"),
    "drop": (drop("s1", "nvme"), view(*OLD_AND_NEW), None),
    "drop of what is not there": (drop("s1", "mirror"), view(*OLD_AND_NEW), "not there"),
    "drop of a kept one": (drop("s1", "nvme"), view(made(1, "nvme", kept=True), OLD_AND_NEW[1]), "kept"),
    "drop of a partial one": (drop("s1", "nvme"), view(made(1, "pfs", partial=["nvme"])), None),
    "drop before its flush": (
        drop("s1", "nvme"), view(made(1, "nvme"), made(2, "nvme"), promised=PROMISED), "flushed to pfs",
    ),
    "drop of a part before its flush": (
        drop("s1", "nvme"), view(made(1, partial=["nvme"]), promised=PROMISED), "flushed to pfs",
    ),
    "drop before its flush, but another has it": (
        drop("s1", "nvme"), view(made(1, "nvme", "mirror"), made(2, "nvme"), promised=PROMISED), None,
    ),
    "drop before its flush, and only memory has it": (
        drop("s1", "nvme"), view(made(1, "host", "nvme"), made(2, "nvme"), promised=PROMISED), "flushed to pfs",
    ),
    "drop where it is being flushed to": (
        drop("s1", "pfs"), view(made(1, "nvme", partial=["pfs"]), promised=PROMISED), None,
    ),
    "drop of the only copy, in memory": (drop("s1", "host"), view(made(1, "host"), made(2, "host")), "no other tier"),
    "drop in memory": (drop("s1", "host"), view(made(1, "host", "nvme"), made(2, "host")), None),
    "drop of the newest": (drop("s2", "nvme"), view(made(1, "nvme"), made(2, "nvme")), "newest complete"),
    "drop of the newest, also on a safer tier": (drop("s2", "nvme"), view(*OLD_AND_NEW), "newest complete"),
    "drop with a newer one on a safer tier": (drop("s1", "nvme"), view(made(1, "nvme"), made(2, "pfs")), None),
    "drop with a newer one on a weaker tier": (drop("s1", "pfs"), view(made(1, "pfs"), made(2, "nvme")), "newest"),
    "drop with a newer one in part": (drop("s1", "pfs"), view(made(1, "pfs"), made(2, partial=["pfs"])), "newest"),
    "drop with a newer one abandoned": (
        drop("s1", "pfs"), view(made(1, "pfs"), made(2, "pfs", abandoned=True)), "newest",
    ),
    "of equal steps the earlier": (drop("a", "pfs"), view(made(1, "pfs", name="a"), made(1, "pfs", name="b")), None),
    "of equal steps the later": (drop("b", "pfs"), view(made(1, "pfs", name="a"), made(1, "pfs", name="b")), "newest"),
    "abandoned, though highest": (drop("s9", "pfs"), view(made(1, "pfs"), made(9, "pfs", abandoned=True)), None),
    "abandoned, and nothing else there": (
        drop("s9", "pfs"), view(made(1, "nvme"), made(9, "pfs", abandoned=True)), "newest",
    ),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_rule(rule: str) -> None:
    move, seen, why_not = RULES[rule]
    answer = refusal(move, seen)
    assert (answer is None) == (why_not is None), answer
    if why_not is not None:
        assert answer is not None and why_not in answer


def test_nothing_that_is_being_read_is_dropped() -> None:
    assert refusal(drop("s1", "nvme"), view(*OLD_AND_NEW), frozenset({"s1"})) == "it is being read"
    assert refusal(drop("s1", "nvme"), view(*OLD_AND_NEW), frozenset({"s2"})) is None


# -- against anything --------------------------------------------------------------------------------


@st.composite
def worlds(draw: st.DrawFn) -> View:
    names = sorted(SURVIVES)
    found = []
    for i, step in enumerate(draw(st.lists(st.integers(0, 5), max_size=6))):
        on = draw(st.frozensets(st.sampled_from(names)))
        partial = draw(st.frozensets(st.sampled_from(names))) - on
        kept, abandoned = draw(st.booleans()), draw(st.booleans())
        found.append(made(step, *on, partial=partial, kept=kept, abandoned=abandoned, name=f"{step}.{i}"))
    pairs = [
        (c.name, tier) for c in found if c.complete_on | c.partial_on for tier in names if tier not in c.complete_on
    ]
    return view(*found, promised=draw(st.frozensets(st.sampled_from(pairs))) if pairs else ())


def counting(seen: View) -> list[CheckpointView]:
    """The checkpoints that count, newest first: by step, of equal ones the later save."""
    numbered = [(c.step, i, c) for i, c in enumerate(seen.checkpoints) if not c.abandoned]
    return [c for _, _, c in sorted(numbered, key=lambda each: each[:2], reverse=True)]


def newest(seen: View, tiers: set[str]) -> CheckpointView | None:
    return next((c for c in counting(seen) if c.complete_on & tiers), None)


LEVELS = ("nothing", "process", "reboot", "node-loss")


def as_safe_as(name: str) -> set[str]:
    return {other for other in SURVIVES if LEVELS.index(SURVIVES[other]) >= LEVELS.index(SURVIVES[name])}


@settings(max_examples=300, deadline=None)
@given(worlds(), st.data())
def test_whatever_a_policy_answers_what_was_promised_stays(world: View, data: st.DataObject) -> None:
    """Moves one after the other, each judged by the view as it then is; deletions are carried out, flushes not yet."""
    seen, dropped = world, set[tuple[str, str]]()
    if not world.checkpoints:
        return
    for _ in range(data.draw(st.integers(1, 12))):
        checkpoint = data.draw(st.sampled_from(seen.checkpoints))
        move = Drop(checkpoint.name, data.draw(st.sampled_from(sorted(SURVIVES))), "any")
        if refusal(move, seen) is not None:
            continue
        dropped.add((move.checkpoint, move.tier))
        seen = replace(seen, checkpoints=tuple(_without(c, move) for c in seen.checkpoints))
    for tier in SURVIVES:
        before, after = newest(world, as_safe_as(tier)), newest(seen, as_safe_as(tier))
        assert before is None or (after is not None and after.name == before.name), f"the newest of {tier} is gone"
    for before, after in zip(world.checkpoints, seen.checkpoints, strict=True):
        if before.kept:
            assert after == before
        lasting = {name for name, survives in SURVIVES.items() if survives != "nothing"}
        if "host" in before.complete_on and "host" not in after.complete_on:
            assert (before.name, "host") in dropped and before.complete_on & lasting
        for name, tier in world.promised:
            if name == before.name and (before.complete_on | before.partial_on) - {tier}:
                assert (after.complete_on | after.partial_on) - {tier}, f"nothing is left to flush to {tier} from"


def _without(checkpoint: CheckpointView, move: Drop) -> CheckpointView:
    if checkpoint.name != move.checkpoint:
        return checkpoint
    gone = {move.tier}
    return replace(checkpoint, complete_on=checkpoint.complete_on - gone, partial_on=checkpoint.partial_on - gone)
