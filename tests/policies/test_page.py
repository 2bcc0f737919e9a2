"""The page on policies: its Python runs from top to bottom, and says what its config says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepwell.building import Node, build
from stepwell.config import load_config
from stepwell.policies.base import Closing, Committed, Move, Opened, Policy
from tests.policies.views import checkpoint, view

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "policies.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def ran() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "example"}
    for language, text in BLOCKS:
        if language == "python":
            exec(compile(text, "docs/policies.md", "exec"), names)
    return names


def test_its_python_runs() -> None:
    names = ran()
    assert repr(names["FlushTagged"]("pfs")) == "<FlushTagged release to pfs>"


def answers(policies: Sequence[Policy]) -> list[Move]:
    made = [checkpoint(step, ["nvme", "pfs"], metrics={"eval/acc": 1 / step}) for step in range(40, 12_000, 650)]
    new = [checkpoint(step, ["nvme"]) for step in (12_120, 12_180)]
    return [
        move
        for event in (Opened(), Committed("step-12180", "nvme"), Closing())
        for policy in policies
        for move in policy.decide(event, view(*made, *new))
    ]


def test_its_rules_in_python_are_those_of_its_config(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    toml = next(text for language, text in BLOCKS if language == "toml")
    file.write_text(toml.replace("/local", f"{tmp_path}/local").replace("/lustre/ckpt", str(tmp_path)))
    built = build(load_config(file), run="run", node=Node(1, 1 << 30))
    assert sorted(map(repr, built.policies)) == sorted(map(repr, ran()["rules"]))
    asked = answers(built.policies)
    assert len(asked) > 10 and set(asked) == set(answers(ran()["rules"]))
