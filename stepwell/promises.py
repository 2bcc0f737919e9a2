"""What no policy can undo: every move is checked here before anything is moved or deleted.

- Nothing is deleted that is kept, that is being read, or from which a decided flush must still be made.
- The newest complete checkpoint on a tier is never deleted before a newer complete one is on that tier or on
  one that survives at least as much.
- Nothing goes to a tier that has it already.
"""

from __future__ import annotations

from stepwell.policies.base import CheckpointView, Drop, Flush, Move, TierView, View

_SURVIVES = ("nothing", "process", "reboot", "node-loss")


def refusal(move: Move, view: View, leased: frozenset[str] = frozenset()) -> str | None:
    """Why `move` must not be made; None if it may. leased: names of checkpoints that are being read."""
    checkpoint = next((c for c in view.checkpoints if c.name == move.checkpoint), None)
    if checkpoint is None:
        return "there is no such checkpoint"
    if not any(tier.name == move.tier for tier in view.tiers):
        return "there is no such tier"
    return _no_drop(move, checkpoint, view, leased) if isinstance(move, Drop) else _no_flush(move, checkpoint)


def _no_flush(move: Flush, checkpoint: CheckpointView) -> str | None:
    if move.tier in checkpoint.complete_on:
        return "it is there already"
    if not checkpoint.complete_on | checkpoint.partial_on:
        return "it is on no tier"
    return None


def _no_drop(move: Drop, checkpoint: CheckpointView, view: View, leased: frozenset[str]) -> str | None:
    if move.tier not in checkpoint.complete_on | checkpoint.partial_on:
        return "it is not there"
    if checkpoint.kept:
        return "it is kept"
    if checkpoint.name in leased:
        return "it is being read"
    others = checkpoint.complete_on - {move.tier}
    waiting = sorted(tier for name, tier in view.promised if name == checkpoint.name and tier != move.tier)
    if waiting and not others:
        return f"it must still be flushed to {', '.join(waiting)}"
    if move.tier in checkpoint.complete_on and _is_last(checkpoint, move.tier, view):
        return "it is the newest complete checkpoint there, and no tier that survives as much has a newer one"
    return None


def _is_last(checkpoint: CheckpointView, tier: str, view: View) -> bool:
    here = next(t for t in view.tiers if t.name == tier)
    safe = [t.name for t in view.tiers if _strength(t) >= _strength(here)]
    newer = [
        c
        for c in view.checkpoints
        if c.name != checkpoint.name and not c.abandoned and c.step >= checkpoint.step and c.complete_on & set(safe)
    ]
    return not newer


def _strength(tier: TierView) -> int:
    return _SURVIVES.index(tier.survives)
