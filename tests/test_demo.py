"""The demo in small: a run that is killed in the middle of a save and resumes as if nothing had happened."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("rich", reason="the demo's extra packages are not installed")

ROOT = Path(__file__).resolve().parents[1]
SMALL = ("--steps", "12", "--every", "2", "--layers", "2", "--width", "192", "--threads", "1", "--no-pretrained")


def demo(*options: str | Path, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "examples.demo", *map(str, options)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


@pytest.mark.slow
def test_killed_in_a_save_and_resumed_it_ends_like_the_run_without_interruption(tmp_path: Path) -> None:
    done = demo(*SMALL, "--dir", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no manifest.json" in done.stdout
    assert "equal, bit for bit: the losses of steps" in done.stdout
    assert "save step 2 (uninterrupted)" in done.stdout
    assert list(tmp_path.iterdir()) == []  # it cleans up


def test_the_pretrained_model_is_what_safetensors_reads() -> None:
    from examples.demo import pretrained

    folder = pretrained.find_folder()
    if folder is None:
        pytest.skip(f"{pretrained.PACKAGE} is not installed")
    tensors, size, _ = pretrained.load_and_compare(folder)
    assert tensors > 100
    assert size > 80e6


def test_bad_options_are_refused(tmp_path: Path) -> None:
    done = demo("--steps", "5", "--every", "5", "--dir", tmp_path)
    assert done.returncode == 2
    assert "--steps must be 3 times --every" in done.stderr
