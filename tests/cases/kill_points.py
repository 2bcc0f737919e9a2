"""Kills a writer before each of its file operations in turn; what the next process finds must be whole.

Every point starts from the same two checkpoints on two tiers, in a forked child that dies by SIGKILL right before
its n-th file operation (what Python's audit events tell, and syncs). Then another child looks. Ways:

    save       step 3 is saved on the near tier and flushed to the far one
    replace    after rewind(1), step 2 is saved again, with another value
    retain     as save, on tiers that keep one checkpoint: each commit deletes the one before

    python -m tests.cases.kill_points save FOLDER [most points, spread over the operations; default all]
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

import stepwell
from stepwell.store import CheckpointStore
from tests.campaign.kill9 import forked

Mode = Literal["w", "r"]
#: audit events that change the disk, "open" only if it is for writing
_WRITES = {"open", "os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir", "os.truncate", "os.symlink"}


def state(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((400_000,), float(value))}, "step": value}


def opened(way: str, folder: Path, names: Sequence[str] = ("near", "far"), mode: Mode = "w") -> CheckpointStore:
    """The store on those tiers; far is what a shared file system is."""
    drivers = {"near": "file", "far": "pfs"}
    keep = "retain = { last = 1 }" if way == "retain" else ""
    file = folder / f"{'-'.join(names)}.toml"
    file.write_text(
        "\n".join(
            f"[[tier]]\nname = '{name}'\ndriver = '{drivers[name]}'\npath = '{folder / name}'\n{keep}" for name in names
        )
    )
    return stepwell.open(file, run="run", mode=mode)


def prepare(way: str, folder: Path) -> None:
    for name in ("near", "far"):
        (folder / name).mkdir()
    with opened(way, folder) as store:
        store.save(1, state(1)).wait("far")
        store.save(2, state(2)).wait("far")


def write(way: str, folder: Path, deadly: int, report: int) -> None:
    """Saves, dies before operation number `deadly`; reports what was acknowledged, and at the end the count."""
    store = opened(way, folder)
    if way == "replace":
        store.rewind(1)
    else:
        store.restore(state(0))
    count = watch(str(folder), deadly)
    save = store.save(*((2, state(2.5)) if way == "replace" else (3, state(3))))
    for tier in ("near", "far"):
        save.wait(tier)
        os.write(report, f"{tier}\n".encode())
    store.close()
    os.write(report, f"{count()}\n".encode())


def watch(root: str, deadly: int) -> Callable[[], int]:
    """Counts the operations on files below `root` from now on, in all threads; kills this process at one of them."""
    counter, lock, last = itertools.count(1), threading.Lock(), 0

    def note() -> None:
        nonlocal last
        with lock:
            last = next(counter)
            if last == deadly:
                os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _WRITES or not str(arguments[0]).startswith(root):
            return
        if event != "open" or (isinstance(arguments[2], int) and arguments[2] & (os.O_CREAT | os.O_WRONLY | os.O_RDWR)):
            note()

    def synced(real: Callable[[Any], None]) -> Callable[[Any], None]:
        def sync(fd: Any) -> None:
            note()
            real(fd)

        return sync

    for name in ("fsync", "fdatasync"):
        setattr(os, name, synced(getattr(os, name)))
    sys.addaudithook(hook)
    return lambda: last


def check(way: str, folder: Path, acknowledged: set[str]) -> None:
    """Raises AssertionError unless every tier that had a whole checkpoint has one, and saving goes on."""
    new = (2, 2.5) if way == "replace" else (3, 3)
    for names in (["near", "far"], ["near"], ["far"]):
        with opened(way, folder, names, "r") as store:
            target = state(0)
            found = store.restore(target)
            assert found is not None and not found.skipped
            value = target["step"]
            assert (found.step, value) in ((2, 2), new), (names, found.step, value)
            assert bool((target["model"]["w"] == value).all())
            if acknowledged & set(names):
                assert value == new[1], f"acknowledged on {acknowledged}, and {value} was restored from {names}"
    with opened(way, folder) as store:
        store.restore(state(0))
        store.save(4, state(4)).wait("far")
    with opened(way, folder, mode="r") as store:
        assert store.debris() == [], store.debris()
        steps = [checkpoint.step for checkpoint in store.checkpoints()]
        assert steps[-1] == 4 and (steps == [4] or way != "retain"), steps
        for checkpoint in store.checkpoints():
            assert store.restore(state(0), checkpoint.step) is not None


def one(way: str, base: Path, folder: Path, deadly: int) -> tuple[bool, list[str]]:
    """(killed, what the writer said) for one point; raises AssertionError if the look afterwards fails."""
    shutil.copytree(base, folder)
    reading, writing = os.pipe()
    writer = forked(lambda: write(way, folder, deadly, writing))
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read().split()
    code = os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1])
    assert code in (0, -signal.SIGKILL), f"the writer left with {code}"
    checker = forked(lambda: check(way, folder, set(said)))
    assert os.waitstatus_to_exitcode(os.waitpid(checker, 0)[1]) == 0, f"wrong after a kill at operation {deadly}"
    shutil.rmtree(folder)
    return code != 0, said


def main(way: str, folder: Path, points_max: int = 1000) -> None:
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")  # shared tiers that were seen are remembered there
    base = folder / "base"
    base.mkdir()
    maker = forked(lambda: prepare(way, base))
    assert os.waitstatus_to_exitcode(os.waitpid(maker, 0)[1]) == 0
    killed, said = one(way, base, folder / "whole", -1)
    assert not killed
    operations = int(said[-1])
    points = range(1, operations + 1, -(-operations // points_max))
    kills = sum(one(way, base, folder / str(point), point)[0] for point in points)
    print(json.dumps({"operations": operations, "points": len(points), "kills": kills}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
