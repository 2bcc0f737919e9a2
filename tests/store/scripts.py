"""Scripts in processes of their own that do not have to import torch first: forks of one that has done so.

A fork runs the code as its main module and then ends like any interpreter: threads are joined, atexit handlers
run, modules are torn down. Nothing but stdout and stderr is shared with the one that was forked.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

_MAIN = """
import json, os, sys, warnings
import torch, stepwell, stepwell.loading, stepwell.opening, stepwell.tiers.wrap
warnings.simplefilter("default")
for line in sys.stdin:
    order = json.loads(line)
    pid = os.fork()
    if pid == 0:
        for number, path in enumerate([os.devnull, order["stdout"], order["stderr"]]):
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOCTTY)
            os.dup2(file, number)
            os.close(file)
        sys.argv = ["script", *order["arguments"]]
        break
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
else:
    sys.exit()
exec(compile(order["code"], "script", "exec"))
"""


@dataclass(frozen=True)
class Ended:
    """How a script ended."""

    status: int
    out: str
    err: str
    seconds: float


class Scripts:
    """Runs scripts, one at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        command = [sys.executable, "-c", _MAIN]
        self._main = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def run(self, code: str, *arguments: object, timeout_s: float = 60, terminal: bool = False) -> Ended:
        """terminal: stderr is a terminal. Raises AssertionError with what was said if it takes too long."""
        self._count += 1
        out = self._folder / f"{self._count}.out"
        err = self._folder / f"{self._count}.err"
        master = slave = -1
        if terminal:
            master, slave = os.openpty()
        where = os.ttyname(slave) if terminal else str(err)
        order = {"code": code, "arguments": list(map(str, arguments)), "stdout": str(out), "stderr": where}
        began = time.monotonic()
        assert self._main.stdin is not None
        self._main.stdin.write(json.dumps(order).encode() + b"\n")
        self._main.stdin.flush()
        pid = self._number(timeout_s)
        assert pid is not None
        status = self._number(timeout_s)
        took = time.monotonic() - began
        if status is None:
            os.kill(pid, signal.SIGKILL)
            self._number(timeout_s)
        said = _all_of(master, slave) if terminal else err.read_text()
        assert status is not None, f"not ended within {timeout_s} s; it said: {said}"
        return Ended(status, out.read_text(), said, took)

    def _number(self, timeout_s: float) -> int | None:
        assert self._main.stdout is not None
        if not select.select([self._main.stdout], [], [], timeout_s)[0]:
            return None
        digits = b""
        while (digit := os.read(self._main.stdout.fileno(), 1)) != b"\n":
            assert digit, "the process that forks has died"
            digits += digit
        return int(digits)

    def close(self) -> None:
        assert self._main.stdin is not None and self._main.stdout is not None
        self._main.stdin.close()
        self._main.wait()
        self._main.stdout.close()


def _all_of(master: int, slave: int) -> str:
    os.close(slave)
    said = b""
    try:
        while part := os.read(master, 65536):
            said += part
    except OSError:  # how a terminal ends
        pass
    os.close(master)
    return said.decode()
