"""What is where: the committed checkpoints of a run on all of its tiers, rebuilt from what is there.

Nothing is believed that a scan does not show. A step folder without a manifest is debris; so is a manifest
that a writer published after it had lost the run (the next writer's `seen` list does not name it).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from stepwell import timeline
from stepwell.errors import CheckpointNotFound, NoGoodCheckpoint, StepwellError, TierUnavailable
from stepwell.format.names import DELETED, EPOCHS, GROWING, MANIFEST, Attempt, epoch_file, epoch_of, note_of
from stepwell.format.records import Manifest, Rewind, Rewound, Seen, decode, encode
from stepwell.inherited import forget_deleted, forget_overtaken, was_left
from stepwell.notes import Notes
from stepwell.tiers.base import NOTES, RecordKey, Tier

log = logging.getLogger("stepwell")

#: how long the listing of a tier may keep that of the next one below waiting
SOON_S = 0.5
#: how long a restore or load waits for a copy that is being made whole, and how often it looks; its writer may be dead
GROW_S, GROW_LOOK_S = 60.0, 0.5


@dataclass(slots=True)
class Holding:
    """One attempt's files on one tier."""

    tier: Tier
    files: dict[str, int] = field(default_factory=dict)

    @property
    def committed(self) -> bool:
        return MANIFEST in self.files


@dataclass(frozen=True, slots=True)
class Debris:
    """What is left of an attempt that was never committed on that tier."""

    tier: str
    attempt: Attempt
    size_bytes: int
    late: bool = False  # it has a manifest, published by a writer that had lost the run
    deleted: bool = False  # it was a checkpoint, and its files stay only for those who are reading them
    growing: bool = False  # some parts of it were committed there, and more are on their way


def _debris(attempt: Attempt, holding: Holding, *, overtaken: bool) -> Debris:
    deleted = DELETED in holding.files
    return Debris(
        holding.tier.info.name, attempt, sum(holding.files.values()), late=holding.committed, deleted=deleted,
        growing=GROWING in holding.files and not deleted and not overtaken,
    )  # fmt: skip


