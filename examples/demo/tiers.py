"""The three tiers of the demo, as a config file: host memory, and folders for NVMe and a parallel file system."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from examples.demo.model import LENGTH, ByteTransformer

#: what each weight takes in a checkpoint: itself and AdamW's two moments, in float32
BYTES_PER_WEIGHT = 12
CHUNK_BYTES = 8 << 20

CONFIG = """\
[[tier]]
name = "host"                    # this process's memory
driver = "host"
capacity = "{host_mib}MiB"  # room for about one and a half checkpoints of {state_mb:.0f} MB

[[tier]]
name = "nvme"                    # a node's own disk
driver = "file"
path = "nvme"
retain = {{ last = 2 }}            # older checkpoints are deleted once they are on the pfs, too

[[tier]]
name = "pfs"                     # stands in for a parallel file system: a folder, with a limit
driver = "pfs"
path = "pfs"
bandwidth = "{bandwidth_mb}MB/s"
retain = {{ last = 3 }}
"""


@dataclass(frozen=True, slots=True)
class Tiers:
    """Where everything of one demo is. `state_bytes` is of one checkpoint, within a percent."""

    home: Path
    state_bytes: int
    bandwidth: int  # bytes a second to the pfs

    @property
    def config(self) -> Path:
        return self.home / "cluster.toml"

    @property
    def text(self) -> str:
        return self.config.read_text()

    @property
    def flush_s(self) -> float:
        """How long the limit lets the flush of one checkpoint take."""
        return self.state_bytes / self.bandwidth

    def folder(self, tier: str, run: str) -> Path:
        """The run on the tier `nvme` or `pfs`."""
        return self.home / tier / run

    def step(self, tier: str, run: str, step: int) -> Path | None:
        """The folder of the newest try at a step on a tier, committed or not; None if there is none."""
        return max(self.folder(tier, run).glob(f"step-{step:09d}.*"), default=None)

    def committed(self, tier: str, run: str) -> dict[int, Path]:
        """The folders that have a manifest, by step."""
        found = sorted(self.folder(tier, run).glob("step-*/manifest.json"))
        return {int(path.parent.name[5:14]): path.parent for path in found}


def make_tiers(home: Path, layers: int, width: int, flush_s: float) -> Tiers:
    """Makes the folders and writes the config file, with sizes and limits that fit the model.

    flush_s: how long a flush to the pfs shall take.
    """
    with torch.device("meta"):
        weights = sum(weight.numel() for weight in ByteTransformer(layers, width, LENGTH).parameters())
    state_bytes = weights * BYTES_PER_WEIGHT
    tiers = Tiers(home, state_bytes, max(1, round(state_bytes / flush_s / 1e6)) * 1_000_000)
    for name in ("nvme", "pfs"):
        (home / name).mkdir()
    values = {"state_mb": state_bytes / 1e6, "bandwidth_mb": tiers.bandwidth // 1_000_000}
    tiers.config.write_text(CONFIG.format(host_mib=_host_slots(state_bytes) * CHUNK_BYTES >> 20, **values))
    return tiers


def _host_slots(state_bytes: int) -> int:
    """Host memory in chunks: the newest checkpoint stays there whole, of the one before only a part."""
    one = -(-state_bytes // 3 // CHUNK_BYTES) + -(-state_bytes * 2 // 3 // CHUNK_BYTES) + 1  # model, optimizer, rest
    kept = one + one // 2
    slots = kept + 2
    while slots - max(2, slots // 8) < kept:  # the driver leaves so much free for what passes through
        slots += 1
    return slots


def shard_bytes(folder: Path) -> int:
    """Bytes of a checkpoint's safetensors files."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def good_bytes(folder: Path, original: Path) -> int:
    """How much of a checkpoint's shards in `folder` equals `original`, in whole chunks."""
    good = 0
    for path in sorted(original.glob("*.safetensors")):
        copy = folder / path.name
        if not copy.exists():
            continue
        with path.open("rb") as one, copy.open("rb") as other:
            while chunk := one.read(CHUNK_BYTES):
                good += len(chunk) if other.read(len(chunk)) == chunk else 0
    return good
