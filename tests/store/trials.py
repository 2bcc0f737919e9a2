"""A campaign's trial, run short, in a process of its own that can fork."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_trial(name: str, scratch: Path, *arguments: str) -> dict[str, Any]:
    """The line that `tests/campaign/<name>.py` prints. Raises if the trial found something wrong or hangs."""
    command = [sys.executable, "-m", f"tests.campaign.{name}", *arguments, "--dir", str(scratch)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result
