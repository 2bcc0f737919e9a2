"""Why a checkpoint is where it is, and what will happen next: what its run's writers have noted in the event log."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from stepwell.catalog import Catalog
from stepwell.errors import StepwellError
from stepwell.events import LOGS_MAX, Entry, Outlook, decode_log, log_file
from stepwell.format.names import Attempt
from stepwell.tiers.base import RecordKey


@dataclass(frozen=True, slots=True)
class Story:
    """What is known of one checkpoint; empty if its run has no event log (any more)."""

    events: list[Entry]  # in their order
    outlook: list[Outlook]  # as the last writer saw it when it last wrote its log


async def story_of(catalog: Catalog, attempt: Attempt) -> Story:
    """Reads the event logs of the run's last writers, from the last tier that has some."""
    for tier in reversed(catalog.tiers):
        epochs = catalog.epochs.get(tier.info.name, [])[-LOGS_MAX:]
        places = [RecordKey(catalog.run, log_file(epoch)) for epoch in epochs]
        answers = await asyncio.gather(*(tier.fetch(place) for place in places), return_exceptions=True)
        logs = [decode_log(answer.splitlines()) for answer in answers if isinstance(answer, bytes)]
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, StepwellError):
                raise answer
        if logs:
            events = [line for lines in logs for line in lines if isinstance(line, Entry) and _is_of(line, attempt)]
            outlook = [line for line in logs[-1] if isinstance(line, Outlook) and line.checkpoint == attempt.folder]
            return Story(events, outlook)
    return Story([], [])


def _is_of(entry: Entry, attempt: Attempt) -> bool:
    return entry.checkpoint == attempt.folder if entry.checkpoint else entry.step == attempt.step
