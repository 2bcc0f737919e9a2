"""What must hold after every event, checked against the media themselves, behind the product's back.

- A manifest is never there before all that it commits is there, right and durable.
- What was acknowledged stays readable: every block, from one tier or another, on all that survived. Only garbled
  blocks (flips) excuse a loss, and retention, which lets go what no rule wants (`tests.sim.judge`).
- Who takes a run over forgets nothing that was acknowledged, and nothing that was passed over is acknowledged later.
- Nobody deletes a checkpoint that a later writer counts on.
- No tier holds more than its room.
- The files of a deleted checkpoint stay for the tier's grace, or as long as somebody who needs the room must wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from stepwell import native
from stepwell.errors import StepwellError
from stepwell.format.names import EPOCHS, MANIFEST, Attempt, epoch_of, rank_file
from stepwell.format.records import Manifest, RankRecord, Seen, decode
from stepwell.tiers.base import CheckpointKey, RecordKey, ShardKey
from stepwell.timeline import current
from tests.sim.medium import File, Key, Medium
from tests.sim.model import Broken, Gap, Model, Saved


class Invariants:
    """Watches all media of one run. `media`: nearest first; the last one says who writes the run."""

    def __init__(self, run: str, model: Model, clock: Callable[[], float]) -> None:
        self.run, self.model, self._clock = run, model, clock
        self.media: list[Medium] = []
        self.grace_s: dict[str, float] = {}  # tier -> how long deleted files stay at least
        self.condemned: dict[tuple[str, str], object] = {}  # (tier, checkpoint) -> the process that deletes it
        self.deleting: set[tuple[str, str]] = set()  # (tier, checkpoint) of deletions under way
        self.marked: dict[tuple[str, str], float] = {}  # (tier, checkpoint) -> since when it is deleted
        self.ever: dict[tuple[str, Attempt], set[str]] = {}  # (tier, attempt) -> parts that were committed there
        self.flipped_at: dict[tuple[str, str, str, int], float] = {}  # (tier, checkpoint, file, block) -> when
        self.garbled: set[str] = set()  # checkpoints of which something ever was
        self.back_again: set[str] = set()  # those of which a record was deleted, and came back with a lost node
        self.seen_epoch = 0
        self._seen: set[str] = set()
        self._broken: list[Broken] = []
        self.overtaken: Callable[[], bool] = lambda: False  # whether the process that runs has lost the run
        self.running: Callable[[], object] = lambda: None  # that process

    def watch(self, media: Sequence[Medium]) -> None:
        self.media = list(media)
        for medium in media:
            medium.watcher = self

    def check(self) -> None:
        """Raises the first that was broken; called after every event, outside of the product's own handlers."""
        if self._broken:
            raise self._broken[0]

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        try:
            yield
        except Broken as broken:
            self._broken.append(Gap(str(broken)) if self.overtaken() else broken)

    # -- what changed --------------------------------------------------------------------------------

    def published(self, medium: Medium, record: RecordKey) -> None:
        folder, _, name = record.name.rpartition("/")
        with self.noting():
            if name == MANIFEST:
                self._check_manifest(medium, folder)
            elif folder == EPOCHS and name.endswith("seen.json") and medium is self.media[-1]:
                self._find_seen()
                self._check_seen()

    def written(self, medium: Medium, shard: ShardKey) -> None:
        with self.noting():
            if medium.room_bytes is not None and medium.used_bytes > medium.room_bytes:
                raise Broken(f"{medium.name} holds {medium.used_bytes} of {medium.room_bytes} bytes")
            self._check_kept(shard.checkpoint.attempt)

    def removed(self, medium: Medium, key: Key) -> None:
        with self.noting():
            if isinstance(key, ShardKey):
                self._check_grace(medium, key.checkpoint.attempt)
                self._check_kept(key.checkpoint.attempt)
                return
            folder, _, name = key.name.rpartition("/")
            if folder == EPOCHS:
                self._find_seen()
            elif name == MANIFEST:
                self._check_deletion(medium, folder)
            else:
                self._check_kept(folder)

    def acknowledged(self, saved: Saved, tier: str, *, stood_still: bool) -> None:
        """A process was told that its save is on `tier`. stood_still: it has for a while, since it was asked to save.

        Above the last tier, a writer that has been overtaken without noticing may be told so in vain: it does not ask
        the last tier, which may be stuck. That is the price of saves that no stuck tier holds up.
        """
        medium = next((medium for medium in self.media if medium.name == tier), None)
        if medium is None:
            return  # memory of the process itself
        attempt = saved.attempt
        if attempt is not None and attempt.epoch < self.newest_epoch:
            late = medium is not self.media[-1]
            if late or not medium.committed(self._key(attempt.folder)):  # it stood still, and was told late
                return
        saved.acked.add(tier)
        if attempt is None or not medium.committed(self._key(attempt.folder)):
            raise Broken(f"{saved} was acknowledged on {tier}, and is not there")
        records = (self._manifest(attempt.folder), RecordKey(self.run, f"{attempt.folder}/{rank_file(0)}"))
        if not all(record in medium.records and medium.records[record].durable for record in records):
            raise Broken(f"{saved} was acknowledged on {tier}, and is not durable there")
        if any(not garbled for _, _, garbled in self._bad_blocks(saved, [medium])):
            raise Broken(f"{saved} was acknowledged on {tier}, and is not whole there")
        if attempt.epoch == self.newest_epoch:
            self._check_newest(attempt)
        if not self.counts(attempt):
            kind = Gap if stood_still else Broken
            raise kind(f"{saved} was acknowledged on {tier}, but epoch {self.seen_epoch} has passed it over")
        self.check_saved(saved)

    def node_lost(self) -> None:
        """A node went down: everything that was acknowledged is looked at."""
        self._find_seen()
        for saved in self.model.saves:
            self.check_saved(saved)

    # -- the truth -----------------------------------------------------------------------------------

    def _key(self, folder: str) -> CheckpointKey:
        return CheckpointKey(self.run, folder)

    def _manifest(self, folder: str) -> RecordKey:
        return RecordKey(self.run, f"{folder}/{MANIFEST}")

    def counts(self, attempt: Attempt) -> bool:
        """Whether no takeover has passed it over."""
        return attempt.epoch >= self.seen_epoch or attempt.folder in self._seen

    @property
    def newest_epoch(self) -> int:
        taken = [epoch_of(record.name.rpartition("/")[2]) for record in self.media[-1].records if EPOCHS in record.name]
        return max((found[0] for found in taken if found is not None), default=0)

    def _find_seen(self) -> None:
        """The newest list on the last tier that can be read."""
        self.seen_epoch, self._seen = 0, set()
        for record, content in self.media[-1].records.items():
            folder, _, name = record.name.rpartition("/")
            parsed = epoch_of(name) if folder == EPOCHS else None
            if parsed is None or parsed[1] != "seen.json" or parsed[0] <= self.seen_epoch:
                continue
            try:
                self.seen_epoch, self._seen = parsed[0], set(decode(content.data, Seen).attempts)
            except StepwellError:
                continue

    def committed(self, media: Sequence[Medium] | None = None) -> dict[Attempt, list[Medium]]:
        """Every attempt that counts, and where it is committed."""
        found: dict[Attempt, list[Medium]] = {}
        for medium in self.media if media is None else media:
            for record in medium.records:
                folder, _, name = record.name.rpartition("/")
                attempt = Attempt.parse(folder) if name == MANIFEST and record.run == self.run else None
                if attempt is not None and self.counts(attempt):
                    found.setdefault(attempt, []).append(medium)
        return found

    def passed_over(self) -> set[Attempt]:
        """Every attempt that has a manifest somewhere and does not count."""
        folders = {record.name.rpartition("/")[0] for medium in self.media for record in medium.records}
        attempts = {Attempt.parse(folder) for folder in folders} - {None}
        return {
            a
            for a in attempts
            if a and not self.counts(a) and any(m.committed(self._key(a.folder)) for m in self.media)
        }

    def newest_first(self, media: Sequence[Medium] | None = None) -> list[Attempt]:
        """The checkpoints of the current timeline, as the newest readable manifest tells it."""
        found = self.committed(media)
        for attempt in sorted(found, reverse=True):
            for medium in found[attempt]:
                try:
                    manifest = decode(medium.records[self._manifest(attempt.folder)].data, Manifest)
                except StepwellError:
                    continue
                return current(found, manifest.rewinds)
        return current(found, [])

    def good(self, attempt: Attempt, media: Sequence[Medium] | None = None) -> bool:
        """Whether every block of it is right on one of the media at least, and so are its records."""
        saved = self.model.find(attempt.folder)
        there = self.committed(media).get(attempt, [])
        if saved is None or not any(self._records_good(medium, attempt.folder) for medium in there):
            return False
        return not any(self._bad_blocks(saved, there))

    def _records_good(self, medium: Medium, folder: str) -> bool:
        names = (self._manifest(folder), RecordKey(self.run, f"{folder}/{rank_file(0)}"))
        return all(name in medium.records and not medium.records[name].flipped for name in names)

    def garbled_manifests(self) -> set[tuple[str, str]]:
        """(tier, checkpoint) of copies whose manifest was garbled."""
        return {
            (medium.name, record.name.rpartition("/")[0])
            for medium in self.media
            for record, content in medium.records.items()
            if content.flipped and record.name.endswith(f"/{MANIFEST}")
        }

    def bad_in(self, folder: str, medium: Medium) -> list[tuple[str, int, bool]]:
        """(file, block, whether it was garbled) of all that is committed on the medium and wrong there."""
        saved = self.model.find(folder)
        bad = self._bad_blocks(saved, [medium]) if saved is not None else []
        return [each for each in bad if ShardKey(self._key(folder), each[0]) in medium.files]

    def _bad_blocks(self, saved: Saved, media: Sequence[Medium]) -> Iterator[tuple[str, int, bool]]:
        """(file, block, whether it was garbled) of all that no copy has right."""
        folder = saved.handle.checkpoint
        assert folder is not None
        for name, tokens in saved.tokens.items():
            files = [medium.files.get(ShardKey(self._key(folder), name)) for medium in media]
            for block, token in enumerate(tokens):
                if not any(file is not None and file.blocks.get(block) == token for file in files):
                    yield name, block, any(file is not None and block in file.flipped for file in files)

    # -- the checks ----------------------------------------------------------------------------------

    def _check_manifest(self, medium: Medium, folder: str) -> None:
        """All that it commits is there, right and durable. One that was passed over may be anything."""
        attempt = Attempt.parse(folder)
        if attempt is None or not self.counts(attempt):
            return
        where = f"the manifest of {folder} on {medium.name}"
        saved = self.model.find(folder)
        if saved is None:
            raise Broken(f"{where} belongs to no save")
        manifest = decode(medium.records[self._manifest(folder)].data, Manifest)
        record = medium.records.get(RecordKey(self.run, f"{folder}/{rank_file(0)}"))
        if record is None:
            raise Broken(f"{where} is there before the rank's record")
        if record.flipped:
            return
        if native.crc32c(record.data) != manifest.digests[0]:
            raise Broken(f"{where} commits another record than the one that is there")
        told = decode(record.data, RankRecord)
        self.ever.setdefault((medium.name, attempt), set()).update(manifest.parts)
        absent = {file for part in manifest.absent for file in told.parts[part]}
        for shard in told.shards:
            if shard.file not in absent:
                self._check_shard(where, saved, medium.files.get(ShardKey(self._key(folder), shard.file)), shard.file)

    def _check_shard(self, where: str, saved: Saved, file: File | None, name: str) -> None:
        if file is None:
            raise Broken(f"{where} is there, {name} is not")
        if file.size != saved.sizes[name]:
            raise Broken(f"{where} is there, {name} has {file.size} bytes instead of {saved.sizes[name]}")
        if not file.durable:
            raise Broken(f"{where} is there, {name} is not durable")
        for block, token in enumerate(saved.tokens[name]):
            if file.blocks.get(block) != token and block not in file.flipped:
                raise Broken(
                    f"{where} is there, block {block} of {name} holds {file.blocks.get(block)!r}, not {token!r}"
                )

    def _check_seen(self) -> None:
        for saved in self.model.saves:
            attempt = saved.attempt
            if attempt is None or self.counts(attempt) or not self._durable_acks(saved):
                continue
            raise Broken(f"epoch {self.seen_epoch} has passed over {saved}, acknowledged on {sorted(saved.acked)}")

    def _durable_acks(self, saved: Saved) -> list[Medium]:
        return [medium for medium in self.media if medium.name in saved.acked]

    def _check_newest(self, attempt: Attempt) -> None:
        """The owner of the run was told that its save is safe: no earlier one may be restored instead of it."""
        for other in self.newest_first():
            if other == attempt:
                return
            if other < attempt and other.step >= attempt.step:
                raise Broken(f"{attempt.folder} was acknowledged, but {other.folder} would be restored")

    def _check_kept(self, folder: str) -> None:
        saved = self.model.find(folder)
        if saved is not None:
            self.check_saved(saved)

    def check_saved(self, saved: Saved) -> None:
        """What was acknowledged is still there."""
        if not self._durable_acks(saved):
            return
        attempt = saved.attempt
        assert attempt is not None
        there = self.committed().get(attempt, [])
        if not there:
            raise Broken(f"{saved} was acknowledged on {sorted(saved.acked)}, and is committed nowhere")
        for name, block, garbled in self._bad_blocks(saved, there):
            if not garbled:
                raise Broken(f"{saved} was acknowledged on {sorted(saved.acked)}, block {block} of {name} is lost")

    def _check_grace(self, medium: Medium, folder: str) -> None:
        since = self.marked.get((medium.name, folder))
        if since is not None and self._clock() < since + self.grace_s.get(medium.name, 0.0) - 1e-3:
            raise Broken(f"{folder} was deleted from {medium.name} at {since:.3f}, and its files go already")

    def _check_deletion(self, medium: Medium, folder: str) -> None:
        """A manifest was removed from a medium."""
        attempt, saved = Attempt.parse(folder), self.model.find(folder)
        if attempt is None or saved is None:
            return
        copies = [other for other in self.committed().get(attempt, []) if not any(self._bad_blocks(saved, [other]))]
        who = self.condemned.pop((medium.name, folder), None)
        if who is not None and who is self.running():  # retention: it was judged when it was decided
            saved.acked.discard(medium.name)
            if (medium.name, folder) in self.deleting:
                self.marked[medium.name, folder] = self._clock()
        elif medium.name in saved.acked and copies:  # what is removed for repair is safe on another tier
            saved.acked.discard(medium.name)
            saved.acked |= {other.name for other in copies}
        elif medium.name not in saved.acked:
            counted_on = attempt.epoch < self.seen_epoch and folder in self._seen
            if counted_on and attempt not in self.committed():
                raise Broken(f"{saved} was deleted from {medium.name}, and epoch {self.seen_epoch} counts on it")
        self.check_saved(saved)
