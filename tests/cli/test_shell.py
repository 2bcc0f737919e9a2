"""The command as a shell runs it: help, exit codes, terminals, pipes, interrupts, and what is imported."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

import stepwell
from tests.cli.helpers import Cli, flip, folder_of

ROOT = Path(__file__).parents[2]
COMMANDS = ("ls", "show", "verify", "cp", "rm", "doctor")
_COLOUR = re.compile(r"\x1b\[(?:\d+;)*[34]\d")


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "STEPWELL_DEBUG")}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


def shell(*arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stepwell", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment(**more))


def on_terminal(*arguments: object, columns: int = 120, **more: str) -> tuple[int, str]:
    """Exit code, and what a terminal of that width got from stdout and stderr."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = [sys.executable, "-m", "stepwell", *map(str, arguments)]
    environ = environment(TERM="xterm-256color", **more)
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ)
    os.close(theirs)
    said = bytearray()
    try:
        while data := os.read(ours, 1 << 16):
            said += data
    except OSError:  # EIO: the other end is closed
        pass
    os.close(ours)
    return process.wait(100), said.decode()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_and_needs_nothing(cli: Cli, command: str) -> None:
    answer = cli(command, "--help")
    assert answer.code == 0 and "Examples:" in answer.out and f"  stepwell {command}" in answer.out
    assert "--json" in answer.out


def test_the_main_help_explains_references(cli: Cli) -> None:
    out = cli("--help").out
    assert all(f"\n  {command} " in out for command in COMMANDS)
    assert "@best:loss" in out and "@..5000" in out


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["ls", "RUN"], ["ls", "RUN/.."], ["show", "RUN"], ["verify", "RUN"],
                  ["cp", "RUN", "RUN-2"], ["rm", "RUN@1"], ["doctor", "RUN"]]
)  # fmt: skip
def test_no_command_waits_for_torch(run: Path, arguments: list[str]) -> None:
    code = "import sys; from stepwell.cli import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    real = [argument.replace("RUN", str(run)) for argument in arguments]
    done = subprocess.run([sys.executable, "-c", code, *real], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_version(cli: Cli) -> None:
    assert cli("--version").out == f"stepwell {stepwell.__version__}\n"


@pytest.mark.parametrize("arguments", [["nonsense"], ["ls", "--nonsense"], ["show"], ["cp", "a"], ["rm"]])
def test_wrong_usage_is_exit_code_2(cli: Cli, arguments: list[str]) -> None:
    answer = cli(*arguments)
    assert answer.code == 2 and answer.out == "" and "Usage:" in answer.err


def test_errors_are_one_line_and_tracebacks_only_if_asked_for(tmp_path: Path) -> None:
    plain = shell("show", tmp_path / "no")
    assert plain.returncode == 1 and plain.stdout == ""
    assert plain.stderr == f"stepwell: error: no such file or folder: {tmp_path}/no (path {tmp_path}/no)\n"
    for asked in (shell("--debug", "show", tmp_path / "no"), shell("show", tmp_path / "no", STEPWELL_DEBUG="1")):
        assert asked.returncode == 1 and "Traceback" in asked.stderr and "CheckpointNotFound" in asked.stderr


def test_a_fault_of_ours_is_one_line_too(cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("stepwell.cli._ls.look_up", broken)
    answer = cli("ls", run)
    assert answer.code == 1 and answer.err.count("\n") == 1
    assert "internal error: ZeroDivisionError: oops" in answer.err and "--debug" in answer.err


def test_one_document_on_stdout_and_nothing_else(run: Path, tmp_path: Path) -> None:
    flip(folder_of(run, 1) / "model.safetensors", 9)
    for arguments in (["ls", run], ["show", run], ["verify", run], ["cp", run, tmp_path / "c"], ["rm", f"{run}@1"]):
        assert isinstance(json.loads(shell(*arguments, "--json").stdout), dict)


def test_a_terminal_gets_colours_unless_it_wants_none(run: Path) -> None:
    code, said = on_terminal("verify", run)
    assert code == 0 and _COLOUR.search(said) and "verifying" in said
    code, said = on_terminal("verify", run, NO_COLOR="1")
    assert code == 0 and not _COLOUR.search(said) and "all good" in said


def test_what_is_no_terminal_gets_no_escape_codes_and_no_progress(run: Path) -> None:
    done = shell("verify", run)
    assert "\x1b" not in done.stdout and done.stderr == ""


def test_a_narrow_terminal_loses_nothing(run: Path) -> None:
    odd = run.rename(run.parent / ("long-name-" * 8))
    code, said = on_terminal("ls", run.parent, columns=40, NO_COLOR="1")
    assert code == 0 and all(len(re.sub(r"\x1b\[[\d;]*m", "", line)) <= 40 for line in said.splitlines())
    first_column = "".join(re.sub(r"\x1b\[[\d;]*m", "", line).split("  ")[0].strip() for line in said.splitlines()[1:])
    assert odd.name in first_column.replace(" ", "")


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_has_had_enough(run: Path, options: list[str]) -> None:
    command = [sys.executable, "-m", "stepwell", "ls", str(run), *options]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, env=environment(), timeout=100)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


INTERRUPTED = """
import contextlib, os, signal, sys, threading
from stepwell.cli import _change, main

came = threading.Event()

def interrupt(*_):
    came.set()
    raise KeyboardInterrupt

signal.signal(signal.SIGINT, interrupt)

class Watch:
    def expect(self, size_bytes): pass
    def moved(self, size_bytes):
        if not came.is_set():
            os.kill(os.getpid(), signal.SIGINT)
            came.wait(30)

_change.progress = lambda what: contextlib.nullcontext(Watch())
main()
"""


@pytest.mark.parametrize("into_run", [False, True])
def test_an_interrupted_copy_leaves_nothing(run: Path, tmp_path: Path, into_run: bool) -> None:
    target = tmp_path / "target"
    if into_run:
        with stepwell.open(target) as store:
            store.save(0, {"a": 1}).wait()
    before = sorted(target.glob("step-*"))
    command = [sys.executable, "-c", INTERRUPTED, "cp", f"{run}@1..5", str(target)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 130, done.stderr
    assert done.stderr == "stepwell: interrupted; nothing half done is left\n" and done.stdout == ""
    assert target.exists() == into_run and sorted(target.glob("step-*")) == before
    if into_run:
        with stepwell.open(target) as store:  # the run was given up
            store.restore({"a": 0})
            store.save(9, {"a": 1}).wait()
