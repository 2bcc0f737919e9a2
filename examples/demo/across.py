"""Restores that take their chunks from several tiers, and saves and restores in a process that does nothing else."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import stepwell
from examples.demo.compare import different_tensors, read_folder
from examples.demo.table import Read, Saved
from examples.demo.tiers import Tiers
from examples.demo.train import Trainee

QUIET_SAVES = 3
OTHER_PARTS = ("sched", "loader", "rng")  # of the state, beside the model and the optimizer
WAIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Found:
    """A restore, and what it found bad and took from elsewhere."""

    read: Read
    healed: tuple[str, ...]


def restore_across(tiers: Tiers, run: str, original: str, trainee: Trainee) -> list[Found]:
    """Restores the newest checkpoint from memory, then the one before from host, nvme and pfs together.

    Both are prefetched, but host memory holds only the newest whole. Of the one before, a bit is damaged on nvme: the
    block that it lies in must come from the pfs, and the file on nvme is mended. Raises AssertionError if a tensor is
    not the one that safetensors reads of the run `original`, or if a tier took no part.
    """
    before, newest = sorted(tiers.committed("nvme", run))[-2:]
    _damage(tiers.committed("nvme", run)[before] / "optimizer.safetensors")
    found = []
    with stepwell.open(tiers.config, run=run) as store:
        for step in (before, newest):
            store.prefetch(step).wait(WAIT_S)
        for step, wanted in ((newest, {"host"}), (before, {"host", "nvme", "pfs"})):
            read, checkpoint = _restore(store, trainee, step)
            found.append(Found(read, checkpoint.healed))
            if checkpoint.sources.keys() != wanted:
                raise AssertionError(f"step {step} came from {checkpoint.sources}, not from {', '.join(wanted)}")
            _check(trainee, step, tiers.committed("pfs", original)[step])
        store.flush()  # takes the run over; what was found bad is then written again
    return found


def _damage(path: Path) -> None:
    """Turns one bit over near the end of a file: memory gives up the tail first."""
    with path.open("r+b") as file:
        place = file.seek(os.path.getsize(path) * 9 // 10)
        [byte] = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1]))
        os.fsync(file.fileno())


def _restore(store: stepwell.CheckpointStore, trainee: Trainee, step: int) -> tuple[Read, stepwell.Checkpoint]:
    began = time.perf_counter()
    checkpoint = store.restore(trainee.state, step)
    seconds = time.perf_counter() - began
    assert checkpoint is not None
    return Read(f"restore step {step} ({store.run})", checkpoint.sources, seconds), checkpoint


def _check(trainee: Trainee, step: int, folder: Path) -> None:
    """The model and the optimizer's state are those in a checkpoint's files."""
    files = read_folder(folder)
    state = {name: value for name, value in trainee.model.state_dict().items() if name in files}
    names = {id(weight): name for name, weight in trainee.model.named_parameters()}
    for weight, values in trainee.optimizer.state.items():
        state |= {f"optimizer.state.{names[id(weight)]}.{name}": value for name, value in values.items()}
    wrong = different_tensors(state, {name: files[name] for name in files if name.partition(".")[0] not in OTHER_PARTS})
    if wrong:
        raise AssertionError(f"step {step}: {len(wrong)} tensors are not those in {folder}: {', '.join(wrong[:10])}")


def save_and_restore_quietly(tiers: Tiers, trainee: Trainee) -> tuple[list[Saved], list[Read]]:
    """Saves to host and nvme, then cold restores, with nothing else going on in this process.

    The first of each also makes the memory ready that the later ones use.
    """
    saves = []
    with stepwell.open(tiers.config, run="quiet", policies=[]) as store:  # no policy: nothing goes on to the pfs
        for step in range(1, QUIET_SAVES + 1):
            save = store.save(step, trainee.state)
            save.wait("nvme", timeout=WAIT_S)
            saves.append(Saved.of("quiet", save.report()))
    before = trainee.digests()
    with stepwell.open(tiers.config, run="quiet", mode="r") as store:
        reads = [_restore(store, trainee, step)[0] for step in (QUIET_SAVES - 1, QUIET_SAVES)]
    after = trainee.digests()
    if wrong := [name for name in before if before[name] != after.get(name)]:
        raise AssertionError(f"restored is not what was saved: {', '.join(wrong[:10])}")
    return saves, reads
