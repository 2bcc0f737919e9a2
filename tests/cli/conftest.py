"""A run on disk, made once and copied for each test, and a way to call the command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import stepwell
from stepwell.cli import app
from tests.cli.helpers import Answer, Cli, state


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Calls the command in this process; stdout is no terminal, and nothing else says how wide it is."""
    monkeypatch.delenv("COLUMNS", raising=False)

    def call(*arguments: object) -> Answer:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        return Answer(result.exit_code, result.stdout, result.stderr)

    return call


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1, 2 and 3; then 2 was restored and 5 saved, so that 3 is abandoned."""
    folder = tmp_path_factory.mktemp("template") / "run"
    notes = folder.parent / "notes.txt"
    notes.write_text("trained with care")
    with stepwell.open(folder) as store:
        for step, loss in ((1, 0.5), (2, 0.25), (3, float("nan"))):
            tags = ["release"] if step == 2 else []
            store.save(step, state(step), metrics={"loss": loss}, tags=tags, files=[notes]).wait()
        store.restore(state(0), step=2)
        store.save(5, state(5), metrics={"loss": 0.75}).wait()
    return folder


@pytest.fixture
def run(template: Path, tmp_path: Path) -> Path:
    """A run of this test's own."""
    return Path(shutil.copytree(template, tmp_path / "root" / "run"))


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A folder as the Hugging Face hub has them."""
    folder = tmp_path / "hub" / "bert"
    (folder / "extra").mkdir(parents=True)
    save_file({"w": torch.ones(300, 4), "x": torch.zeros(7, dtype=torch.int32)}, folder / "model-1.safetensors")
    save_file({"y": torch.ones(5, dtype=torch.bfloat16)}, folder / "model-2.safetensors")
    weights = {"w": "model-1.safetensors", "x": "model-1.safetensors", "y": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    (folder / "config.json").write_text("{}")
    (folder / "extra" / "README").write_text("below")
    return folder
