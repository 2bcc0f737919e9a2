"""Bringing a state back in place."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stepwell.errors import ConfigError, KeyMismatch, StateError
from stepwell.format.collecting import paused
from stepwell.state.decode import Decoder, decode_key
from stepwell.state.match import Finisher, Matcher
from stepwell.state.names import KeyFilter, Rename, renamer
from stepwell.state.placement import Placement, Tensors
from stepwell.state.report import Report
from stepwell.state.skeleton import Skeleton, checked_skeleton, part_names

#: keys shown of each kind in a message; the error's lists have them all
_SHOWN = 10
#: below this share of tensors that match, a lenient restore warns
_FEW = 0.5
_PREFIXES = ("module.", "model.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def assign(
    skeleton: Skeleton | Mapping[str, Any],
    state: Mapping[Any, Any],
    *,
    strict: bool | Mapping[str, bool] = True,
    rename: Rename = None,
    allow_pickle: bool = False,
    keys: str | Sequence[str] = "*",
) -> Placement:
    """Matches a saved state with a live one. The parts of `state` are restored, others of the checkpoint ignored.

    strict: for all parts, or part -> bool (default True; ConfigError for a part that is nowhere). keys: dotted
    names (fnmatch) that are restored. Raises KeyMismatch, with every difference, before anything is changed;
    without `strict` the differences are in the placement, and it raises only where nothing at all matches.
    """
    if not isinstance(state, Mapping):
        raise StateError(f"The state is a {type(state).__qualname__}", todo="Give a dict: part name -> value")
    with paused():
        return _assign(checked_skeleton(skeleton), state, strict, renamer(rename), allow_pickle, KeyFilter(keys))


def _assign(
    checked: Skeleton,
    state: Mapping[Any, Any],
    strict: bool | Mapping[str, bool],
    rename: Callable[[str], str | None] | None,
    allow_pickle: bool,
    wanted: KeyFilter,
) -> Placement:
    tensors = Tensors(checked)
    decoder = Decoder(tensors, allow_pickle=allow_pickle)
    saved = {decode_key(node): value for node, value in checked.parts.values()}
    cache: dict[str, Any] = {}
    placement = Placement([])
    refused: list[tuple[Report, str]] = []
    todo: list[tuple[Any, Finisher]] = []
    parts = part_names(state)
    if not isinstance(strict, bool) and (unknown := set(strict).difference(parts, checked.parts)):
        raise ConfigError(
            f"strict names parts that neither state nor checkpoint has: {', '.join(map(repr, unknown))}",
            todo=f"It has {', '.join(parts)}",
        )
    for part, (key, target) in zip(parts, state.items(), strict=True):
        strictly = strict if isinstance(strict, bool) else strict.get(part, True)
        if key not in saved:
            placement.missing.append(part)
            if strictly:
                refused.append((Report(missing=[part]), part))
            continue
        matcher = Matcher(tensors, decoder, state, part, strict=strictly, keys=wanted, rename=rename, cache=cache)
        todo.append((key, matcher.match(saved[key], target, "")))
        _collect(placement, matcher.report, part, strictly, refused)
    if refused:
        raise _mismatch(refused)
    placement.fills += tensors.fills()
    placement._finish = _finisher(state, todo)
    return placement


def _collect(
    placement: Placement, report: Report, part: str, strictly: bool, refused: list[tuple[Report, str]]
) -> None:
    report.settle()
    placement.missing += report.missing
    placement.unexpected += report.unexpected
    placement.mismatched += report.mismatched
    placement.cast += report.cast
    asked = report.matched + len(report.missing)
    nothing = report.matched == 0 and report.missing and report.unexpected
    if (strictly and (report.missing or report.unexpected or report.mismatched)) or nothing:
        refused.append((report, part))
    elif report.missing and report.unexpected and report.matched < _FEW * asked:
        warnings.warn(
            f"part {part!r}: only {report.matched} of {asked} tensors were found in the checkpoint{_hint(report)}",
            stacklevel=4,
        )


def _finisher(state: Mapping[Any, Any], todo: list[tuple[Any, Finisher]]) -> Callable[[], Any]:
    def finish() -> Any:
        for key, step in todo:
            value = step()
            if value is not state[key]:
                state[key] = value  # type: ignore[index]  # a part that is no object needs a state that can be changed
        return state

    return finish


def _mismatch(refused: list[tuple[Report, str]]) -> KeyMismatch:
    missing = [key for report, _ in refused for key in report.missing]
    unexpected = [key for report, _ in refused for key in report.unexpected]
    mismatched = {key: why for report, _ in refused for key, why in report.mismatched.items()}
    lines = ["State and checkpoint do not fit"]
    for title, names in (
        ("not in the checkpoint", missing),
        ("not in the state", unexpected),
        ("of another kind", [f"{key} ({why})" for key, why in mismatched.items()]),
    ):
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            lines.append(f"{len(names)} {title}: {', '.join(names[:_SHOWN])}{more}")
    hint = next(filter(None, (_hint(report) for report, _ in refused)), "")
    return KeyMismatch(
        "; ".join(lines) + hint,
        missing=missing,
        unexpected=unexpected,
        mismatched=list(mismatched),
        todo="Pass strict=False to restore what fits, or rename= to map names",
        part=", ".join(part for _, part in refused),
    )


def _hint(report: Report) -> str:
    """A prefix that explains the difference, as a half-sentence; "" if none does."""
    part_cut = [key.partition(".")[2] for key in report.missing]
    here = set(part_cut)
    there = {key.partition(".")[2] for key in report.unexpected}
    for prefix in _PREFIXES:
        if any(prefix + key in there for key in here):
            return f"; the saved names start with {prefix!r}, try rename={{{prefix!r}: ''}}"
        if any(prefix + key in here for key in there):
            return f"; the names here start with {prefix!r}, try rename={{'': {prefix!r}}}"
    return ""
