"""`stepwell lab`: its tables, documents and pictures, and docs/lab.md against them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from stepwell.cli import app
from stepwell.cli._simulations import rows_of
from stepwell.lab import simulate
from stepwell.lab.chart import panels_of, svg
from stepwell.lab.speeds import read_speeds, write_speeds
from stepwell.lab.synthetic import fleet, training
from tests.cli.helpers import Answer
from tests.lab.helpers import CHUNK, HOST, MEMORY, NVME, PFS, SPEEDS, config

PAGE = (Path(__file__).parents[2] / "docs" / "lab.md").read_text()
STATE = 24 * CHUNK


def lab(*arguments: object) -> Answer:
    result = CliRunner(env={"COLUMNS": None}).invoke(app, ["lab", *map(str, arguments)])
    return Answer(result.exit_code, result.stdout, result.stderr)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Two configs and the speeds of their tiers."""
    often = config(tmp_path, HOST, NVME + "retain = { last = 2 }\n", PFS, name="often.toml").file
    seldom = config(tmp_path, HOST, NVME, PFS + "flush = { every_steps = 50 }\n", name="seldom.toml").file
    (tmp_path / "speeds.toml").write_text(write_speeds(SPEEDS))
    return Path(often), Path(seldom), tmp_path / "speeds.toml"


def keys(document: Any) -> Iterator[str]:
    """The keys of a document and of all in it, but of maps by the user's names."""
    if isinstance(document, dict):
        yield from document
        for name, value in document.items():
            if name not in ("sources", "edges", "tiers") or isinstance(value, list):
                yield from keys(value)
    elif isinstance(document, list):
        for each in document:
            yield from keys(each)


SYNTHETIC = f"training,state={STATE},every=10,iteration=1s,saves=8"


def test_configs_are_shown_side_by_side_and_drawn(files: tuple[Path, Path, Path]) -> None:
    often, seldom, speeds = files
    picture = speeds.with_name("lab.svg")
    answer = lab(
        "simulate", often, seldom, "--speeds", speeds, "--memory", "64GiB", "--synthetic", SYNTHETIC, "--failure",
        "process=40s", "--failure", "node-loss=100s", "--seed", 3, "--plot", picture,
    )  # fmt: skip
    assert answer.code == 0, answer.err
    assert "saves durable" in answer.out and "8 of 8" in answer.out
    assert {"lost to process", "lost to node-loss", "whole on pfs", "lost in failures"} <= {
        re.split(r"\s{2,}", line.strip())[0] for line in answer.out.splitlines() if line.strip()
    }
    root = ElementTree.parse(picture).getroot()
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("often") == texts.count("seldom") > 3


def test_the_document_has_what_docs_lab_md_names(files: tuple[Path, Path, Path]) -> None:
    often, _, speeds = files
    arguments = ("--speeds", speeds, "--memory", "64GiB", "--json")
    played = lab("simulate", often, *arguments, "--synthetic", SYNTHETIC, "--failure", "process=40s")
    planned = lab(
        "plan", often, *arguments, "--state", "4GB", "--iteration", "1s", "--failure", "process=1d"
    )  # fmt: skip
    named = set(re.findall(r"`([a-z_]+)`", PAGE))
    assert set(keys(played.json)) - named == set()
    assert set(keys(planned.json)) - named == set()
    [outcome] = played.json["outcomes"]
    assert outcome["saves"]["durable"] == 8 and outcome["failures"] and outcome["exposed"][0]["level"] == "process"


def test_what_a_plan_prints_can_be_pasted_into_the_config(files: tuple[Path, Path, Path]) -> None:
    often, _, speeds = files
    arguments = (
        "plan", often, "--speeds", speeds, "--memory", "64GiB", "--state", "4GB", "--iteration", "1s", "--failure",
        "process=2d", "--failure", "node-loss=60d",
    )  # fmt: skip
    said, told = lab(*arguments), lab(*arguments, "--json").json
    assert said.code == 0, said.err
    lines = said.out[said.out.index("# in the training loop") :]
    assert f"step % {told['every_steps']} == 0" in lines
    flush = tomllib.loads(lines)["flush"]
    assert flush == {"every_steps": told["intervals"][-1]["steps"]}
    assert f"{told['overhead']:.2%}" in said.out


def test_a_probe_is_a_file_of_speeds(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    file = config(tmp_path, HOST, NVME).file
    said = lab("probe", file, "--size", "16MiB")
    (tmp_path / "s.toml").write_text(said.out)
    assert read_speeds(tmp_path / "s.toml").tiers.keys() == {"nvme"}
    document = lab("probe", file, "--size", "16MiB", "--json").json
    assert document["tiers"]["nvme"]["write_bytes_per_s"] > 0


def test_a_fleet_has_rows_and_panels_of_its_own(tmp_path: Path) -> None:
    work = fleet(models=3, state=STATE, requests=10, gap=1.0)
    outcome = simulate(config(tmp_path, HOST, NVME, PFS), work, SPEEDS, memory_bytes=MEMORY)
    titles = {title for title, cells in rows_of([outcome]) if any(cells)}
    assert {"loads", "loads from host", "loads from pfs"} <= titles
    assert not any(title.startswith(("blocked", "saves", "lost")) for title in titles)
    assert any(panel.title == "a load takes" for panel in panels_of([outcome]))


def test_a_picture_shows_every_config_to_the_same_scale(tmp_path: Path) -> None:
    work = training(state=STATE, every=5, iteration=1.0, saves=4)
    seen = [
        simulate(config(tmp_path, HOST, NVME, *more), work, SPEEDS, memory_bytes=MEMORY) for more in ((), (PFS,))
    ]  # fmt: skip
    panels = panels_of(seen)
    root = ElementTree.fromstring(svg(panels, ["a<b", "c&d"]))
    widths = [float(each.get("width", "0").rstrip("%")) for each in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert max(widths[3:]) <= 760
    moved = next(panel for panel in panels if panel.title == "moved host -> pfs")
    assert moved.values[0] is None and moved.texts[0] == "–" and moved.values[1] == 4 * STATE


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ([], "either a trace or a made-up workload"),
        (["--synthetic", "training", "--plot", "x.png"], "pictures are SVG files"),
        (["--synthetic", "training", "--failure", "fire=2d"], "--failure fire=2d cannot be read"),
        (["--synthetic", "training", "--failure", "process=soon"], "not a time"),
        (["--trace", "nothing.jsonl"], "the trace cannot be read"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(files: tuple[Path, Path, Path], more: list[str], says: str) -> None:
    often, _, speeds = files
    answer = lab("simulate", often, "--speeds", speeds, *more)
    assert answer.code == 1 and answer.out == ""
    assert says in answer.err and len(answer.err.splitlines()) == 1


def test_a_kind_of_failure_that_nothing_outlives_is_said(tmp_path: Path) -> None:
    (tmp_path / "speeds.toml").write_text(write_speeds(SPEEDS))
    file = config(tmp_path, HOST, NVME).file
    answer = lab(
        "plan", file, "--speeds", tmp_path / "speeds.toml", "--state", "1GB", "--iteration", "1s", "--failure",
        "process=2d", "--failure", "node-loss=60d",
    )  # fmt: skip
    assert answer.code == 0 and "outlives failures of the kind node-loss" in answer.err
