"""How many bytes are read from the disk for 1 MiB of a large tensor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SLICE_BYTES = 1 << 20

# a fresh process; the first load makes all code and metadata resident, so that the second one reads nothing but data
_LOAD = """
import os, pathlib, sys, torch, stepwell

def read_bytes():
    return int(next(line for line in open("/proc/self/io") if line.startswith("read_bytes")).split()[1])

def load(first):
    return stepwell.load(folder, keys={"model.weight": slice(first, first + rows)})["model.weight"]

folder, rows, first = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
load(0)
for path in pathlib.Path(folder).rglob("*"):
    if path.is_file():
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
before = read_bytes()
loaded = load(first)
after = read_bytes()
assert bool((loaded == torch.arange(first, first + rows)[:, None]).all()), "wrong bytes"
print(after - before)
"""


def measure_slice(folder: Path, tensor_bytes: int) -> dict[str, int]:
    """Saves one tensor, then loads 1 MiB from its middle in a fresh process, with none of the files in the page cache.

    read_bytes: what the process made the disk read. record_bytes: the checkpoint's records, part of that.
    """
    import torch

    import stepwell

    columns = 1024
    rows = tensor_bytes // columns // 4
    weight = torch.arange(rows, dtype=torch.float32)[:, None].expand(rows, columns).contiguous()
    store = stepwell.open(folder / "run")
    store.save(1, {"model": {"weight": weight}}).wait()
    store.close()
    wanted = SLICE_BYTES // columns // 4
    first = rows // 2 + 1  # not at a border of anything
    command = [sys.executable, "-c", _LOAD, str(folder / "run"), str(wanted), str(first)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {
        "tensor_bytes": tensor_bytes,
        "slice_bytes": SLICE_BYTES,
        "read_bytes": int(done.stdout),
        "record_bytes": sum(_record_bytes(path) for path in (folder / "run").rglob("*") if path.is_file()),
    }


def _record_bytes(path: Path) -> int:
    """What of a file is not tensors: all of a small file, the header of a shard; in whole pages."""
    size = path.stat().st_size
    if path.suffix == ".safetensors":
        with path.open("rb") as shard:
            size = 8 + int.from_bytes(shard.read(8), "little")
    return -(-size // 4096) * 4096
