"""The same state saved and loaded by stepwell and by others: DCP's async_save, torch.save, and TorchSnapshot where it
is installed.

DCP is measured with its best settings first: staging through pinned memory that is kept from save to save, in a thread
of its own; then as it is by default; last with the writing in a process. The first saves of those that keep something
are not counted. Blocked: until training may go on, with nothing else under way; durable: until its files are synced.
Loads are cold, to the device; stepwell's begins with opening its store. Python's garbage is collected before a save, as
blocks of iterations do.
"""

from __future__ import annotations

import gc
import importlib.util
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

from benchmarks.gpu.bench import GB, Bench, Record
from benchmarks.gpu.disk import forget
from benchmarks.gpu.loop import block
from benchmarks.gpu.model import Training
from benchmarks.gpu.stores import WAIT_S, Saver, guarded, opened

ITERATIONS = 10  # trained after a save, while it is written
SAVE_S = 30.0  # what a save or a load of 16 GB may take
WRITERS = 4  # threads that write
LOAD_BYTES = 1 << 30  # of host memory, through which stepwell loads
SHARED = "/dev/shm"  # through which DCP hands a state to its process
State = dict[str, Any]


class Peer(Protocol):
    """One way to save one state, again and again, in new folders."""

    name: str
    warm_up: int  # saves that make what later ones use
    loads: bool  # whether its files are read, too

    def save(self, training: Training, folder: Path) -> Callable[[], object]:
        """Returns when training may go on, with a function that waits until the files are written."""

    def load(self, training: Training, folder: Path) -> None:
        """In place, after `close`."""

    def close(self) -> None:
        """Gives back what was kept."""


class Stepwell:
    """One store beside the folders of the saves. With a guard a save is lazy: the next update waits, not the caller."""

    def __init__(self, guard: bool) -> None:
        self.name = f"stepwell, {'guard' if guard else 'no guard'}"
        self.warm_up, self.loads = 1, guard
        self._guard = guard
        self._kept = ExitStack()
        self._saver: Saver | None = None

    def save(self, training: Training, folder: Path) -> Callable[[], object]:
        if self._saver is None:
            store = self._kept.enter_context(opened(folder.parent, 3 * training.state_bytes()))
            if self._guard:
                self._kept.enter_context(guarded(store, training.optimizer))
            self._saver = Saver(store, training.state)
            self._saver.to_disk().wait("nvme", timeout=WAIT_S)
            for _ in range(2):  # a state is known by its third save; these delete nothing on the disk
                self._saver.to_host()
                self._saver.settle()
            return lambda: None
        self._saver.to_disk()
        return partial(self._saver.settle, "nvme")

    def load(self, training: Training, folder: Path) -> None:
        with opened(folder.parent, min(training.state_bytes(), LOAD_BYTES)) as store:
            found = store.restore(training.state)
            if found is None or set(found.sources) != {"nvme"}:
                raise RuntimeError(f"not restored from the disk alone: {found and found.sources}")

    def close(self) -> None:
        self._kept.close()


class TorchSave:
    """torch.save; torch.load with mmap, then a copy to the device, tensor by tensor."""

    name, warm_up, loads = "torch.save", 0, True

    def save(self, training: Training, folder: Path) -> Callable[[], object]:
        torch.save(state_of(training), folder / "state.pt")
        return lambda: None

    def load(self, training: Training, folder: Path) -> None:
        loaded = torch.load(folder / "state.pt", mmap=True, weights_only=True, map_location="cpu")
        for target, value in zip(training.tensors(), tensors_of(loaded), strict=True):
            target.copy_(value, non_blocking=True)

    def close(self) -> None:
        """Nothing was kept."""


class Kept(DefaultStager):
    """Some versions of torch close a stager, or what it keeps its memory in, after each save, also where the caller has
    given it and wants it again."""

    def __init__(self, config: StagingOptions) -> None:
        super().__init__(config)
        self._let_go = self._state_dict_stager.close
        self._state_dict_stager.close = self.close  # type: ignore[method-assign]

    def close(self) -> None:
        """Not yet: see `end`."""

    def end(self) -> None:
        super().close()
        self._let_go()  # type: ignore[no-untyped-call]


class Dcp:
    """async_save. staged: pinned memory, kept, filled in a thread while the device goes on; else the default."""

    def __init__(self, kind: str, staged: bool, gpu: bool) -> None:
        self.name = f"DCP async_save, {kind.lower()}{', pinned and kept' if staged else ''}"
        self.warm_up = int(staged)
        self.loads = staged and kind == "THREAD"  # the others write the same files
        self._kind = kind
        self._stager = Kept(StagingOptions(gpu, kind == "PROCESS", gpu, gpu)) if staged else None

    def save(self, training: Training, folder: Path) -> Callable[[], object]:
        if self._kind == "PROCESS" and not dist.is_initialized():  # its process makes a group as ours
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        answer = async_save(
            state_of(training),
            storage_writer=FileSystemWriter(folder, thread_count=WRITERS),
            async_checkpointer_type=AsyncCheckpointerType[self._kind],
            async_stager=self._stager,
            no_dist=self._kind == "THREAD",
        )
        if isinstance(answer, Future):
            return answer.result
        answer.staging_completion.result()
        return answer.upload_completion.result

    def load(self, training: Training, folder: Path) -> None:
        load(state_of(training), storage_reader=FileSystemReader(folder), no_dist=True)

    def close(self) -> None:
        if self._stager is not None:
            self._stager.end()
        if dist.is_initialized():
            dist.destroy_process_group()


