"""Safetensors files that stepwell did not write: checked as far as they can be, and copied.

They carry no checksums, so a check is one of structure: each header is read, every number in it is checked, and
the file must be exactly as long as it says. A copy is read back and compared, and appears whole or not at all.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from stepwell import native
from stepwell.errors import ConfigError, CorruptData, FormatError, StepExists, StepwellError
from stepwell.format.safetensors import Header, parse_header
from stepwell.tiers._folders import sync_folder
from stepwell.tiers.base import CHUNK_BYTES, tier_error

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
#: an index of more is none; that of a model with a million tensors has some 100 MB
_INDEX_BYTES_MAX = 1 << 30
_HEADER_BYTES_MAX = 100_000_008


def read_header(path: Path) -> Header:
    """Reads and checks the header of a safetensors file. Raises FormatError, TierError."""
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for ever
            raise FormatError("it is not a file", todo="Move it away", path=str(path))
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(8)
            wanted = int.from_bytes(head, "little")
            return parse_header(head + file.read(min(wanted, _HEADER_BYTES_MAX)), size, str(path))
    except OSError as error:
        raise _translated(error, "cannot read the file", path) from error


def weight_files(folder: Path, only: str | None = None) -> tuple[list[str], list[tuple[str, str]]]:
    """The safetensors files of a folder, and (file, what is wrong) of an index that does not fit them."""
    if only is not None:
        return [only], []
    names = sorted(os.listdir(folder))
    files = [name for name in names if name.endswith(SUFFIX)]
    wrong: list[tuple[str, str]] = []
    for index in (name for name in names if name.endswith(INDEX_SUFFIX)):
        try:
            with open(folder / index, "rb") as file:
                named = set(msgspec.json.decode(file.read(_INDEX_BYTES_MAX))["weight_map"].values())
        except (OSError, msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
            wrong.append((index, f"it is no index of safetensors files: {error}"))
            continue
        wrong += [(str(name), f"{index} names it, and it is missing") for name in sorted(named - set(files), key=str)]
    return files, wrong


def check_plain(folder: Path, only: str | None = None) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Size of each safetensors file, and (file, what is wrong) of all that is."""
    files, wrong = weight_files(folder, only)
    sizes: dict[str, int] = {}
    for name in files:
        try:
            sizes[name] = read_header(folder / name).size_bytes
        except StepwellError as error:
            wrong.append((name, error.what))
    return sizes, wrong


# -- copying -----------------------------------------------------------------------------


def plain_target(folder: Path, only: str | None, target: Path) -> Path:
    """Where a copy into `target` would be. Raises StepExists if something is there, ConfigError if it is inside of
    what is copied."""
    if only is None and target.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(
            "a folder is not copied into itself; nothing was written", todo="Name a folder outside", path=str(target)
        )
    place = target / (only or folder.name)
    if os.path.lexists(place):
        raise StepExists("the copy's place is taken; nothing was written", todo="Name another folder", path=str(place))
    return place


def plain_files(folder: Path, only: str | None) -> dict[str, int]:
    """Relative path -> size of every file that belongs to a plain checkpoint."""
    if only is not None:
        return {only: os.stat(folder / only).st_size}
    found: dict[str, int] = {}
    for at, folders, names in os.walk(folder, onerror=_raise):
        for name in folders:
            if os.path.islink(os.path.join(at, name)):
                raise FormatError(
                    "a link to a folder is not copied", todo="Replace it by the folder", path=os.path.join(at, name)
                )
        for name in names:
            path = os.path.join(at, name)
            found[os.path.relpath(path, folder)] = os.stat(path).st_size
    return dict(sorted(found.items()))


def copy_plain(folder: Path, only: str | None, target: Path) -> Iterator[int]:
    """Copies a plain checkpoint into the folder `target`, which exists; yields bytes as they are written.

    The copy is read back and compared, and put in its place only when all of it is durable. Raises StepExists,
    FormatError, CorruptData, TierError; whatever is raised, also into it, nothing is left behind.
    """
    place = plain_target(folder, only, target)
    _, wrong = check_plain(folder, only)
    for file, what in wrong:
        raise FormatError(f"it is damaged already: {what}", todo="Copy another one", path=str(folder / file))
    temporary = target / f".{place.name[:64]}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
    try:
        os.mkdir(temporary)
        for name in plain_files(folder, only):
            copied = temporary / name
            copied.parent.mkdir(parents=True, exist_ok=True)
            yield from _copy_file(folder / name, copied)
        _sync_tree(temporary)
        plain_target(folder, only, target)
        if only is None:
            os.rename(temporary, place)
        else:
            _put_new(temporary / only, place)
        sync_folder(str(target))
    except OSError as error:
        if isinstance(error, StepwellError):
            raise
        raise _translated(error, "cannot copy", Path(os.fsdecode(error.filename or target))) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _copy_file(source: Path, target: Path) -> Iterator[int]:
    crc = 0
    with open(source, "rb") as reading, open(target, "xb") as writing:
        while data := reading.read(CHUNK_BYTES):
            crc = native.crc32c(data, crc)
            writing.write(data)
            yield len(data)
        writing.flush()
        os.fsync(writing.fileno())
        os.posix_fadvise(writing.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # so that the medium is read, not memory
    again = 0
    with open(target, "rb") as reading:
        while data := reading.read(CHUNK_BYTES):
            again = native.crc32c(data, again)
    if again != crc:
        raise CorruptData(
            "the copy does not hold what was written", todo="Check the disk that it is on", path=str(target)
        )
    shutil.copymode(source, target)


def _put_new(source: Path, place: Path) -> None:
    try:
        os.link(source, place)
    except FileExistsError:
        raise
    except OSError:  # no hard links here
        os.rename(source, place)


def _sync_tree(root: Path) -> None:
    for at, _, _ in os.walk(root):
        sync_folder(at)


def _translated(error: OSError, what: str, path: Path) -> StepwellError:
    return tier_error(error.errno or errno.EIO, what, path=str(path))


def _raise(error: OSError) -> None:
    raise error
