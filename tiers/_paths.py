"""Keys to paths. The only place that joins user text into a path, and it lets nothing out of the root."""

from __future__ import annotations

import os

from stepwell.errors import ConfigError
from stepwell.tiers.base import CheckpointKey, RecordKey, ShardKey

#: what common file systems take as one name; some encrypted ones take only 143, and say so themselves
NAME_BYTES_MAX = 255


def check_name(name: str, what: str) -> str:
    """Returns `name` if it can be exactly one component of a path; else raises ConfigError."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ConfigError(f"{name!r} cannot name a {what}", todo="Use a plain name without '/', '.' or '..'")
    length = len(os.fsencode(name))
    if length > NAME_BYTES_MAX:
        raise ConfigError(
            f"The name of a {what} has {length} bytes, the limit is {NAME_BYTES_MAX}", name=name[:40] + "…"
        )
    return name


def check_run(run: str) -> str:
    """As check_name, but a run may be nested ("team/llama"), and "" means: not inside a run."""
    for part in run.split("/") if run else ():
        check_name(part, "run")
    return run


def check_checkpoint(checkpoint: CheckpointKey) -> CheckpointKey:
    check_run(checkpoint.run)
    check_name(checkpoint.attempt, "checkpoint")
    return checkpoint


def check_shard(shard: ShardKey) -> ShardKey:
    check_checkpoint(shard.checkpoint)
    check_name(shard.name, "shard")
    return shard


def check_record(record: RecordKey) -> RecordKey:
    check_run(record.run)
    parts = record.name.split("/")
    if len(parts) > 2:
        raise ConfigError(f"{record.name!r} cannot name a record: at most one '/'")
    for part in parts:
        check_name(part, "record")
    return record


def absolute_root(path: str | os.PathLike[str]) -> str:
    """'~' and relative paths are resolved here, once; links are kept, so that they may be moved later."""
    text = os.fspath(path)
    if not text:
        raise ConfigError("The path of a tier is empty", todo="Use '.' for the current folder")
    return os.path.abspath(os.path.expanduser(text))


class Layout:
    """Where things lie under one root: <root>/<run>/<attempt>/<shard>."""

    def __init__(self, root: str) -> None:
        self.root = root

    def run(self, run: str) -> str:
        return os.path.join(self.root, check_run(run)) if run else self.root

    def folder(self, checkpoint: CheckpointKey) -> str:
        check_checkpoint(checkpoint)
        return os.path.join(self.run(checkpoint.run), checkpoint.attempt)

    def shard(self, shard: ShardKey) -> str:
        check_shard(shard)
        return os.path.join(self.folder(shard.checkpoint), shard.name)

    def record(self, record: RecordKey) -> str:
        check_record(record)
        return os.path.join(self.run(record.run), record.name)
