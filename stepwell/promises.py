"""What no policy can undo: every move is checked here before anything is moved, taken back or deleted.

- Nothing is deleted that is kept, that is being read, or from which a decided flush must still be made; a flush of
  some parts needs only these. A copy in host memory does not replace another one for that: it may be evicted at
  any time.
- Host memory never loses the only copy.
- The newest complete checkpoint on a tier is never deleted before a newer complete one is on that tier or on
  one that survives at least as much; an abandoned one not before one that counts is there.
- Nothing goes to a tier that has it already, and nothing to host memory: saves and prefetches fill that.
- A prefetch goes to host memory, and only of what is whole on another tier, is not there yet, and is no larger than
  that memory. It pushes out nothing that somebody works with or waits for.
- A flush is taken back only before it runs, and only if as much of a newer checkpoint is on the tier or on its way
  there. So the way down of the newest is never cut, and something always arrives. Nor is one taken back when all
  of it is there, brought by another flush: nobody hears that it was given up.
"""

from __future__ import annotations

from stepwell.policies.base import Cancel, CheckpointView, Flush, Move, Prefetch, TierView, View

_SURVIVES = ("nothing", "process", "reboot", "node-loss")


def refusal(move: Move, view: View, leased: frozenset[str] = frozenset()) -> str | None:
    """Why `move` must not be made; None if it may. leased: names of checkpoints that are being read."""
    checkpoint = next((c for c in view.checkpoints if c.name == move.checkpoint), None)
    if checkpoint is None:
        return "there is no such checkpoint"
    tier = next((tier for tier in view.tiers if tier.name == move.tier), None)
    if tier is None:
        return "there is no such tier"
    if isinstance(move, Flush):
        return _no_flush(move, tier, checkpoint)
    if isinstance(move, Cancel):
        return _no_cancel(tier, checkpoint, view)
    if isinstance(move, Prefetch):
        return _no_prefetch(move, tier, checkpoint, view)
    return _no_drop(tier, checkpoint, view, leased)


def _no_flush(move: Flush, tier: TierView, checkpoint: CheckpointView) -> str | None:
    if not tier.lasting:
        return "host memory is filled by saves and prefetches alone"
    if checkpoint.has(tier.name, move.parts):
        return "it is there already"
    if not checkpoint.complete_on | checkpoint.partial_on:
        return "it is on no tier"
    wanted = checkpoint.parts if move.parts is None else frozenset(move.parts)
    if not checkpoint.complete_on and not wanted <= frozenset[str]().union(*checkpoint.parts_on.values()):
        return "no tier has all that is asked for"
    return None


def _no_prefetch(move: Prefetch, tier: TierView, checkpoint: CheckpointView, view: View) -> str | None:
    if tier.lasting:
        return "a policy's prefetch goes to host memory; what goes up to a storage tier is a flush"
    if checkpoint.has(tier.name, move.parts):
        return "it is there already"
    if (checkpoint.name, tier.name) in view.brought:
        return "it is there already, or on its way"
    lasting = [other.name for other in view.tiers if other.lasting]
    if not any(checkpoint.has(other, move.parts) for other in lasting):
        return "it is whole on no other tier"
    if move.parts is None and tier.capacity_bytes is not None and checkpoint.size_bytes > tier.capacity_bytes:
        return f"it is larger than the {tier.capacity_bytes} bytes of memory there"
    return None


def _no_cancel(tier: TierView, checkpoint: CheckpointView, view: View) -> str | None:
    if (checkpoint.name, tier.name) not in view.promised:
        return "no flush of it is promised there"
    if (checkpoint.name, tier.name) in view.running:
        return "it is being copied there now"
    if checkpoint.has(tier.name, view.promised[checkpoint.name, tier.name]):
        return "it is there already"
    if not view.overtaken(checkpoint, tier.name):
        return "nothing newer is there or on its way with as much of it"
    return None


def _no_drop(here: TierView, checkpoint: CheckpointView, view: View, leased: frozenset[str]) -> str | None:
    if here.name not in checkpoint.complete_on | checkpoint.partial_on:
        return "it is not there"
    if checkpoint.kept:
        return "it is kept"
    if checkpoint.name in leased:
        return "it is being read"
    lasting = {tier.name for tier in view.tiers if tier.lasting and tier is not here}
    waiting = [
        tier
        for (name, tier), parts in view.promised.items()
        if name == checkpoint.name
        and tier != here.name
        and ((name, tier) in view.running or not _elsewhere(checkpoint, lasting, parts))  # it may be read from here
    ]
    if waiting:
        return f"it must still be flushed to {', '.join(sorted(waiting))}"
    if not here.lasting and not checkpoint.complete_on & lasting:
        return "it is whole on no other tier yet"
    if here.name in checkpoint.complete_on and _is_last(checkpoint, here, view):
        return "it is the newest complete checkpoint there, and no tier that survives as much has a newer one"
    return None


def _elsewhere(checkpoint: CheckpointView, tiers: set[str], parts: frozenset[str] | None) -> bool:
    return any(checkpoint.has(tier, parts) for tier in tiers)


def _is_last(checkpoint: CheckpointView, here: TierView, view: View) -> bool:
    safe = {
        tier.name for tier in view.tiers if _strength(tier) >= _strength(here) and (tier.lasting or not here.lasting)
    }
    order = view.order()
    return not any(
        (checkpoint.abandoned or order[c.name] > order[checkpoint.name])
        for c in view.checkpoints
        if c.name != checkpoint.name and not c.abandoned and c.complete_on & safe
    )


def _strength(tier: TierView) -> int:
    return _SURVIVES.index(tier.survives)
