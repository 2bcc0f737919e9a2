"""How commands speak: results on stdout, all else on stderr; errors as one line; JSON documents."""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stepwell.errors import StepwellError
from stepwell.places import NoProgress, Progress

P = ParamSpec("P")
T = TypeVar("T")

INTERRUPTED = 130  # as shells say it: 128 + SIGINT
#: a table that goes into a file or a pipe is as wide as it needs to be
_WIDE = 4000

_debug = bool(os.environ.get("STEPWELL_DEBUG"))


def set_debug() -> None:
    """Errors show their traceback from now on."""
    global _debug
    _debug = True


# -- errors ------------------------------------------------------------------------------


def reported(command: Callable[P, T]) -> Callable[P, T]:
    """A command whose errors are told in one line on stderr: exit code 1, or 130 if it was interrupted."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            result = command(*args, **kwargs)
            sys.stdout.flush()
            return result
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except KeyboardInterrupt:
            say("interrupted; nothing half done is left")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # whoever read has had enough
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except Exception as error:
            tell(error)
            raise typer.Exit(1) from None

    return wrapped


def tell(error: Exception) -> None:
    """One line on stderr, or the traceback if that was asked for."""
    if _debug:
        traceback.print_exception(error)
        return
    if isinstance(error, StepwellError):
        text = str(error)
    elif isinstance(error, OSError):
        text = f"{error.strerror or error}" + (f" (path {os.fsdecode(error.filename)})" if error.filename else "")
    else:
        text = f"internal error: {type(error).__name__}: {error}. stepwell --debug shows where; please report it"
    say(f"error: {text}")


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
    json.dump(_plain(document), sys.stdout, indent=2, ensure_ascii=True, allow_nan=False)
    sys.stdout.write("\n")
    sys.stdout.flush()


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
