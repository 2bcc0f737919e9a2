"""`stepwell verify`."""

from __future__ import annotations

import time
from typing import Any

import typer
from rich.text import Text

from stepwell.cli._ls import debris_documents
from stepwell.cli._output import clean, console, error_document, print_json, progress, tell, text_of
from stepwell.errors import StepwellError
from stepwell.units import format_bytes, format_duration
from stepwell.verifying import Problem, Report, Verified, verify


def run(refs: list[str], json: bool) -> None:
    """Ends with exit code 1 if anything is bad, or if one of the references could not be checked."""
    began = time.monotonic()
    reports: list[Report] = []
    failed: dict[str, StepwellError | OSError] = {}
    interrupt: KeyboardInterrupt | None = None
    with progress("verifying") as bar:
        for ref in refs:
            report = Report(ref)
            try:
                verify(ref, bar, report)
            except (StepwellError, OSError) as error:
                failed[ref] = error
                continue
            except KeyboardInterrupt as error:
                interrupt = error
            reports.append(report)
            if interrupt is not None:
                break
    good = not failed and not any(report.problems for report in reports)
    if json:
        _print_document(reports, failed, good, interrupt)
    else:
        for report in reports:
            _print(report, whole=interrupt is None or report is not reports[-1])
        _print_sum(reports, time.monotonic() - began, whole=interrupt is None)
    for why in failed.values():
        tell(why)
    if interrupt is not None:
        raise interrupt
    if not good:
        raise typer.Exit(1)


def _print_document(
    reports: list[Report], failed: dict[str, StepwellError | OSError], good: bool, interrupt: KeyboardInterrupt | None
) -> None:
    documents = [_document(report) for report in reports]
    errors = [{"ref": ref, "error": text_of(why)} for ref, why in failed.items()]
    document = {"ok": good and interrupt is None, "refs": documents, "failed": errors}
    print_json(document if interrupt is None else {**document, **error_document(interrupt)})


def _document(report: Report) -> dict[str, Any]:
    return {
        "ref": report.ref,
        "ok": not report.problems,
        "checked": [{"checkpoint": one.checkpoint, "step": one.step, **_checked(one)} for one in report.checked],
        "run": [{"run": one.checkpoint, **_checked(one)} for one in report.records],
        "debris": debris_documents(report.debris),
    }


def _checked(one: Verified) -> dict[str, Any]:
    return {
        "tier": one.tier,
        "ok": not one.problems,
        "checksums": one.checksums,
        "files": one.files,
        "checked_bytes": one.checked_bytes,
        "problems": [
            {"file": p.file, "what": p.what, "block": p.block, "tensors": list(p.tensors)} for p in one.problems
        ],
        "strangers": one.strangers,
    }


def _print(report: Report, *, whole: bool) -> None:
    out = console()
    for one in (*report.checked, *(each for each in report.records if each.problems)):
        out.print(_line(one))
        for problem in one.problems:
            out.print(Text(f"  {_problem(problem)}", style="red"))
        if one.strangers:
            out.print(Text(f"  not of this checkpoint: {clean(', '.join(one.strangers))}", style="dim"))
    for left in report.debris:
        why = "committed too late" if left.late else "never committed"
        out.print(Text(f"debris  {clean(left.attempt.folder)} on {left.tier}: {why}", style="dim"))
    if whole and not report.checked:
        out.print(f"{clean(report.ref)}: there is no checkpoint to verify")


def _line(one: Verified) -> Text:
    files = f"{one.files} file{'s' if one.files != 1 else ''}"
    if one.checksums:
        what = f"{files}, {format_bytes(one.checked_bytes)}"
    else:
        what = f"{files}, structure only: they carry no checksums"
    word, style = ("bad", "bold red") if one.problems else ("good", "green")
    return Text.assemble((f"{word:<8}", style), f"{clean(one.checkpoint)} on {one.tier}: {what}")


def _problem(problem: Problem) -> str:
    where = clean(problem.file) + (f", block {problem.block}" if problem.block is not None else "")
    inside = f" ({clean(', '.join(problem.tensors))})" if problem.tensors else ""
    return f"{where}: {clean(problem.what)}{inside}"


def _print_sum(reports: list[Report], seconds: float, *, whole: bool) -> None:
    checked = [one for report in reports for one in report.checked]
    size = sum(one.checked_bytes for one in checked)
    bad = sum(bool(one.problems) for report in reports for one in (*report.checked, *report.records))
    speed = f", {size / seconds / 1e9:.2f} GB/s" if size > 100 << 20 else ""
    many = "checkpoint" if len(checked) == 1 else "checkpoints"
    console().print(
        f"{len(checked)} {many}, {format_bytes(size)} in {format_duration(seconds)}{speed}: "
        + (f"{bad} bad" if bad else "all good" if checked else "nothing checked")
        + ("" if whole else " so far")
    )
