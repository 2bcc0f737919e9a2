"""The marker of a shared tier, and this machine's memory of it.

A file system that is not mounted looks like an empty folder: the mount point. Reading nothing there would
look like a fresh start, and writing there would fill the wrong disk. So the first writer leaves a marker with
a random id in the root, and every writer's machine remembers, in the user's cache folder, which id it saw
where. A remembered root without its marker is not the place that it was.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import time
from concurrent.futures import Executor

from stepwell.errors import TierUnavailable
from stepwell.native import crc32c
from stepwell.tiers import _records

MARKER_NAME = ".stepwell-tier.json"

FORMAT = 1
#: another writer's new marker may stay unseen for a moment on a network file system
ENSURE_TRIES = 4
#: which stepwell reads format FORMAT
SINCE_VERSION = "0.1.0"
_SEAL = re.compile(rb'"seal":\s*"([0-9a-f]{8})"')
_ZERO_SEAL = b"00000000"


def encode(tier_id: str) -> bytes:
    """A marker's bytes: JSON, sealed like all records with the crc32c of itself."""
    fields = {"format": FORMAT, "needs": SINCE_VERSION, "seal": _ZERO_SEAL.decode(), "tier_id": tier_id}
    data = json.dumps({**fields, "made": time.time()}, indent=1).encode()
    return data.replace(_ZERO_SEAL, b"%08x" % crc32c(data), 1)


def decode(data: bytes) -> str:
    """The id; "" if the bytes are not those of a marker."""
    seal = _SEAL.search(data)
    if seal is None or crc32c(data[: seal.start(1)] + _ZERO_SEAL + data[seal.end(1) :]) != int(seal[1], 16):
        return ""
    tier_id = json.loads(data).get("tier_id")
    return tier_id if isinstance(tier_id, str) else ""


class Memory:
    """Which marker this machine's user saw at a root: one small file for each. Blocking; for a tier's threads.

    Best effort: a memory that cannot be read or written protects nobody, and stops nobody.
    """

    def __init__(self, root: str) -> None:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        name = hashlib.sha256(os.fsencode(root)).hexdigest()[:16]
        self.root = root
        self.path = os.path.join(base, "stepwell", "tiers", f"{name}.json")

    def recall(self) -> str:
        """The marker's id; "" if none was seen."""
        try:
            with open(self.path, encoding="utf-8") as file:
                seen = json.load(file)
        except (OSError, ValueError):
            return ""
        tier_id = seen.get("tier_id") if isinstance(seen, dict) else None
        return tier_id if isinstance(tier_id, str) else ""

    def remember(self, tier_id: str) -> None:
        temporary = f"{self.path}.{os.getpid()}-{secrets.token_hex(4)}"
        try:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump({"root": self.root, "tier_id": tier_id}, file, indent=1)
            os.replace(temporary, self.path)
        except OSError:
            pass


def check(tier: str, memory: Memory, seen: str, marker: bytes | None) -> str:
    """Decides whether a root is the place that it was: `seen` is the id that was there, "" if unknown; `marker`
    the marker's bytes now. Its id now, "" if there is none. Raises TierUnavailable."""
    there = "" if marker is None else decode(marker)
    if marker is not None and (not there or not seen or there == seen):  # a damaged marker is still no bare folder
        return there or seen
    if not seen:
        return ""
    if marker is None:
        what, question = "looks like a bare mount point", "is it mounted?"
    else:
        what, question = "is not the tier that it was", "is the right file system mounted?"
    raise TierUnavailable(
        f"Tier {tier} {what}: {question}",
        todo=f"Mount it. If the folder was emptied or replaced on purpose, accept that: rm '{memory.path}'",
        path=memory.root,
    )


async def ensure(root: str, executor: Executor) -> bytes:
    """The marker's bytes; makes the marker, durably, if there is none. Raises OSError."""
    path = os.path.join(root, MARKER_NAME)
    for _ in range(ENSURE_TRIES):
        data = await _records.fetch(path, executor)
        if data is not None:
            return data
        await _records.publish(path, encode(secrets.token_hex(16)), executor)  # another may be faster
    raise OSError(errno.ELOOP, "the marker is there but cannot be read: is it a link to nothing?", path)
