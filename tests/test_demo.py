"""The demo in small: three tiers, a run that is killed twice and resumes as if nothing had happened."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich", reason="the demo's extra packages are not installed")

from rich.console import Console  # noqa: E402  (only where it is installed)

ROOT = Path(__file__).resolve().parents[1]
SMALL = ("--steps", "10", "--every", "2", "--layers", "2", "--width", "256", "--threads", "1", "--flush-seconds", "0.6")


def demo(*options: str | Path, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "examples.demo", *map(str, options)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_in_a_save_and_in_a_flush_it_ends_like_the_run_without_interruption(tmp_path: Path) -> None:
    done = demo(*SMALL, "--no-pretrained", "--dir", tmp_path, timeout=280)  # 30 s, and busy machines
    assert done.returncode == 0, done.stdout + done.stderr
    for words in (
        "ms into the save of step",
        "in the flush of step",
        "MB were there and good",
        "equal, bit for bit: the losses of steps",
        "and taken from another tier: optimizer.safetensors on nvme",
        "$ stepwell verify killed",
        "save step 2 (uninterrupted)",
        "The ceiling is the best of",
    ):
        assert words in done.stdout, words
    assert list(tmp_path.iterdir()) == []  # it cleans up


def test_the_pretrained_model_is_what_safetensors_reads_from_disk_and_from_memory(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    from examples.demo import pretrained

    folder = pretrained.find_folder()
    if folder is None:
        pytest.skip(f"{pretrained.PACKAGE} is not installed")
    text = io.StringIO()
    tensors, reads = pretrained.load_and_compare(folder, tmp_path, Console(file=text))
    assert tensors > 100
    assert [list(read.sources) for read in reads] == [["disk"], ["disk"], ["disk"], ["host"]]
    assert all(read.size > 80e6 for read in reads)
    assert "prefetched 90.9 MB into host memory" in text.getvalue()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--steps", "8", "--every", "2"), "--steps must be 5 times --every"),
        (("--every", "0"), "--steps must be 5 times --every"),
        (("--width", "100"), "--width must be a multiple of 64"),
        (("--flush-seconds", "0"), "--flush-seconds must be above 0"),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    done = demo(*options, "--dir", tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert list(tmp_path.iterdir()) == []


def status(at: float, nvme: int | None, to_go: int, moved: int) -> dict[str, Any]:
    tiers = {"host": {"step": 2, "to_go": 0}, "nvme": {"step": nvme, "to_go": to_go}}
    return {"kind": "status", "at": at, "tiers": tiers, "edges": [["host", "nvme", moved], ["nvme", "pfs", 7]]}


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_shows_each_tier_live_or_a_line_for_each_change(tmp_path: Path, terminal: bool) -> None:
    from examples.demo.progress import Watch

    text, log = io.StringIO(), tmp_path / "log"
    records = [
        {"kind": "loss", "step": 2, "loss": (1.5).hex()},
        {"kind": "save", "step": 2, "bytes": 10_000_000, "tier_seconds": {"host": 0.01}},
        status(1.0, None, 0, 0),
        status(1.1, None, 0, 4_000_000),
        status(1.2, 2, 0, 10_000_000),
    ]
    environ = {"TERM": "xterm"} if terminal else {}
    with Watch(log, "run", 8, Console(file=text, force_terminal=terminal, width=80, _environ=environ)) as watch:
        watch.look()  # there is no log yet
        with log.open("a") as file:
            for record in records[:4]:
                file.write(json.dumps(record) + "\n")
            file.write('{"kind": "lo')  # a line that is not whole yet
        watch.look()
        assert watch.tiers["nvme"].to_go == 10_000_000 and watch.tiers["nvme"].rate == pytest.approx(40e6)
        os.truncate(log, log.stat().st_size - len('{"kind": "lo'))
        with log.open("a") as file:
            file.write(json.dumps(records[4]) + "\n")
    assert watch.tiers["nvme"].step == 2 and watch.tiers["nvme"].to_go == 0
    assert watch.tiers["nvme"].rate == pytest.approx(50e6)
    shown = text.getvalue()
    assert ("run: step 2 of 8, loss 1.500" if terminal else "nvme: none, 10 MB to go") in shown
    assert ("newest step" if terminal else "host: step 2; nvme: step 2") in shown


def test_whatever_is_wrong_ends_it_with_exit_code_1_and_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("safetensors")
    from examples.demo import __main__ as main
    from examples.demo import story

    def tell(*_: object) -> None:
        raise AssertionError("3 tensors [w] differ")

    monkeypatch.setattr(story, "tell", tell)
    monkeypatch.setattr(sys, "argv", ["demo", "--dir", str(tmp_path)])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # set by main: put back after the test
    assert main.main() == 1
    assert "FAILED: 3 tensors [w] differ" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_difference_between_runs_is_told() -> None:
    pytest.importorskip("safetensors")
    from examples.demo.compare import different_runs
    from examples.demo.killed import Attempt

    whole = Attempt({1: (1.0).hex(), 2: (2.0).hex()}, digests={"w": "a", "v": "b"})
    killed = Attempt({1: (1.0).hex()}, committed_step=1)
    resumed = Attempt({2: (2.0).hex()}, restored={"step": 1}, digests={"w": "a", "v": "b"})
    assert different_runs(whole, [killed, resumed]) == []
    wrong = Attempt({2: (2.5).hex()}, restored={"step": 0}, digests={"w": "a", "v": "c"})
    assert different_runs(whole, [killed, wrong]) == [
        "process 2, step 2: loss 2.5 is not 2.0",
        "process 2 restored step 0, but step 1 was the newest",
        "tensor v",
    ]


def test_a_kill_after_the_whole_flush_has_cut_off_nothing(tmp_path: Path) -> None:
    from examples.demo.killed import Cut, _cut
    from examples.demo.tiers import make_tiers

    assert _cut(make_tiers(tmp_path, 1, 64, 1.0), "killed", 4) == Cut(4, 0, 0, 0, 0)


def test_a_process_that_was_killed_before_its_first_checkpoint_leaves_none_to_restore() -> None:
    from examples.demo.compare import different_runs
    from examples.demo.killed import Attempt

    losses = {1: (0.5).hex(), 2: (0.25).hex()}
    digests = {"model/w": "0" * 64}
    whole = Attempt(losses=losses, digests=digests, committed_step=2)
    assert different_runs(whole, [Attempt(losses={1: losses[1]}), Attempt(losses=losses, digests=digests)]) == []
    again = Attempt(losses=losses, digests=digests, restored={"step": 1})
    assert "process 2 restored step 1, but step None" in different_runs(whole, [Attempt(), again])[0]
