"""How fast the tiers of a config are: read from a small TOML file, or measured on this machine.

copy = "8GB/s"              # state -> host memory, all copy threads of one process together

[tier.nvme]                 # by the tier's name in the config; of one node, all its processes together
write = "2GB/s"
read = "3GB/s"
limit = "2.5GB/s"           # optional: of reading and writing together, as a throttle keeps it
latency = "0.2ms"           # optional: of a chunk, on top of its bytes
record = "5ms"              # optional: until a small record is durable
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import statistics
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stepwell.checking import nearest
from stepwell.config import Config
from stepwell.errors import ConfigError
from stepwell.lab.tier import Speed
from stepwell.native import Job, Op, PieceMap, Region
from stepwell.runtime import Runtime
from stepwell.schema import TierConfig
from stepwell.tiers.base import CHUNK_BYTES, CheckpointKey, ChunkIO, RecordKey, Refused, ShardKey
from stepwell.tiers.file import FileTier
from stepwell.units import parse_duration, parse_rate

_RATES, _TIMES = ("write", "read", "limit"), ("latency", "record")
_TODO = (
    'Measure them on the machine: stepwell lab probe CONFIG > speeds.toml. Or write [tier.{name}] with write = "2GB/s"'
)
#: chunks on their way at once while a place is measured, as the mover has them
_AT_ONCE = 16
#: small things of which the middle one counts
_TRIES = 7


@dataclass(frozen=True, slots=True)
class Speeds:
    """copy_bytes_per_s: state to host memory, of one process. tiers: by name."""

    copy_bytes_per_s: float
    tiers: Mapping[str, Speed]

    def of(self, name: str) -> Speed:
        """Raises ConfigError if nothing is known of this tier."""
        if name not in self.tiers:
            raise ConfigError(f"nothing says how fast tier {name} is", todo=_TODO.format(name=name), tier=name)
        return self.tiers[name]


# -- the file ----------------------------------------------------------------------------


def read_speeds(path: str | os.PathLike[str]) -> Speeds:
    """Reads and checks a file of speeds. Raises ConfigError that names file and key."""
    file = os.path.abspath(path)
    try:
        raw = tomllib.loads(Path(file).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        todo = "Give a TOML file such as `stepwell lab probe` prints"
        raise ConfigError(f"the file of speeds cannot be read: {error}", todo=todo, file=file) from error
    _check_keys(raw, ("copy", "tier"), file, "")
    tables = raw.get("tier", {})
    if "copy" not in raw:
        raise ConfigError("'copy' is missing", todo='Write copy = "8GB/s": state to host memory', file=file, key="copy")
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ConfigError(
            "expected a table", todo='Write [tier.nvme] and below it write = "2GB/s"', file=file, key="tier"
        )
    copy = _parsed(parse_rate, raw["copy"], file, "copy")
    return Speeds(copy, {name: _speed(table, file, f"tier.{name}") for name, table in tables.items()})


def _speed(table: Mapping[str, Any], file: str, key: str) -> Speed:
    _check_keys(table, (*_RATES, *_TIMES), file, f"{key}.")
    for name in ("write", "read"):
        if name not in table:
            raise ConfigError(f"{name!r} is missing", todo=f'Write {name} = "2GB/s"', file=file, key=f"{key}.{name}")
    rates = {name: _parsed(parse_rate, table[name], file, f"{key}.{name}") for name in _RATES if name in table}
    times = {
        name: _parsed(lambda value: parse_duration(value, or_zero=True), table[name], file, f"{key}.{name}")
        for name in _TIMES
        if name in table
    }
    return Speed(rates["write"], rates["read"], rates.get("limit"), times.get("latency", 0.0), times.get("record", 0.0))


def _check_keys(table: Mapping[str, Any], known: Sequence[str], file: str, within: str) -> None:
    for name in table:
        if name not in known:
            raise ConfigError(f"there is no key {name!r}", todo=nearest(name, known), file=file, key=within + name)


def _parsed(parse: Any, value: object, file: str, key: str) -> float:
    try:
        return float(parse(value))
    except ConfigError as error:
        raise ConfigError(error.what, todo=error.todo, file=file, key=key) from None


def write_speeds(speeds: Speeds) -> str:
    """A file of speeds, as `read_speeds` reads it."""
    out = [f'copy = "{_rate(speeds.copy_bytes_per_s)}"']
    for name, speed in speeds.tiers.items():
        out += ["", f"[tier.{name}]"]
        out += [f'write = "{_rate(speed.write_bytes_per_s)}"', f'read = "{_rate(speed.read_bytes_per_s)}"']
        if speed.limit_bytes_per_s is not None:
            out.append(f'limit = "{_rate(speed.limit_bytes_per_s)}"')
        out += [f'latency = "{speed.latency_s * 1000:.3f}ms"', f'record = "{speed.record_s * 1000:.3f}ms"']
    return "\n".join(out) + "\n"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:.1f}MB/s"


# -- measuring ---------------------------------------------------------------------------


def probe(config: Config, size_bytes: int) -> Speeds:
    """Measures every storage tier of the config that has a path, and the copy to host memory.

    In each tier's folder, which must be there, a file of `size_bytes` is written, read and removed again. What
    others do there meanwhile is part of the answer.
    """
    tiers = [tier for tier in config.tiers if tier.path is not None and tier.driver in ("file", "pfs")]
    runtime = Runtime.get()
    copy = runtime.run(_copy_speed(runtime, size_bytes))
    return Speeds(copy, {tier.name: runtime.run(_tier_speed(tier, size_bytes)) for tier in tiers})


async def _copy_speed(runtime: Runtime, size: int) -> float:
    source = np.ones(min(size, 256 << 20), np.uint8)  # zeros would be one page
    region = Region(source.size)
    try:
        region.populate(0, source.size)
        pieces = PieceMap(np.array([0, source.size], np.uint64), np.array([source.ctypes.data], np.uint64), source)
        best = 0.0
        for _ in range(3):
            jobs = [
                Job(
                    Op.GATHER, address=region.address + at, length=min(CHUNK_BYTES, source.size - at), pieces=pieces,
                    pieces_offset=at, crcs=np.zeros(CHUNK_BYTES >> 20, np.uint32),
                )
                for at in range(0, source.size, CHUNK_BYTES)
            ]  # fmt: skip
            began = time.perf_counter()
            await runtime.copier.run(jobs)
            best = max(best, source.size / (time.perf_counter() - began))
    finally:
        region.close()
    return best


async def _tier_speed(config: TierConfig, size: int) -> Speed:
    assert config.path is not None
    root = Path(config.path)
    if not root.is_dir():
        raise ConfigError("there is no such folder", todo="Make it first", tier=config.name, path=str(root))
    run = f"stepwell-probe-{secrets.token_hex(4)}"
    tier = FileTier(root, name=config.name)
    await tier.start()
    try:
        return await _measured(tier, root, run, -(-size // CHUNK_BYTES) * CHUNK_BYTES)
    finally:
        await tier.close()
        with contextlib.suppress(OSError):
            shutil.rmtree(root / run)


async def _measured(tier: FileTier, root: Path, run: str, size: int) -> Speed:
    key = ShardKey(CheckpointKey(run, "step-000000000.1-1"), "probe.safetensors")
    region = Region(_AT_ONCE * CHUNK_BYTES)
    try:
        region.populate(0, region.size)
        reservation = await tier.reserve(key, size)
        if isinstance(reservation, Refused):
            raise ConfigError(
                f"no room to measure: {reservation.detail}", todo="Take a smaller --size", tier=tier.info.name
            )
        began = time.perf_counter()
        await _in_chunks(tier.write, key, size, region)
        record = RecordKey(run, f"{key.checkpoint.attempt}/rank-00000.json")
        await tier.commit(record, b"{}", shards=[reservation])
        write = size / (time.perf_counter() - began)
        records = [await _seconds(tier.commit(RecordKey(run, f"notes/{i:07d}.json"), b"{}")) for i in range(_TRIES)]
        with open(root / str(key), "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # the disk is meant, not the page cache
        async with await tier.lease([key]):
            small = [await _seconds(tier.read([ChunkIO(key, i << 20, 4096, region.address)])) for i in range(_TRIES)]
            began = time.perf_counter()
            await _in_chunks(tier.read, key, size, region)
            read = size / (time.perf_counter() - began)
    finally:
        region.close()
    return Speed(write, read, None, statistics.median(small), statistics.median(records))


async def _in_chunks(move: Any, key: ShardKey, size: int, region: Region) -> None:
    slots: asyncio.Queue[int] = asyncio.Queue()
    for slot in range(_AT_ONCE):
        slots.put_nowait(slot)

    async def one(offset: int, slot: int) -> None:
        [result] = await move([ChunkIO(key, offset, CHUNK_BYTES, region.address + slot * CHUNK_BYTES)])
        slots.put_nowait(slot)
        if result.error is not None:
            raise result.error

    async with asyncio.TaskGroup() as group:
        for offset in range(0, size, CHUNK_BYTES):
            group.create_task(one(offset, await slots.get()))


async def _seconds(work: Any) -> float:
    began = time.perf_counter()
    await work
    return time.perf_counter() - began
