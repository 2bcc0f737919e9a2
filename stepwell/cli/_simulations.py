"""What the commands `stepwell lab …` do: read what is asked, run it, show it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.table import Table
from rich.text import Text

from stepwell.cli._output import clean, console, pairs, print_json, say, show_table, table
from stepwell.config import Config, load_config
from stepwell.errors import ConfigError
from stepwell.hostmem import cgroup_limit_bytes
from stepwell.lab import chart
from stepwell.lab import speeds as lab_speeds
from stepwell.lab.outcome import Exposed, Outcome, ReadsSeen
from stepwell.lab.plan import Plan, levels_of, make_plan
from stepwell.lab.simulation import simulate as play
from stepwell.lab.synthetic import LEVELS, make
from stepwell.lab.trace import Workload, from_files
from stepwell.units import format_bytes, format_duration, parse_duration, parse_percent, parse_size


def failures_of(texts: Sequence[str]) -> dict[str, float]:
    """Mean seconds between failures by kind, from 'process=2d'. Raises ConfigError."""
    found: dict[str, float] = {}
    for text in texts:
        kind, equals, value = text.partition("=")
        if not equals or kind not in LEVELS or kind in found:
            todo = f"Write one of {', '.join(f'{level}=2d' for level in LEVELS)}, each once"
            raise ConfigError(f"--failure {text} cannot be read", todo=todo)
        found[kind] = parse_duration(value)
    return found


def _load(path: Path) -> Config:
    config = load_config(path)
    for tier in config.tiers:
        if tier.driver == "gpu":
            say(f"{path.name}: tier {tier.name} is left out: GPU memory is not simulated")
    return config


def _memory_bytes(text: str | None) -> int:
    return cgroup_limit_bytes() if text is None else parse_size(text)


# -- simulate ----------------------------------------------------------------------------


def simulate(
    configs: Sequence[Path], speeds: Path, traces: Sequence[Path], synthetic: str | None, failures: Sequence[str],
    *, memory: str | None, seed: int, plot: Path | None, as_json: bool,
) -> None:  # fmt: skip
    if plot is not None:
        chart.check_path(plot)
    if bool(traces) is (synthetic is not None):
        raise ConfigError(
            "either a trace or a made-up workload is played", todo="Give --trace FILE or --synthetic WHAT"
        )
    rates = failures_of(failures)
    known = lab_speeds.read_speeds(speeds)
    loaded = [_load(config) for config in configs]
    workload: Workload = from_files(traces) if synthetic is None else make(synthetic, seed, rates)
    outcomes = []
    for config in loaded:
        if len(loaded) > 1:
            say(f"simulating {Path(config.file).name}")
        outcomes.append(
            play(config, workload, known, memory_bytes=_memory_bytes(memory), failures=rates, seed=seed)
        )  # fmt: skip
    names = _names(configs)
    if as_json:
        documents = [document_of(outcome) for outcome in outcomes]
        print_json({"workload": workload.name, "notes": workload.notes, "outcomes": documents})
    else:
        _show(workload, outcomes, names)
    if plot is not None:
        chart.draw(outcomes, names, plot)
        say(f"drawn: {plot}")


def _names(configs: Sequence[Path]) -> list[str]:
    """Short, and told apart."""
    short = [config.stem for config in configs]
    return short if len(set(short)) == len(short) else [str(config) for config in configs]


def document_of(outcome: Outcome) -> dict[str, Any]:
    """An outcome as a JSON document."""
    told = dataclasses.asdict(outcome)
    told["overhead"] = outcome.overhead
    return told


def _show(workload: Workload, outcomes: Sequence[Outcome], names: Sequence[str]) -> None:
    ranks = f", {outcomes[0].ranks} ranks" if outcomes[0].ranks > 1 else ""
    console().print(Text(clean(f"{workload.name}: {format_duration(outcomes[0].program_s)} of its own time{ranks}")))
    for note in workload.notes:
        console().print(Text(clean(f"note: {note}")))
    console().print()
    made: Table = table("", *map(clean, names), right=names)
    for title, cells in rows_of(outcomes):
        if any(cell for cell in cells):
            made.add_row(title, *(clean(cell or "–") for cell in cells))
    show_table(made)
    for outcome, name in zip(outcomes, names, strict=True):
        for line in outcome.trouble:
            if line not in workload.notes:
                console().print(Text(clean(f"{name}: {line}")))


def rows_of(outcomes: Sequence[Outcome]) -> list[tuple[str, list[str]]]:
    """A title, and the cell of each outcome; "" where it has nothing to say."""
    rows = [
        ("saves durable", [f"{o.saves.durable} of {o.saves.asked}" if o.saves.asked else "" for o in outcomes]),
        ("saves skipped", [_count(o.saves.skipped) for o in outcomes]),
        ("saves failed", [_count(o.saves.failed) for o in outcomes]),
        ("blocked a save", [format_duration(o.saves.blocked_mean_s) if o.saves.asked else "" for o in outcomes]),
        ("blocked at most", [format_duration(o.saves.blocked_max_s) if o.saves.asked else "" for o in outcomes]),
        ("blocked of the time", [f"{o.overhead:.2%}" if o.saves.asked else "" for o in outcomes]),
    ]
    for name in dict.fromkeys(tier.name for o in outcomes for tier in o.tiers):
        seen = [next((tier for tier in o.tiers if tier.name == name), None) for o in outcomes]
        times = [None if t is None else t.seconds_mean for t in seen]
        rows.append((f"save to {name}", ["" if s is None else format_duration(s) for s in times]))
        rows.append((f"whole on {name}", [_count(t.committed) if t else "" for t in seen]))
        rows.append((f"most on {name}", [format_bytes(t.most_bytes) if t and t.most_bytes else "" for t in seen]))
    for way in dict.fromkeys(way for o in outcomes for way in o.edges):
        rows.append((f"moved {way}", [format_bytes(o.edges[way]) if way in o.edges else "" for o in outcomes]))
    rows += _reads("restores", [o.restores for o in outcomes]) + _reads("loads", [o.loads for o in outcomes])
    rows.append(("lost in failures", [_lost(o) for o in outcomes]))
    for level in dict.fromkeys(each.level for o in outcomes for each in o.exposed):
        exposed = [next((each for each in o.exposed if each.level == level), None) for o in outcomes]
        rows += _exposed(level, exposed)
    rows.append(("not down at close", ["" if o.closed else "some" for o in outcomes]))
    return rows


def _count(number: int) -> str:
    return str(number) if number else ""


def _reads(what: str, seen: Sequence[ReadsSeen]) -> list[tuple[str, list[str]]]:
    rows = [
        (what, [f"{r.count}, {format_duration(r.seconds_mean)} each" if r.count else "" for r in seen]),
        (f"{what} failed", [_count(r.failed) for r in seen]),
        (f"{what}: longest", [format_duration(r.seconds_max) if r.count else "" for r in seen]),
    ]
    for tier in dict.fromkeys(tier for r in seen for tier in r.sources):
        rows.append((f"{what} from {tier}", [f"{r.shares[tier]:.1%}" if tier in r.shares else "" for r in seen]))
    return rows


def _lost(outcome: Outcome) -> str:
    if not outcome.failures:
        return ""
    return f"{format_duration(sum(f.lost_s for f in outcome.failures))} in {len(outcome.failures)}"


def _exposed(level: str, exposed: Sequence[Exposed | None]) -> list[tuple[str, list[str]]]:
    restores = [None if e is None else e.restore_s for e in exposed]
    return [
        (f"lost to {level}", [format_duration(e.lost_mean_s) if e else "" for e in exposed]),
        ("  at the worst moment", [format_duration(e.lost_max_s) if e else "" for e in exposed]),
        ("  restore after it", ["nothing is left" if s is None else format_duration(s) for s in restores]),
        ("  costs a day", [format_duration(e.per_day_s) if e and e.per_day_s is not None else "" for e in exposed]),
    ]


# -- plan --------------------------------------------------------------------------------


def plan(
    config: Path, speeds: Path, state: str, iteration: str, failures: Sequence[str], *, ranks: int, memory: str | None,
    restart: str, interference: str, as_json: bool,
) -> None:  # fmt: skip
    slower = 0.0 if interference.strip() in ("0", "0%") else parse_percent(interference)
    levels = levels_of(
        _load(config), lab_speeds.read_speeds(speeds), parse_size(state), ranks=ranks,
        memory_bytes=_memory_bytes(memory), interference=slower,
    )  # fmt: skip
    iteration_s = parse_duration(iteration)
    made = make_plan(levels, iteration_s, failures_of(failures), restart_s=parse_duration(restart, or_zero=True))
    if as_json:
        print_json({**dataclasses.asdict(made), "every_steps": made.every_steps, "lines": lines_of(made)})
        return
    _show_plan(made)


def _show_plan(made: Plan) -> None:
    shown = table("tier", "every steps", "every", "on its way", "", right=("every steps", "every", "on its way"))
    for interval in made.intervals:
        bound = "no more often: a flush takes as long" if interval.bound else ""
        if interval.steps is None or interval.seconds is None:
            shown.add_row(clean(interval.tier), "", "", "", "at the end: no failure here needs it more often")
            continue
        every = format_duration(interval.seconds)
        shown.add_row(clean(interval.tier), f"{interval.steps}", every, f"{interval.busy:.0%}", bound)
    show_table(shown)
    console().print()
    show_table(pairs([
        ("save blocks", format_duration(made.blocked_s)),
        ("expected overhead", f"{made.overhead:.2%}"),
        ("  of it saving", f"{made.saving:.2%}"),
        ("  lost work", f"{made.losing:.2%}"),
        ("  recovering", f"{made.recovering:.2%}"),
    ]))  # fmt: skip
    for failure in made.failures:
        if failure.tier is None:
            say(f"no tier of this config outlives failures of the kind {failure.kind}: they are not in the numbers")
    console().print()
    for line in lines_of(made):
        console().print(Text(line))


def lines_of(made: Plan) -> list[str]:
    """What to write where, so that it is done so."""
    lines = [f"# in the training loop: if step % {made.every_steps} == 0: store.save(step, state)"]
    always = {level.name for level in made.levels[:1]} | {level.name for level in made.levels if level.always}
    for interval in made.intervals:
        if interval.tier not in always:
            words = {None: '"at-close"', made.every_steps: '"all"'}
            value = words.get(interval.steps, f"{{ every_steps = {interval.steps} }}")
            lines += [f'# in [[tier]] name = "{interval.tier}"', f"flush = {value}"]
    return lines


# -- probe -------------------------------------------------------------------------------


def probe(config: Path, size: str, *, as_json: bool) -> None:
    found = lab_speeds.probe(load_config(config), parse_size(size))
    if as_json:
        print_json({"copy_bytes_per_s": found.copy_bytes_per_s, "tiers": {
            name: dataclasses.asdict(speed) for name, speed in found.tiers.items()
        }})  # fmt: skip
    else:
        typer.echo(lab_speeds.write_speeds(found), nl=False)
