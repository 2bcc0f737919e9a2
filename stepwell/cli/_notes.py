"""`stepwell keep`, `tag` and `annotate`: notes put on checkpoints; and `stepwell watch`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, closing

import typer

from stepwell.catalog import Catalog
from stepwell.checkpoint import Checkpoint, check_metrics
from stepwell.cli._ls import checkpoint_document, state_of
from stepwell.cli._output import clean, console, print_json, print_json_line
from stepwell.errors import ConfigError
from stepwell.marking import check_tags, mark_all
from stepwell.places import Named, look_up, run_whole, started
from stepwell.units import format_bytes, parse_duration
from stepwell.watching import watch


def keep(ref: str, undo: bool, json: bool) -> None:
    _tell(mark_all(ref, keep=not undo), json)


def tag(ref: str, names: Sequence[str], remove: bool, json: bool) -> None:
    _tell(mark_all(ref, tags=check_tags(() if remove else names, names if remove else ())), json)


def annotate(ref: str, values: Sequence[str], json: bool) -> None:
    _tell(mark_all(ref, metrics=check_metrics(dict(map(_metric, values)))), json)


def _metric(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    try:
        if name:
            return name, float(value)
    except ValueError:
        pass
    raise typer.BadParameter(f"{text!r} is not NAME=NUMBER, such as eval/acc=0.71")


def _tell(marked: Sequence[Checkpoint], json: bool) -> None:
    if json:
        print_json({"checkpoints": [checkpoint_document(each) for each in marked]})
        return
    for each in marked:
        console().print(clean(_words(each)))


def _words(checkpoint: Checkpoint) -> str:
    words = [f"step {checkpoint.step}"]
    words += ["kept"] if checkpoint.kept else []
    words += [f"tags {', '.join(checkpoint.tags)}"] if checkpoint.tags else []
    return "; ".join([*words, *(f"{name} {value:.6g}" for name, value in checkpoint.metrics.items())])


# -- watch -------------------------------------------------------------------------------


def follow(ref: str, tier: str | None, after: int | None, poll: str, timeout: str | None, json: bool) -> None:
    named = look_up(ref)
    if named.place.kind != "run" or named.place.selected:
        raise ConfigError("this is not a whole run", todo="Name a run, without '@'", path=str(named.place.folder))
    poll_s, timeout_s = parse_duration(poll), None if timeout is None else parse_duration(timeout)
    with closing(_Watched(named, tier, after, poll_s, timeout_s)) as watched:
        for found in watched:
            if json:
                print_json_line(checkpoint_document(found))
            else:
                tiers, size = ", ".join(found.tiers), format_bytes(found.size)
                console().print(clean(f"{_words(found)}; {size}, {state_of(found)} on {tiers}"))
                sys.stdout.flush()


class _Watched:
    """A watch of a run whose tiers are open until it is closed. What it gives is printed on the calling thread, since
    a terminal or a pipe may block."""

    def __init__(
        self, named: Named, tier: str | None, after: int | None, poll_s: float, timeout_s: float | None
    ) -> None:
        self._stack = AsyncExitStack()
        run, tiers, _ = run_whole(self._stack.enter_async_context(started(named, read_only=True)))
        places = [each for each in tiers if tier in (None, each.info.name)]
        if not places:
            self.close()
            names = ", ".join(each.info.name for each in tiers)
            raise ConfigError(f"there is no tier {tier!r}", todo=f"The tiers are {names}")
        self._news = watch(Catalog(run, tiers), places[-1], after=after, poll_s=poll_s, timeout_s=timeout_s)

    def __iter__(self) -> Iterator[Checkpoint]:
        async def following() -> Checkpoint | None:
            return await anext(self._news, None)

        while (found := run_whole(following())) is not None:
            yield found

    def close(self) -> None:
        run_whole(self._stack.aclose())
