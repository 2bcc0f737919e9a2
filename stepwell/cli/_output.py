"""How commands speak: results on stdout, all else on stderr; errors as one line; JSON documents."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stepwell.errors import StepwellError
from stepwell.places import NoProgress, Progress

P = ParamSpec("P")
T = TypeVar("T")
#: the option of every command that has results
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]

INTERRUPTED = 130  # as shells say it: 128 + SIGINT
#: a table that goes into a file or a pipe is as wide as it needs to be
_WIDE = 4000

_debug = bool(os.environ.get("STEPWELL_DEBUG"))
_printed = False  # whether this command's one JSON document is on stdout


def set_debug() -> None:
    """Errors show their traceback from now on."""
    global _debug
    _debug = True


# -- errors ------------------------------------------------------------------------------


def reported(command: Callable[P, T]) -> Callable[P, T]:
    """A command whose errors are told in one line on stderr: exit code 1, or 130 if it was interrupted.

    With `--json` stdout then has `error_document`, unless the command has printed a document of its own.
    """

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        global _printed
        _printed = False
        try:
            result = command(*args, **kwargs)
            if sys.stdout is not None:  # as it is where the shell has closed it
                sys.stdout.flush()
            return result
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except BrokenPipeError:
            _drop_output()
            raise typer.Exit(1) from None
        except (KeyboardInterrupt, Exception) as error:
            tell(error)
            if kwargs.get("json") and not _printed:
                try:
                    print_json(error_document(error))
                except OSError:  # stdout may be what failed
                    _drop_output()
            raise typer.Exit(INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1) from None

    return wrapped


def _drop_output() -> None:
    """Whoever read has had enough: what is still buffered must not fail once more at exit."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def tell(error: BaseException) -> None:
    """One line on stderr, or the traceback if that was asked for."""
    if isinstance(error, KeyboardInterrupt):
        say(text_of(error))
    elif _debug:
        traceback.print_exception(error)
    else:
        say(f"error: {text_of(error)}")


def error_document(error: BaseException) -> dict[str, Any]:
    """What went wrong, for programs."""
    where = error.where if isinstance(error, StepwellError) else {}
    told = {"kind": type(error).__name__, "text": text_of(error), "where": {k: str(v) for k, v in where.items()}}
    return {"error": told}


def text_of(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        if isinstance(error.__cause__, KeyboardInterrupt):
            return "interrupted again before all was cleaned up; stepwell ls shows what is left"
        return str(error) or "interrupted; nothing half done is left"
    if isinstance(error, StepwellError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.strerror or error}" + (f" (path {os.fsdecode(error.filename)})" if error.filename else "")
    return f"internal error: {type(error).__name__}: {error}. stepwell --debug shows where; please report it"


def say(text: str) -> None:
    """One line to the person at the terminal."""
    with suppress(OSError):
        print(f"stepwell: {clean(text)}", file=sys.stderr)


# -- results -----------------------------------------------------------------------------


def clean(text: object) -> str:
    """Text that is safe to show: line breaks, control characters and undecodable bytes of names are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text))


def console() -> Console:
    """For results. Names are shown as they are: no markup, no emoji, nothing cut off."""
    out = Console(markup=False, emoji=False, highlight=False, soft_wrap=True)
    if not out.is_terminal and "COLUMNS" not in os.environ:
        out.width = _WIDE
    return out


def table(*columns: str, right: Sequence[str] = ()) -> Table:
    """A plain table; the columns named in `right` hold numbers."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold", no_wrap=name in right)
    return made


def pairs(rows: Sequence[tuple[str, object]]) -> Table:
    """Names and values, one pair a line."""
    made = Table(box=None, pad_edge=False, show_header=False)
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in rows:
        made.add_row(name, value if isinstance(value, Text) else clean(value))
    return made


def show_table(made: Table) -> None:
    out = console()
    out.print(made, soft_wrap=False)


def print_json(document: dict[str, Any]) -> None:
    """One document: what is not a number in JSON is null, and everything is ASCII whatever the locale."""
    global _printed
    text = json.dumps(_plain(document), indent=2, ensure_ascii=True, allow_nan=False)
    _printed = True
    if sys.stdout is not None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def print_json_line(document: dict[str, Any]) -> None:
    """As `print_json`, one of several documents, each a line of its own."""
    global _printed
    _printed = True
    if sys.stdout is not None:
        sys.stdout.write(json.dumps(_plain(document), ensure_ascii=True, allow_nan=False) + "\n")
        sys.stdout.flush()


def fields_of(record: Any) -> dict[str, Any]:
    """A dataclass's fields as they stand in a document: by their names, its size as `bytes`."""
    names = [field.name for field in dataclasses.fields(record)]
    return {"bytes" if name == "size_bytes" else name: getattr(record, name) for name in names}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


# -- progress ----------------------------------------------------------------------------


@contextmanager
def progress(what: str) -> Iterator[Progress]:
    """A bar on stderr while something long runs, if that is a terminal."""
    if not sys.stderr.isatty():
        yield NoProgress()
        return
    from rich import progress as bars

    shown = bars.Progress(
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(),
        bars.DownloadColumn(binary_units=True),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with shown:
        yield _Bar(shown, shown.add_task(what, total=0))


class _Bar:
    def __init__(self, shown: Any, task: Any) -> None:
        self._shown, self._task, self._total = shown, task, 0

    def expect(self, size_bytes: int) -> None:
        self._total += size_bytes
        self._shown.update(self._task, total=self._total)

    def moved(self, size_bytes: int) -> None:
        self._shown.advance(self._task, size_bytes)
