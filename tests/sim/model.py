"""What should be true: the saves that processes asked for, and what each was promised."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from stepwell.format.names import Attempt
from stepwell.saving import Save
from stepwell.state import Snapshot
from tests.sim.medium import Token
from tests.sim.memory import Tokens, blocks_of

#: bytes in front of a shard's tensors
HEADER_BYTES = 4096


class Broken(AssertionError):
    """An invariant does not hold."""


class Gap(Broken):
    """It does not hold because of the one known gap: a process that stood still, between its look at the epoch and what
    it then did, for so long that another one has taken the run meanwhile. Tiers know nothing of epochs, so nothing
    stops what it had begun; the history ends there."""


@dataclass(frozen=True, slots=True)
class FakePlan:
    """What the writer asks of a shard's plan."""

    file: str
    size: int
    header: bytes = bytes(HEADER_BYTES)
    leaves: np.ndarray[Any, np.dtype[np.uint32]] = field(default_factory=lambda: np.zeros(0, np.uint32))


@dataclass(eq=False, slots=True)
class FakeSnapshot:
    """A state whose bytes are tokens. `contents` go on changing once the save has said that it copied them."""

    shards: list[FakePlan]
    contents: dict[str, Tokens]
    parts: dict[str, list[str]]
    part_bytes: dict[str, int]

    @property
    def nbytes(self) -> int:
        return sum(shard.size for shard in self.shards)

    @property
    def skeleton(self) -> dict[str, Any]:
        return {}

    def encoded_skeleton(self) -> bytes:
        return b"{}"

    def source(self, index: int) -> Tokens:
        return self.contents[self.shards[index].file]

    def change(self) -> None:
        """Training goes on: the state's memory is written."""
        for tokens in self.contents.values():
            tokens.tokens = [token ^ 1 if isinstance(token, int) else token for token in tokens.tokens]

    def as_snapshot(self) -> Snapshot:
        return cast(Snapshot, self)


def make_snapshot(number: int, sizes: dict[str, int]) -> FakeSnapshot:
    """The state of save `number`, a part for each (name, bytes)."""
    shards, contents = [], {}
    for index, (part, size) in enumerate(sizes.items()):
        file = f"{part}.safetensors"
        shards.append(FakePlan(file, size))
        contents[file] = Tokens([(number << 24 | index << 16 | block << 1) + 2 for block in range(blocks_of(size))])
    parts = {part: [f"{part}.safetensors"] for part in sizes}
    return FakeSnapshot(shards, contents, parts, dict(sizes))


def random_sizes(rng: random.Random, chunk_bytes: int, chunks_max: int | None = None) -> dict[str, int]:
    """One to three parts of up to three chunks, mostly small ones; all together at most `chunks_max`."""
    while True:
        parts = ["model", "optimizer", "extra"][: rng.randint(1, 3)]
        sizes = {p: rng.choice((1, 4096, chunk_bytes // 2 + 5, chunk_bytes, 2 * chunk_bytes + 777)) for p in parts}
        if chunks_max is None or sum(-(-size // chunk_bytes) for size in sizes.values()) <= chunks_max:
            return sizes


@dataclass(eq=False, slots=True)
class Saved:
    """One save, as its process was told of it."""

    number: int
    step: int
    owner: str  # the process
    tokens: dict[str, list[Token]]  # file -> its blocks at the moment of the save
    sizes: dict[str, int]
    rewind_to: int | None
    handle: Save
    told: set[str] = field(default_factory=set)  # tiers where it was said to be
    acked: set[str] = field(default_factory=set)  # those where it must therefore stay
    looked_at: dict[str, object] = field(default_factory=dict)  # tier -> what the handle said when it had an answer
    asked_at: float = 0.0
    undisturbed: bool = False  # its process had the run and was not held up when it was asked for
    failed: bool = False
    settled: bool = False  # there is nothing more to be told
    made: float = 0.0

    @property
    def parts(self) -> list[str]:
        return [file.removesuffix(".safetensors") for file in self.sizes]

    @property
    def attempt(self) -> Attempt | None:
        folder = self.handle.checkpoint
        return None if folder is None else Attempt.parse(folder)

    def __str__(self) -> str:
        return f"save {self.number} of {self.owner} (step {self.step}, {self.handle.checkpoint})"


class Model:
    """All saves of a world."""

    def __init__(self) -> None:
        self.saves: list[Saved] = []
        self._by_folder: dict[str, Saved] = {}

    def find(self, folder: str) -> Saved | None:
        """The save whose attempt has this name. Raises Broken if two have."""
        known = self._by_folder.get(folder)
        if known is None:
            found = [saved for saved in self.saves if saved.handle.checkpoint == folder]
            if len(found) > 1:
                raise Broken(f"two saves write {folder}: {' and '.join(map(str, found))}")
            if found:
                known = self._by_folder[folder] = found[0]
        return known