class TorchSnapshot:
    """async_take."""

    name, warm_up, loads = "TorchSnapshot async_take", 0, False

    def save(self, training: Training, folder: Path) -> Callable[[], object]:
        snapshot: Any = importlib.import_module("torchsnapshot")
        parts = {part: snapshot.StateDict(value=value) for part, value in state_of(training).items()}
        wait: Callable[[], object] = snapshot.Snapshot.async_take(str(folder / "snapshot"), parts).wait
        return wait

    def load(self, training: Training, folder: Path) -> None:
        snapshot: Any = importlib.import_module("torchsnapshot")
        parts = {part: snapshot.StateDict(value=value) for part, value in state_of(training).items()}
        snapshot.Snapshot(str(folder / "snapshot")).restore(parts)

    def close(self) -> None:
        """Nothing was kept."""


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """All tensors below, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_of(each)


def state_of(training: Training) -> State:
    """As the peers take it: plain dicts of tensors."""
    optimizer = training.optimizer.state_dict()["state"]
    return {"model": dict(training.model.state_dict()), "optimizer": {str(key): optimizer[key] for key in optimizer}}


def run(bench: Bench) -> list[Record]:
    """As many of them as there is time for, the most telling first. One that fails is noted."""
    training = Training(bench.device, bench.scale.shape)
    [training.batch] = training.calibrate(bench.scale.iteration_s)
    alone = block(training, ITERATIONS)
    bench.record("iteration, no checkpoint", alone.mean, "s", samples=alone.iterations)
    gpu = bench.device.is_gpu
    guard, no_guard, staged, default = True, False, True, False
    peers: list[Callable[[], Peer]] = [
        partial(Stepwell, guard),
        partial(Stepwell, no_guard),
        partial(Dcp, "THREAD", staged, gpu),
        partial(Dcp, "THREAD", default, gpu),
        TorchSave,
    ]
    if shutil.disk_usage(SHARED).free < training.state_bytes() * 5 // 4:  # a page that is not there ends the process
        bench.note(f"left out: DCP async_save, process; {SHARED} has no room for the state")
    else:
        peers.append(partial(Dcp, "PROCESS", staged, gpu))
    if importlib.util.find_spec("torchsnapshot") is None:
        bench.note("left out: TorchSnapshot, which is not installed")
    else:
        peers.append(TorchSnapshot)
    for make in peers:
        peer = make()
        needed = SAVE_S * training.state_bytes() / 16e9 * (1 + peer.warm_up + peer.loads)
        if bench.has_time_for(needed, peer.name):
            try:
                with bench.scratch() as folder:
                    _measure(bench, training, peer, alone.mean, folder)
            except Exception as error:  # whatever another package raises
                bench.note(f"failed: {peer.name}: {error!r}")
    return bench.records


def _measure(bench: Bench, training: Training, peer: Peer, alone_s: float, folder: Path) -> None:
    try:
        _save(bench, training, peer, alone_s, folder)
    finally:
        peer.close()
    if peer.loads:
        _load(bench, training, peer, folder / "counted")


def _save(bench: Bench, training: Training, peer: Peer, alone_s: float, folder: Path) -> None:
    size = training.state_bytes()
    first, place = folder / "first", folder / "counted"
    for _ in range(peer.warm_up):
        first.mkdir()
        peer.save(training, first)()
        shutil.rmtree(first)
    place.mkdir()
    gc.collect()
    training.device.wait()
    began = time.perf_counter()
    wait = peer.save(training, place)
    blocked = time.perf_counter() - began
    after = block(training, ITERATIONS, warm=0)
    wait()
    written = time.perf_counter() - began
    forget(folder)
    durable = time.perf_counter() - began
    trained = blocked + sum(after.iterations)
    often = max(trained, written) / ITERATIONS / alone_s  # the next save waits for this one
    bench.record(f"{peer.name}: blocked", blocked, "s", bytes=size)
    bench.record(f"{peer.name}: durable", durable, "s", bytes=size, written_s=written)
    name = f"{peer.name}: every {ITERATIONS} / no checkpoint, mean"
    bench.record(name, often, "ratio", samples=after.iterations)


def _load(bench: Bench, training: Training, peer: Peer, folder: Path) -> None:
    size = training.state_bytes()
    before = [float(tensor.sum()) for tensor in training.tensors()]
    training.device.wait()
    began = time.perf_counter()
    peer.load(training, folder)
    training.device.wait()
    seconds = time.perf_counter() - began
    if before == [float(tensor.sum()) for tensor in training.tensors()]:  # it trained on since the save
        raise RuntimeError("the load changed nothing")
    bench.record(f"{peer.name}: cold load", size / seconds / GB, "GB/s", bytes=size, seconds=seconds)
