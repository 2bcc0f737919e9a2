"""What no policy can undo: every move is checked here before anything is moved or deleted.

- Nothing is deleted that is kept, that is being read, or from which a decided flush must still be made. A copy in
  host memory does not replace another one for that: it may be evicted at any time.
- Host memory never loses the only copy.
- The newest complete checkpoint on a tier is never deleted before a newer complete one is on that tier or on
  one that survives at least as much; an abandoned one not before one that counts is there.
- Nothing goes to a tier that has it already, and nothing to host memory: saves and prefetches fill that.
"""

from __future__ import annotations

from stepwell.policies.base import CheckpointView, Drop, Flush, Move, TierView, View

_SURVIVES = ("nothing", "process", "reboot", "node-loss")


def refusal(move: Move, view: View, leased: frozenset[str] = frozenset()) -> str | None:
    """Why `move` must not be made; None if it may. leased: names of checkpoints that are being read."""
    checkpoint = next((c for c in view.checkpoints if c.name == move.checkpoint), None)
    if checkpoint is None:
        return "there is no such checkpoint"
    tier = next((tier for tier in view.tiers if tier.name == move.tier), None)
    if tier is None:
        return "there is no such tier"
    return _no_drop(tier, checkpoint, view, leased) if isinstance(move, Drop) else _no_flush(move, tier, checkpoint)


def _no_flush(move: Flush, tier: TierView, checkpoint: CheckpointView) -> str | None:
    if tier.survives == "nothing":
        return "host memory is filled by saves and prefetches alone"
    if move.tier in checkpoint.complete_on:
        return "it is there already"
    if not checkpoint.complete_on | checkpoint.partial_on:
        return "it is on no tier"
    return None


def _no_drop(here: TierView, checkpoint: CheckpointView, view: View, leased: frozenset[str]) -> str | None:
    if here.name not in checkpoint.complete_on | checkpoint.partial_on:
        return "it is not there"
    if checkpoint.kept:
        return "it is kept"
    if checkpoint.name in leased:
        return "it is being read"
    lasting = {tier.name for tier in view.tiers if tier.survives != "nothing" and tier is not here}
    others = checkpoint.complete_on & lasting
    waiting = sorted(tier for name, tier in view.promised if name == checkpoint.name and tier != here.name)
    if waiting and not others:
        return f"it must still be flushed to {', '.join(waiting)}"
    if here.survives == "nothing" and not others:
        return "it is whole on no other tier yet"
    if here.name in checkpoint.complete_on and _is_last(checkpoint, here, view):
        return "it is the newest complete checkpoint there, and no tier that survives as much has a newer one"
    return None


def _is_last(checkpoint: CheckpointView, here: TierView, view: View) -> bool:
    safe = {tier.name for tier in view.tiers if _strength(tier) >= _strength(here)}
    order = {c.name: (c.step, i) for i, c in enumerate(view.checkpoints)}  # of equal steps the later save is newer
    return not any(
        (checkpoint.abandoned or order[c.name] > order[checkpoint.name])
        for c in view.checkpoints
        if c.name != checkpoint.name and not c.abandoned and c.complete_on & safe
    )


def _strength(tier: TierView) -> int:
    return _SURVIVES.index(tier.survives)
