"""Outcomes as a picture: an SVG file made by hand, so that nothing has to be installed for it.

One panel for each thing that is compared, one bar for each config. Bars of a panel share its scale, which begins at 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from stepwell.errors import ConfigError
from stepwell.lab.outcome import Outcome
from stepwell.units import format_bytes, format_duration

#: of the configs, in their order; told apart by people who see no red or no green, too
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
_WIDTH, _BAR, _GAP, _LEFT, _RIGHT = 760, 18, 6, 170, 130
_FONT = 'font-family="sans-serif" font-size="12"'


@dataclass(frozen=True, slots=True)
class Panel:
    """A title, and for each config its value (None: there is none) and how to write it."""

    title: str
    values: list[float | None]
    texts: list[str]


def panels_of(outcomes: Sequence[Outcome]) -> list[Panel]:
    """What is worth a look, in this order: time lost to saves and to failures, time to durable, bytes, reads."""
    made = [
        _panel("blocked by save, of the program's time", [o.overhead for o in outcomes], lambda v: f"{v:.2%}"),
        _panel("longest that one save blocked", [o.saves.blocked_max_s for o in outcomes], format_duration),
    ]
    for level in dict.fromkeys(each.level for o in outcomes for each in o.exposed):
        found = [next((each for each in o.exposed if each.level == level), None) for o in outcomes]
        values = [None if each is None else each.lost_mean_s + (each.restore_s or 0.0) for each in found]
        made.append(_panel(f"a failure ({level}) costs, with the restore", values, format_duration))
    for tier in dict.fromkeys(each.name for o in outcomes for each in o.tiers):
        seen = [next((each for each in o.tiers if each.name == tier), None) for o in outcomes]
        made.append(
            _panel(f"save to commit on {tier}", [None if s is None else s.seconds_mean for s in seen], format_duration)
        )
    for way in dict.fromkeys(way for o in outcomes for way in o.edges):
        made.append(_panel(f"moved {way}", [o.edges.get(way) for o in outcomes], lambda v: format_bytes(int(v))))
    if any(o.loads.count for o in outcomes):
        made.append(_panel("a load takes", [o.loads.seconds_mean for o in outcomes], format_duration))
    return [panel for panel in made if any(panel.values)]


def _panel(title: str, values: Sequence[float | None], write: object) -> Panel:
    assert callable(write)
    return Panel(title, list(values), ["–" if value is None else str(write(value)) for value in values])


def check_path(path: Path) -> None:
    """Raises ConfigError for a picture of another kind, before anything is computed for it."""
    if path.suffix.lower() != ".svg":
        todo = "Name it *.svg; browsers show it, and `rsvg-convert` or `inkscape` turn it into a PNG"
        raise ConfigError(f"pictures are SVG files, not {path.name!r}", todo=todo)


def draw(outcomes: Sequence[Outcome], names: Sequence[str], path: Path) -> None:
    """Writes the picture. names: of the configs, as they are to be called."""
    check_path(path)
    path.write_text(svg(panels_of(outcomes), names))


def svg(panels: Sequence[Panel], names: Sequence[str]) -> str:
    """The picture as text."""
    out: list[str] = []
    y = 24
    for number, name in enumerate(names):
        out.append(f'<rect x="10" y="{y - 11}" width="12" height="12" fill="{_COLOURS[number % len(_COLOURS)]}"/>')
        out.append(f'<text x="28" y="{y}" {_FONT}>{escape(name)}</text>')
        y += 18
    for panel in panels:
        y += 16
        out.append(f'<text x="10" y="{y}" {_FONT} font-weight="bold">{escape(panel.title)}</text>')
        y += 8
        most = max(value for value in panel.values if value is not None) or 1.0
        for number, (value, text) in enumerate(zip(panel.values, panel.texts, strict=True)):
            width = (_WIDTH - _LEFT - _RIGHT) * (value or 0.0) / most
            colour, name = _COLOURS[number % len(_COLOURS)], escape(names[number][:24])
            out.append(f'<text x="{_LEFT - 8}" y="{y + 13}" {_FONT} text-anchor="end">{name}</text>')
            out.append(f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{colour}"/>')
            out.append(f'<text x="{_LEFT + width + 6:.1f}" y="{y + 13}" {_FONT}>{escape(text)}</text>')
            y += _BAR + _GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y + 12}">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *out, "</svg>"]) + "\n"
