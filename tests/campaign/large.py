"""Cases whose point is size: single tensors beyond 2 and 4 GiB, a 2.5 GB array, a thousand stores and event loops.

Too large for `make test`; there, the same code runs with system calls cut short (tests/cases, tests/native). Needs
6 GiB of memory and 5 GiB of disk; prints one line of JSON a case and fails at the first wrong one.

    python -m tests.campaign.large --dir SCRATCH [--case A24]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

import stepwell
from stepwell.tiers._medium import EngineName
from stepwell.tiers.file import FileTier
from tests.resources import comes_back_to, describe_files, in_use

GIB = 1 << 30
#: the pattern's length is odd, so that a block at a wrong place, or moved by 2 or 4 GiB, is not right by chance
PATTERN = torch.arange(8_388_593, dtype=torch.int64).remainder(251).to(torch.uint8)
MARKS = {2 * GIB - 4096: 252, 2 * GIB: 253, 4 * GIB: 254, 5_000_000_000: 255}  # byte of the tensor -> its value


def blocks(size: int) -> Iterator[tuple[int, torch.Tensor]]:
    """The right content of a tensor of `size` bytes, piece by piece: (offset, bytes)."""
    for begin in range(0, size, len(PATTERN)):
        block = PATTERN[: size - begin]
        inside = {at - begin: value for at, value in MARKS.items() if begin <= at < begin + len(block)}
        if inside:
            block = block.clone()
            for at, value in inside.items():
                block[at] = value
        yield begin, block


def fill(tensor: torch.Tensor) -> None:
    for begin, block in blocks(tensor.numel()):
        tensor[begin : begin + len(block)] = block


def check(tensor: torch.Tensor) -> None:
    for begin, block in blocks(tensor.numel()):
        assert torch.equal(tensor[begin : begin + len(block)], block), f"wrong in the block at {begin}"


def one_tensor(folder: Path, size: int, engine: EngineName) -> None:
    """Saved, then restored into the same memory after that was wiped, then a slice beyond the marks loaded alone."""
    tensor = torch.empty(size, dtype=torch.uint8)
    fill(tensor)
    with stepwell.open(tiers=[FileTier(folder, name="disk", engine=engine)], run="run") as store:
        store.save(1, {"model": {"w": tensor}}).wait()
        tensor.fill_(7)
        store.restore({"model": {"w": tensor}})
    check(tensor)
    first = size - 1000
    tail = stepwell.load(folder / "run", part="model", keys={"w": slice(first, size)})["w"]
    assert torch.equal(tail, tensor[first:])


def one_array(folder: Path) -> None:
    """A NumPy array of 2.5 GB beside small ones and a tensor."""
    array = np.empty(2_500_000_000, np.uint8)
    fill(torch.from_numpy(array))
    small = np.arange(5)
    state = {"arrays": {"large": array.reshape(2500, -1), "small": small}, "model": {"w": torch.ones(5)}}
    with stepwell.open(folder / "run") as store:
        store.save(1, state).wait()
    del state, array
    loaded = stepwell.load(folder / "run")
    assert loaded["arrays"]["large"].shape == (2500, 1_000_000) and np.array_equal(loaded["arrays"]["small"], small)
    check(torch.from_numpy(loaded["arrays"]["large"].reshape(-1)))


def thousand_stores(folder: Path) -> None:
    """Opened, used and dropped."""
    state = {"w": torch.ones(10)}
    with stepwell.open(folder / "run") as store:
        store.save(1, state).wait()
    before = in_use()
    for _ in range(1000):
        stepwell.open(folder / "run", mode="r").restore(state)
    assert comes_back_to(before, spare=4), describe_files()


def thousand_loops(folder: Path) -> None:
    """One save awaited in each."""

    async def once(store: stepwell.CheckpointStore, step: int) -> None:
        await store.save(step, {"w": torch.ones(10)})

    with stepwell.open(folder / "run") as store:
        asyncio.run(once(store, 1))
        before = in_use()
        for step in range(2, 1002):
            asyncio.run(once(store, step))
        assert comes_back_to(before, spare=4), describe_files()


def cases() -> Iterator[tuple[str, str, Callable[[Path], None]]]:
    """(case, what, how)."""
    for engine in get_args(EngineName):
        for size in (int(2.1 * GIB) + 3, int(4.3 * GIB) + 1):
            run: Any = lambda folder, size=size, engine=engine: one_tensor(folder, size, engine)  # noqa: E731
            yield "A24", f"a tensor of {size} bytes through {engine}", run
    yield "A25", "an array of 2.5 GB", one_array
    yield "G9", "a length of 5 GB", lambda folder: one_tensor(folder, 5_000_000_007, "auto")
    yield "G12", "1000 stores", thousand_stores
    yield "G12", "1000 event loops", thousand_loops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="scratch folder; its parts are removed afterwards")
    parser.add_argument("--case", help="only this one, such as A24")
    options = parser.parse_args()
    for case, what, how in cases():
        if options.case in (None, case):
            with tempfile.TemporaryDirectory(dir=options.dir) as folder:
                began = time.monotonic()
                how(Path(folder))
                print(json.dumps({"case": case, "what": what, "seconds": round(time.monotonic() - began, 1)}))


if __name__ == "__main__":
    main()
