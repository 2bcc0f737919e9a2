"""Sidecar files of a checkpoint: small files that travel with it, such as a tokenizer's."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from stepwell.errors import ConfigError
from stepwell.format.names import MANIFEST, NAME_BYTES_MAX, rank_of

#: sidecars are read into memory when save() is called; larger things belong into the state
SIDECAR_BYTES_MAX = 64 << 20

Paths = Mapping[str, str | os.PathLike[str]] | Sequence[str | os.PathLike[str]] | None


def read_sidecars(files: Paths) -> dict[str, bytes]:
    """The contents by name. A folder stands for the files directly in it.

    Raises ConfigError for a name that the checkpoint itself uses, or a file that is missing or too large.
    """
    if files is None:
        return {}
    if isinstance(files, str | os.PathLike):
        files = [files]
    named = dict(files) if isinstance(files, Mapping) else {}
    if not isinstance(files, Mapping):
        for given in map(Path, files):
            paths = sorted(p for p in given.iterdir() if p.is_file()) if given.is_dir() else [given]
            for path in paths:
                if path.name in named:
                    raise ConfigError(f"two sidecar files are named {path.name!r}", todo="Give them as {name: path}")
                named[path.name] = path
    contents = {}
    for name, where in named.items():
        _check_name(name)
        try:
            size = os.stat(where).st_size
            if size > SIDECAR_BYTES_MAX:
                raise ConfigError(
                    f"sidecar {name!r} has {size} bytes, more than {SIDECAR_BYTES_MAX}",
                    todo="Put it into the state as bytes",
                )
            contents[name] = Path(where).read_bytes()
        except OSError as error:
            raise ConfigError(f"sidecar {name!r} cannot be read: {error}", path=os.fspath(where)) from error
    return contents


def _check_name(name: str) -> None:
    taken = name == MANIFEST or rank_of(name) is not None or name.endswith((".safetensors", ".safetensors.index.json"))
    if taken or name in ("", ".", "..") or "/" in name or "\0" in name or len(name.encode()) > NAME_BYTES_MAX:
        raise ConfigError(f"a sidecar cannot be named {name!r}", todo="Give it another name with {name: path}")
