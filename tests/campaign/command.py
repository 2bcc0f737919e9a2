"""The command line that the trials with a scratch folder have: options, one line of JSON, and an exit status."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path


def command(
    doc: str | None, run: Callable[..., dict[str, object]], *,
    counted: str = "rounds", count: int = 20, seeded: bool = True, flags: Mapping[str, str] | None = None, **texts: str,
) -> None:  # fmt: skip
    """Calls run(scratch folder, count, seed, **texts), prints the totals that it returns, and exits with 1 if anything
    was "wrong" or "left". texts: further options, with their defaults. flags: options without a value, each with the
    name of its argument, which is True or False."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(f"--{counted}", type=int, default=count, help=f"({count})")
    if seeded:
        parser.add_argument("--seed", type=int, default=1)
    for name, text in texts.items():
        parser.add_argument(f"--{name}", default=text, help=f"({text})")
    for option, name in (flags or {}).items():
        parser.add_argument(f"--{option}", dest=name, action="store_true")
    parser.add_argument("--dir", type=Path, help="where the scratch folder is made (default: a temporary one)")
    given = vars(parser.parse_args())
    above = given.pop("dir")
    if above is not None:
        above.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=above, prefix="trial.") as scratch:
        result = run(Path(scratch).resolve(), given.pop(counted), **given)
    print(json.dumps(result))
    sys.exit(1 if result["wrong"] or result.get("left") else 0)
