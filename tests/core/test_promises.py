"""What no policy can undo: each rule in a table, and all of them against policies that answer anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.policies.base import Cancel, CheckpointView, Drop, Flush, Move, TierView, View
from stepwell.promises import refusal

SURVIVES = {"host": "nothing", "nvme": "reboot", "pfs": "node-loss", "mirror": "node-loss"}
TIERS = tuple(TierView(name, "node", survives, None, 0, None) for name, survives in SURVIVES.items())  # type: ignore[arg-type]


PARTS = frozenset({"model", "optimizer"})
MODEL = frozenset({"model"})


def made(
    step: int, *on: str, partial: Iterable[str] = (), kept: bool = False, abandoned: bool = False, name: str = "",
    some: frozenset[str] = MODEL,
) -> CheckpointView:  # fmt: skip
    """some: the parts that are where it is partial."""
    return CheckpointView(
        name or f"s{step}", step, 1, frozenset(on), frozenset(partial), kept=kept, abandoned=abandoned, parts=PARTS,
        parts_on={tier: PARTS for tier in on} | {tier: some for tier in partial},
    )  # fmt: skip


#: (checkpoint, tier) -> the parts that are promised there; without parts: all
Promises = Mapping[tuple[str, str], frozenset[str] | None] | Iterable[tuple[str, str]]


def view(*checkpoints: CheckpointView, promised: Promises = (), running: Iterable[tuple[str, str]] = ()) -> View:
    promises = dict(promised) if isinstance(promised, Mapping) else dict.fromkeys(promised)
    return View(0.0, TIERS, checkpoints, promises, frozenset(running))


def flush(name: str, tier: str, *parts: str) -> Move:
    return Flush(name, tier, "because", parts or None)


def drop(name: str, tier: str) -> Move:
    return Drop(name, tier, "because")


def cancel(name: str, tier: str) -> Move:
    return Cancel(name, tier, "because")


OLD_AND_NEW = (made(1, "nvme", "pfs"), made(2, "nvme", "pfs"))
NEAR = (made(1, "nvme"), made(2, "nvme"))
PROMISED = (("s1", "pfs"),)
PROMISED_MODEL = {("s1", "pfs"): MODEL}
BOTH = (("s1", "pfs"), ("s2", "pfs"))

RULES: dict[str, tuple[Move, View, str | None]] = {
    "no such checkpoint": (drop("x", "nvme"), view(*OLD_AND_NEW), "no such checkpoint"),
    "no such tier": (drop("s1", "tape"), view(*OLD_AND_NEW), "no such tier"),
    "flush": (flush("s1", "pfs"), view(made(1, "nvme")), None),
    "flush of a part": (flush("s1", "pfs"), view(made(1, "nvme", partial=["pfs"])), None),
    "flush up": (flush("s1", "nvme"), view(made(1, "pfs")), None),
    "flush of what is there": (flush("s1", "pfs"), view(*OLD_AND_NEW), "there already"),
    "flush of nothing": (flush("s1", "pfs"), view(made(1)), "on no tier"),
    "flush of parts": (flush("s1", "pfs", "model"), view(made(1, "nvme")), None),
    "flush of parts that are there": (flush("s1", "pfs", "model"), view(made(1, "nvme", partial=["pfs"])), "already"),
    "flush of more parts": (flush("s1", "pfs", "model", "optimizer"), view(made(1, "nvme", partial=["pfs"])), None),
    "flush of parts from a partial copy": (flush("s1", "pfs", "model"), view(made(1, partial=["nvme"])), None),
    "flush of parts that are nowhere": (flush("s1", "pfs", "optimizer"), view(made(1, partial=["nvme"])), "all that"),
    "flush of all from a partial copy": (flush("s1", "pfs"), view(made(1, partial=["nvme"])), "no tier has all"),
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
    "drop before the flush of some parts": (
        drop("s1", "nvme"), view(made(1, "nvme"), made(2, "nvme"), promised=PROMISED_MODEL), "flushed to pfs",
    ),
    "drop before the flush of some parts, but another has those": (
        drop("s1", "nvme"), view(made(1, "nvme", partial=["mirror"]), made(2, "nvme"), promised=PROMISED_MODEL), None,
    ),
    "drop before the flush of all, and another has some": (
        drop("s1", "nvme"), view(made(1, "nvme", partial=["mirror"]), made(2, "nvme"), promised=PROMISED), "flushed to",
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
    "cancel": (cancel("s1", "pfs"), view(*NEAR, promised=BOTH), None),
    "cancel of what is not promised": (cancel("s1", "pfs"), view(*NEAR, promised=[("s2", "pfs")]), "no flush of it"),
    "cancel of what is being copied": (cancel("s1", "pfs"), view(*NEAR, promised=BOTH, running=BOTH[:1]), "now"),
    "cancel of what is there": (cancel("s1", "pfs"), view(*OLD_AND_NEW, promised=PROMISED_MODEL), "there already"),
    "cancel of a part that is there": (
        cancel("s1", "pfs"), view(made(1, "nvme", partial=["pfs"]), OLD_AND_NEW[1], promised=PROMISED_MODEL), "already",
    ),
    "cancel of the rest": (
        cancel("s1", "pfs"), view(made(1, "nvme", partial=["pfs"]), OLD_AND_NEW[1], promised=PROMISED), None,
    ),
    "cancel while a newer one is being copied": (
        cancel("s1", "pfs"), view(*NEAR, promised=BOTH, running=BOTH[1:]), None,
    ),
    "cancel of the newest": (cancel("s2", "pfs"), view(*NEAR, promised=BOTH), "nothing newer"),
    "cancel of the only one": (cancel("s1", "pfs"), view(*NEAR, promised=PROMISED), "nothing newer"),
    "cancel, and a newer one is there": (
        cancel("s1", "pfs"), view(NEAR[0], made(2, "pfs"), promised=PROMISED), None,
    ),
    "cancel, and a newer one goes elsewhere": (
        cancel("s1", "pfs"), view(*NEAR, promised=[("s1", "pfs"), ("s2", "mirror")]), "nothing newer",
    ),
    "cancel, and a newer one goes in part": (
        cancel("s1", "pfs"), view(*NEAR, promised={("s1", "pfs"): None, ("s2", "pfs"): MODEL}), "as much of it",
    ),
    "cancel of a part, and a newer one goes with it": (
        cancel("s1", "pfs"), view(*NEAR, promised={("s1", "pfs"): MODEL, ("s2", "pfs"): MODEL}), None,
    ),
    "cancel of a part, and a newer one is there with it": (
        cancel("s1", "pfs"), view(NEAR[0], made(2, partial=["pfs"]), promised=PROMISED_MODEL), None,
    ),
    "cancel of a part, and a newer one is there with another": (
        cancel("s1", "pfs"),
        view(NEAR[0], made(2, partial=["pfs"], some=frozenset({"optimizer"})), promised=PROMISED_MODEL),
        "as much of it",
    ),
    "cancel, and the newer one is abandoned": (
        cancel("s1", "pfs"), view(NEAR[0], made(2, "nvme", abandoned=True), promised=BOTH), "nothing newer",
    ),
    "cancel of an abandoned one": (
        cancel("s2", "pfs"), view(NEAR[0], made(2, "nvme", abandoned=True), promised=BOTH), None,
    ),
    "cancel of an abandoned one, and nothing else goes": (
        cancel("s2", "pfs"), view(NEAR[0], made(2, "nvme", abandoned=True), promised=BOTH[1:]), "nothing newer",
    ),
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


SUBSETS = st.integers(0, 15).map(lambda n: [name for i, name in enumerate(sorted(SURVIVES)) if n >> i & 1])
SOME = st.sampled_from([MODEL, frozenset({"optimizer"})])


@st.composite
def worlds(draw: st.DrawFn) -> View:
    found = []
    for i, step in enumerate(draw(st.lists(st.integers(0, 5), max_size=6))):
        on = draw(SUBSETS)
        found.append(
            made(
                step, *on, partial=set(draw(SUBSETS)).difference(on), some=draw(SOME),
                kept=draw(st.booleans()), abandoned=draw(st.booleans()), name=f"{step}.{i}",
            )
        )  # fmt: skip
    promised: dict[tuple[str, str], frozenset[str] | None] = {}
    for c in found:
        for tier in sorted(SURVIVES):
            if tier not in c.complete_on and c.complete_on | c.partial_on and draw(st.booleans()):
                promised[c.name, tier] = draw(st.none() | SOME)
    running = [copy for copy in promised if draw(st.booleans())]
    return view(*found, promised=promised, running=running)


def counting(seen: View) -> list[CheckpointView]:
    """The checkpoints that count, newest first: by step, of equal ones the later save."""
    numbered = [(c.step, i, c) for i, c in enumerate(seen.checkpoints) if not c.abandoned]
    return [c for _, _, c in sorted(numbered, key=lambda each: each[:2], reverse=True)]


def newest(seen: View, tiers: set[str]) -> CheckpointView | None:
    return next((c for c in counting(seen) if c.complete_on & tiers), None)


LEVELS = ("nothing", "process", "reboot", "node-loss")


def as_safe_as(name: str) -> set[str]:
    return {other for other in SURVIVES if LEVELS.index(SURVIVES[other]) >= LEVELS.index(SURVIVES[name])}


def holds(c: CheckpointView, tiers: Iterable[str], parts: frozenset[str]) -> bool:
    """Whether one of the tiers has these parts."""
    return any(parts <= (PARTS if tier in c.complete_on else c.parts_on.get(tier, frozenset())) for tier in tiers)


@settings(max_examples=300, deadline=None)
@given(worlds(), st.data())
def test_whatever_a_policy_answers_what_was_promised_stays(world: View, data: st.DataObject) -> None:
    """Moves one after the other, each judged by the view as it then is; flushes are not carried out yet."""
    seen, dropped = world, set[tuple[str, str]]()
    if not world.checkpoints:
        return
    kinds: list[type[Drop] | type[Cancel]] = [Drop, Drop, Cancel]
    for _ in range(data.draw(st.integers(1, 12))):
        checkpoint = data.draw(st.sampled_from(seen.checkpoints))
        move = data.draw(st.sampled_from(kinds))(checkpoint.name, data.draw(st.sampled_from(sorted(SURVIVES))), "any")
        if refusal(move, seen) is not None:
            continue
        if isinstance(move, Cancel):
            assert (move.checkpoint, move.tier) not in seen.running
            left = {copy: parts for copy, parts in seen.promised.items() if copy != (move.checkpoint, move.tier)}
            before_it, seen = coming(seen, move.tier), replace(seen, promised=left)
            assert coming(seen, move.tier) == before_it, f"what is on its way to {move.tier} got older"
        else:
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
        for (name, tier), parts in seen.promised.items():
            waits = name == before.name and not holds(before, [tier], parts or PARTS)  # else it only has to be told so
            if waits and holds(before, SURVIVES.keys() - {tier}, parts or PARTS):
                assert holds(after, SURVIVES.keys() - {tier}, parts or PARTS), f"no source is left for {tier}"


def coming(seen: View, tier: str) -> int | None:
    """The step of the newest that counts and is complete there, or on its way there and complete then."""
    found = [c for c in counting(seen) if tier in c.complete_on or seen.promised.get((c.name, tier), ()) is None]
    return found[0].step if found else None


def _without(checkpoint: CheckpointView, move: Drop) -> CheckpointView:
    if checkpoint.name != move.checkpoint:
        return checkpoint
    gone = {move.tier}
    return replace(
        checkpoint, complete_on=checkpoint.complete_on - gone, partial_on=checkpoint.partial_on - gone,
        parts_on={tier: parts for tier, parts in checkpoint.parts_on.items() if tier not in gone},
    )  # fmt: skip


def test_memory_that_outlives_the_process_still_evicts() -> None:
    shared = TierView("host", "process", "process", None, 0, None, evicts=True)
    disk = TierView("disk", "node", "process", None, 0, None)
    here = frozenset({"host", "disk"})
    old = CheckpointView("step-000000001.1-1", 1, 1, here)
    new = CheckpointView("step-000000002.1-2", 2, 1, frozenset({"host"}))
    view = View(0.0, (shared, disk), (old, new))
    assert refusal(Flush(old.name, "host", "why"), view) is not None
    assert refusal(Drop(new.name, "host", "why"), view) == "it is whole on no other tier yet"
    assert "newest complete" in str(refusal(Drop(old.name, "disk", "why"), view))
    assert refusal(Drop(old.name, "host", "why"), view) is None
