"""The peers' harness with stepwell in it; the same command line as the harness's own run.py.

    python benchmarks/peers/run.py measure --dir SCRATCH --out runs.jsonl --peers stepwell safetensors
    python benchmarks/peers/run.py report runs.jsonl

The harness starts its workers through this file, too.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.peers import harness  # noqa: E402  (found through the path above: workers run in this folder)

if __name__ == "__main__":
    harness().main()
