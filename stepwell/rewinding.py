"""Rewind by hand: from now on a run goes on from an older checkpoint, whatever becomes of the next save.

The run is taken over for a moment, which a live writer refuses, and the epoch leaves a record of its own: no save is
needed, and every later writer, restore and listing reads it (`Catalog.rewound`). Nothing is deleted.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from stepwell.catalog import Catalog
from stepwell.changing import has_writers, require_writable, taken_over
from stepwell.errors import CheckpointGone, ConfigError
from stepwell.format.names import Attempt, epoch_file
from stepwell.format.records import Rewound, encode
from stepwell.places import Named, Ref, look_up, only, opened, run_whole, started
from stepwell.tiers.base import RecordKey
from stepwell.timeline import abandoned


@dataclass(frozen=True, slots=True)
class Rewinding:
    """What a rewind has done."""

    run: str
    step: int  # that the run goes on from
    name: str  # of its folder
    abandoned: tuple[tuple[int, str], ...]  # (step, folder) of what it left behind, by rising step


def rewind(ref: Ref) -> Rewinding:
    """Rewinds a run to the one checkpoint that `ref` means; durable when it returns.

    Raises CheckpointNotFound; ConfigError for what is no single checkpoint of a run, for one that is abandoned itself,
    and if only another tier can tell whether a writer holds the run; RunBusy if one does; TierError if the run's last
    tier cannot be written.
    """
    named = look_up(ref)
    if named.place.kind != "run" or not named.place.selected:
        raise ConfigError(
            f"{named.text} does not say where to rewind to",
            todo="Name the run and the step, such as 'ckpts/sft@1500'",
        )
    return run_whole(_rewind(named))


async def _rewind(named: Named) -> Rewinding:
    async with opened(named) as looked:
        to = only(looked)
        if abandoned(to, looked.catalog.rewinds):
            raise ConfigError(
                f"step {to.step} was abandoned by a rewind itself",
                todo=f"Restore it by number and save on: store.restore(state, step={to.step})", run=looked.run,
            )  # fmt: skip
    async with started(named, read_only=False) as (run, tiers, _):
        require_writable(tiers[-1])
        has_writers(run, tiers)  # refuses where that cannot be told
        catalog = Catalog(run, tiers)
        async with taken_over(catalog, tiers[-1]) as epoch:
            line = catalog.newest_first()
            if to not in line:
                raise CheckpointGone("the checkpoint was deleted meanwhile", run=run, step=to.step)
            record = encode(Rewound(to=to.step, made=time.time()))
            await tiers[-1].commit(RecordKey(run, epoch_file(epoch, "rewind.json")), record)
        return Rewinding(run, to.step, to.folder, tuple(_pairs(line, to)))


def _pairs(line: list[Attempt], to: Attempt) -> list[tuple[int, str]]:
    return [(attempt.step, attempt.folder) for attempt in reversed(line) if attempt.step > to.step]
