"""A campaign's trial, run short, in a process of its own that can fork."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_trial(name: str, scratch: Path, *arguments: str, status: int = 0) -> dict[str, Any]:
    """The line that `tests/campaign/<name>.py` prints. Raises if it hangs or does not end with `status`: 1 if it has
    found something wrong."""
    command = [sys.executable, "-m", f"tests.campaign.{name}", *arguments, "--dir", str(scratch)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == status and done.stdout, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result