class Catalog:
    """The run's checkpoints, as of the last `refresh`. Lives on the event loop."""

    def __init__(self, run: str, tiers: Sequence[Tier]) -> None:
        self.run = run
        self.tiers = list(tiers)
        self.holdings: dict[Attempt, list[Holding]] = {}  # committed ones, nearest tier first
        self.debris: list[Debris] = []
        self.absent: dict[str, str] = {}  # tier -> why it did not answer
        self.epochs: dict[str, list[int]] = {}  # tier -> epochs taken there, rising
        self.rewinds: list[Rewind] = []
        self._rewound: dict[str, dict[int, Rewind | None]] = {}  # tier -> epoch -> rewind by hand; None: not read
        self.on_commit: Callable[[], None] = lambda: None  # after each commit of this process
        self.notes = Notes(run, self.tiers[-1] if self.tiers else None)
        self._noted: set[int] | None = None  # numbers of notes that the last scan saw; None: it did not get there
        self._manifests: dict[tuple[Attempt, str], Manifest] = {}
        self._manifest_bytes: dict[tuple[Attempt, str], int] = {}  # how long each of them is on its tier
        self._refreshing = asyncio.Lock()
        self.reading: Counter[Attempt] = Counter()  # checkpoints that are open for reading
        self.was_read: Callable[[Attempt], object] = lambda attempt: None  # nobody reads it any more
        self._recent: list[tuple[Attempt, Tier]] = []  # committed by this process since the last scan began
        self.confirmed: set[tuple[Attempt, str]] = set()  # copies that are durable for sure: this process saw to that
        self._gone: set[tuple[Attempt, str]] = set()  # removed since then
        self._deleting: set[tuple[Attempt, str]] = set()

    async def refresh(self) -> None:
        """Scans all tiers. What this process commits meanwhile (`add`) is not lost, nor what others move down."""
        async with self._refreshing:
            self._recent, self._gone = [], set(self._deleting)
            scans = await self._scan_all()
            await self._read_rewound(scans)
            late = await self._late(scans)
            for tier, found in zip(self.tiers, scans, strict=True):
                await forget_overtaken(self.run, tier, found, late)
            holdings: dict[Attempt, list[Holding]] = {}
            debris: list[Debris] = []
            for tier, found in zip(self.tiers, scans, strict=True):
                for attempt, holding in found.items():
                    if (attempt, tier.info.name) in self._gone:
                        continue  # the scan saw what is there no more, or not for long
                    if holding.committed and attempt not in late:
                        holdings.setdefault(attempt, []).append(holding)
                    elif (attempt, tier) not in self._recent:
                        debris.append(_debris(attempt, holding, overtaken=attempt in late))
            for attempt, tier in self._recent:
                kept = [h for h in holdings.get(attempt, []) if h.tier is not tier]
                holdings[attempt] = kept + [h for h in self.holdings[attempt] if h.tier is tier]
                holdings[attempt].sort(key=lambda h: self.tiers.index(h.tier))
            await forget_deleted(self.run, holdings, self.absent)
            self.holdings, self.debris = holdings, debris
            self._forget_replaced()
            if self._noted is not None:
                await self.notes.catch_up(self._noted)
            newest = await self.newest_manifest()
            self.rewinds = timeline.merged(newest.rewinds if newest is not None else [], self.rewound)

    async def refresh_patiently(self, step: int | None = None) -> None:
        """As `refresh`, to read `step`, or the newest. If that has just made way to a copy of more parts,
        and is committed nowhere else, looks for it again, for a while."""
        await self.refresh()
        clock = asyncio.get_running_loop().time
        until = clock() + GROW_S
        while (coming := self._growing(step)) is not None and clock() < until:
            log.info("waiting for step %d: more of it is just being copied to %s", coming.attempt.step, coming.tier)
            await asyncio.sleep(GROW_LOOK_S)
            await self.refresh()

    def _growing(self, step: int | None) -> Debris | None:
        """A copy of `step`, or of one newer than all that are committed, that is being made whole."""
        newest = max((attempt.step for attempt in self.newest_first()), default=-1)
        for each in self.debris:
            attempt = each.attempt
            if not each.growing or attempt in self.holdings:
                continue
            newer = attempt.step > newest and not timeline.abandoned(attempt, self.rewinds)
            if newer if step is None else attempt.step == step:
                return each
        return None

    async def _scan_all(self) -> list[dict[Attempt, Holding]]:
        """Each tier is listed after those above it: what moves down is below before it goes above, so who lists below
        first may miss it on both. A tier that does not answer soon holds up nobody; should it answer after all, those
        below it are listed again."""
        listings: list[asyncio.Future[dict[Attempt, Holding]]] = []
        early: list[list[Tier]] = []  # of each tier, those above it that were still being listed when its listing began
        try:
            for tier in self.tiers:
                if listings:
                    await asyncio.wait(listings[-1:], timeout=SOON_S)
                early.append([above for above, found in zip(self.tiers, listings, strict=False) if not found.done()])
                listings.append(asyncio.ensure_future(self._scan(tier)))
            scans = await asyncio.gather(*listings)
        except BaseException:
            for each in listings:
                each.cancel()
            raise
        again = False
        for at, tier in enumerate(self.tiers):
            again = again or any(above.info.name not in self.absent for above in early[at])
            if again:
                scans[at] = await self._scan(tier)
        return scans

    def _forget_replaced(self) -> None:
        """What another process has copied anew is read again: more parts of it are there, or fewer, and so the manifest
        is longer or shorter."""
        for attempt, held in self.holdings.items():
            for holding in held:
                copy = attempt, holding.tier.info.name
                if copy in self._manifests and self._manifest_bytes[copy] != holding.files[MANIFEST]:
                    del self._manifests[copy]

    async def _scan(self, tier: Tier) -> dict[Attempt, Holding]:
        found: dict[Attempt, Holding] = {}
        epochs: list[int] = []
        noted: set[int] = set()
        if tier is self.notes.tier:
            self._noted = None
        rewound: set[int] = set()
        try:
            async for file in tier.scan(self.run):
                if file.attempt == EPOCHS:
                    epoch = epoch_of(file.name)
                    if epoch and epoch[1] == "json":
                        epochs.append(epoch[0])
                    elif epoch and epoch[1] == "rewind.json":
                        rewound.add(epoch[0])
                elif file.attempt == NOTES:
                    noted |= {number for number in (note_of(file.name),) if number is not None}
                elif (attempt := Attempt.parse(file.attempt)) is not None:
                    holding = found.setdefault(attempt, Holding(tier))
                    if file.name:
                        holding.files[file.name] = file.size_bytes
        except StepwellError as error:
            self.absent[tier.info.name] = str(error)
            return {}
        self.absent.pop(tier.info.name, None)
        self.epochs[tier.info.name] = sorted(epochs)
        if tier is self.notes.tier:
            self._noted = noted
        known = self._rewound.get(tier.info.name, {})
        self._rewound[tier.info.name] = {epoch: known.get(epoch) for epoch in rewound}
        return found

    async def _read_rewound(self, scans: Sequence[dict[Attempt, Holding]]) -> None:
        """The rewinds by hand that have not been read yet. A tier that lists but cannot be read is absent."""
        for at, tier in enumerate(self.tiers):
            name, rewound = tier.info.name, self._rewound.get(tier.info.name, {})
            for epoch in [epoch for epoch, rewind in rewound.items() if rewind is None and name not in self.absent]:
                path = epoch_file(epoch, "rewind.json")
                try:
                    data = await tier.fetch(RecordKey(self.run, path))
                except StepwellError as error:
                    self.absent[name] = str(error)
                    scans[at].clear()
                    break
                try:
                    if data is not None:
                        record = decode(data, Rewound, run=self.run, tier=name, path=path)
                        rewound[epoch] = Rewind(record.to, epoch, 0)
                except StepwellError as error:  # a bad record must not hide good checkpoints
                    log.error("a rewind is not known any more, and what it abandoned counts again: %s", error)

    @property
    def rewound(self) -> list[Rewind]:
        """The rewinds by hand, in no order."""
        return [rewind for of in self._rewound.values() for rewind in of.values() if rewind is not None]

    async def _late(self, scans: Sequence[dict[Attempt, Holding]]) -> set[Attempt]:
        """Attempts whose manifest came after their writer had lost the run."""
        late: set[Attempt] = set()
        undecided = {attempt for found in scans for attempt in found}
        async for at, epoch, seen in self._seen_lists(scans):
            older = {attempt for attempt in undecided if attempt.epoch < epoch}
            listed = {attempt for attempt in older if attempt.folder in seen.attempts}
            unknown = set()
            if seen.alone:  # of what is only on other tiers its writer could not know
                elsewhere = [i for i, tier in enumerate(self.tiers) if i != at and not was_left(tier)]
                unknown = {a for a in older if any(a in scans[i] for i in elsewhere)}
            late |= older - listed - unknown
            undecided = unknown - listed
            if not undecided:
                break
        return late

    async def _seen_lists(self, scans: Sequence[dict[Attempt, Holding]]) -> AsyncIterator[tuple[int, int, Seen]]:
        """(index of the tier, epoch, list), the newest first. A tier that lists but cannot be read is absent."""
        for at, tier in reversed(list(enumerate(self.tiers))):
            if tier.info.name in self.absent:
                continue
            for epoch in reversed(self.epochs.get(tier.info.name, [])):
                try:
                    data = await tier.fetch(RecordKey(self.run, epoch_file(epoch, "seen.json")))
                except StepwellError as error:
                    self.absent[tier.info.name] = str(error)
                    scans[at].clear()
                    break
                if data is None:
                    continue  # its writer died before it had looked: the list before counts
                try:
                    seen = decode(data, Seen)
                except StepwellError:
                    continue  # a bad list must not hide good checkpoints
                yield at, epoch, seen

    async def newest_manifest(self) -> Manifest | None:
        """The last one written that can be read; None if there is none.

        An unreadable one must not stop a run: restore reports it, and the one before knows all but the last rewind.
        """
        for attempt in sorted(self.holdings, reverse=True):
            try:
                return await self.manifest(attempt)
            except StepwellError:
                continue
        return None

    async def manifest(self, attempt: Attempt, tier: Tier | None = None) -> Manifest:
        """The checkpoint's manifest from `tier`, or from the nearest tier that has a good one.

        Raises the last tier's error if none has.
        """
        failure: StepwellError | None = None
        for holding in self.holdings.get(attempt, []):
            name = holding.tier.info.name
            if tier is not None and holding.tier is not tier:
                continue
            if (attempt, name) in self._manifests:
                return self._manifests[attempt, name]
            try:
                data = await holding.tier.fetch(RecordKey(self.run, f"{attempt.folder}/{MANIFEST}"))
                if data is None:
                    raise CheckpointNotFound("the manifest is gone", step=attempt.step, tier=name)
                manifest = decode(
                    data, Manifest, run=self.run, step=attempt.step, tier=name, path=f"{attempt.folder}/{MANIFEST}"
                )
            except StepwellError as error:
                failure = error
                continue
            self._manifests[attempt, name], self._manifest_bytes[attempt, name] = manifest, len(data)
            return manifest
        raise failure or CheckpointNotFound("no such checkpoint", run=self.run, step=attempt.step)

    async def manifests(self, attempt: Attempt) -> list[tuple[Tier, Manifest]]:
        """Of all copies whose manifest can be read: one that cannot must do no harm to the others."""
        found = []
        for holding in list(self.holdings.get(attempt, [])):
            try:
                found.append((holding.tier, await self.manifest(attempt, holding.tier)))
            except StepwellError:
                continue
        return found

    def add(self, attempt: Attempt, tier: Tier, files: dict[str, int], manifest: Manifest) -> None:
        """Notes a commit made by this process, without another scan."""
        held, copy, size = self.holdings.setdefault(attempt, []), (attempt, tier.info.name), len(encode(manifest))
        held[:] = [h for h in held if h.tier is not tier] + [Holding(tier, {**files, MANIFEST: size})]
        held.sort(key=lambda h: self.tiers.index(h.tier))
        self._recent.append((attempt, tier))
        self._gone.discard(copy)
        self.confirmed.add(copy)
        self._manifests[copy], self._manifest_bytes[copy] = manifest, size
        if attempt == max(self.holdings):  # an older one, flushed late, knows fewer rewinds
            self.rewinds = timeline.merged(manifest.rewinds, self.rewound)
        self.on_commit()

    def remove(self, attempt: Attempt, tier: Tier) -> None:
        """Forgets a copy that is being deleted, or that a failed save made."""
        held = [h for h in self.holdings.get(attempt, []) if h.tier is not tier]
        if held:
            self.holdings[attempt] = held
        else:
            self.holdings.pop(attempt, None)
        self._recent = [(a, t) for a, t in self._recent if (a, t) != (attempt, tier)]
        self._gone.add((attempt, tier.info.name))
        self.confirmed.discard((attempt, tier.info.name))
        self._manifests.pop((attempt, tier.info.name), None)

    @contextmanager
    def deleting(self, attempt: Attempt, tier: Tier) -> Iterator[None]:
        """Forgets a copy, and no scan finds it again while its files are deleted inside."""
        self.remove(attempt, tier)
        self._deleting.add((attempt, tier.info.name))
        try:
            yield
        finally:
            self._deleting.discard((attempt, tier.info.name))

    def begin_reading(self, attempt: Attempt) -> None:
        """Its copies must stay until `end_reading`, which is called as often."""
        self.reading[attempt] += 1

    def end_reading(self, attempt: Attempt) -> None:
        """This reader is done with it."""
        self.reading[attempt] -= 1
        if not self.reading[attempt]:
            del self.reading[attempt]
            self.was_read(attempt)

    def known_manifest(self, attempt: Attempt, tier: Tier) -> Manifest | None:
        """The manifest of a copy that is there, if it has been read already. No I/O."""
        return self._manifests.get((attempt, tier.info.name))

    def newest_first(self) -> list[Attempt]:
        """The checkpoints of the current timeline, highest step first."""
        return timeline.current(self.holdings, self.rewinds)

    def newest_steps(self) -> dict[str, int]:
        """Tier -> the newest step of the current timeline committed there."""
        newest: dict[str, int] = {}
        for attempt in reversed(self.newest_first()):
            for holding in self.holdings[attempt]:
                newest[holding.tier.info.name] = attempt.step
        return newest

    def at_step(self, step: int) -> list[Attempt]:
        """Every attempt at `step`, the best choice first. Raises CheckpointNotFound if there is none."""
        found = timeline.by_step(self.holdings, step, self.rewinds)
        if not found:
            self.require_all_tiers(f"step {step} is on no tier that answers")
            steps = sorted({a.step for a in self.holdings})
            raise CheckpointNotFound(
                f"there is no checkpoint of step {step}",
                todo=f"There are {len(steps)}: {', '.join(map(str, steps[-8:]))}" if steps else "The run has none yet",
                run=self.run,
            )
        return found

    def require_all_tiers(self, what: str) -> None:
        """Raises TierUnavailable if some tier did not answer: what is not seen there may exist."""
        if self.absent:
            reasons = "; ".join(f"{tier}: {why}" for tier, why in self.absent.items())
            raise TierUnavailable(f"{what}, but not every tier answered: {reasons}", run=self.run)

    def nothing_good(self, reasons: dict[int, str]) -> NoGoodCheckpoint:
        """The error for a run whose checkpoints all failed."""
        listed = "; ".join(f"step {step}: {why}" for step, why in list(reasons.items())[:5])
        return NoGoodCheckpoint(
            f"none of the {len(reasons)} checkpoints can be used: {listed}",
            reasons=reasons,
            todo="Nothing was deleted; restore(step=…) tries one of them alone",
            run=self.run,
        )
