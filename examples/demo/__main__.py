"""Checkpoints on three tiers, killed twice, resumed, and compared bit for bit.

1. A small transformer is trained on real text. Its checkpoints go through host memory and a folder that stands for
   NVMe to a folder that stands for a parallel file system ("pfs"), which a bandwidth limit keeps behind.
2. The same run, killed with SIGKILL twice: in the middle of a save, and in the middle of a flush to the pfs. Started
   again, it goes on from the newest checkpoint, and with the flush, without writing again what is there. Every loss and
   every tensor at the end must equal the first run's, bit for bit.
3. Restores from memory, and from three tiers at once because of an evicted tail and a damaged block.
4. Saves and a restore in a process that does nothing else; what the disk gives without stepwell.
5. A real pretrained model, loaded cold, prefetched into memory, loaded from there; each time what safetensors reads.
6. The command line, and tables: bytes, blocked time, time to each tier, GB/s, fraction of the disk's ceiling.

Any difference ends it with exit code 1. Files go to a new folder in --dir, which is removed at the end.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

WIDTH = 110  # where there is no terminal
STEPS_MIN = 5  # in saves: one before the kills, two that they hit, one more for each kill that comes too late


def arguments() -> argparse.Namespace:
    parse = argparse.ArgumentParser("python -m examples.demo", description=__doc__)
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parse.add_argument
    add("--steps", type=int, default=36, help="train so many steps (default: 36)")
    add("--every", type=int, default=6, help="save after so many steps (default: 6)")
    add("--dir", type=Path, default=Path("build/demo"), help="on the disk to use; needs 2 GB (default: build/demo)")
    add("--layers", type=int, default=6, help="of the transformer (default: 6)")
    add("--width", type=int, default=384, help="of the transformer (default: 384, checkpoints of 130 MB)")
    add("--threads", type=int, default=2, help="of torch (default: 2)")
    add(
        "--flush-seconds", type=float, default=1.5, help="the limit lets a flush to the pfs take so long (default: 1.5)"
    )
    add("--seed", type=int, help="of the moments of the kills (default: other moments each time)")
    add("--no-pretrained", dest="pretrained", action="store_false", help="leave out the pretrained model")
    add("--keep", action="store_true", help="do not remove the files")
    args = parse.parse_args()
    if args.every < 1 or args.steps < STEPS_MIN * args.every:
        parse.error(f"--steps must be {STEPS_MIN} times --every or more: the kills need so many saves")
    if args.width < 64 or args.width % 64:
        parse.error("--width must be a multiple of 64")
    if not args.flush_seconds > 0:
        parse.error("--flush-seconds must be above 0")
    return args


def main() -> int:
    args = arguments()
    # only now, because torch takes its time and a mistake in the options should show at once
    from rich.console import Console

    from examples.demo.story import tell
    from stepwell.errors import StepwellError

    args.dir.mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix="run-", dir=args.dir)).resolve()
    os.environ["XDG_CACHE_HOME"] = str(home / "cache")  # where shared tiers are remembered: not these
    width = None if sys.stdout.isatty() else WIDTH
    console = Console(width=width, markup=False, highlight=False, soft_wrap=True)
    began = time.monotonic()
    try:
        tell(args, home, console)
        kept = f"; files are in {home}" if args.keep else ""
        console.print(f"{time.monotonic() - began:.0f} s{kept}")
        return 0
    except (RuntimeError, AssertionError, StepwellError) as error:
        console.print(f"FAILED: {error}")
        return 1
    finally:
        if not args.keep:
            shutil.rmtree(home)


if __name__ == "__main__":
    sys.exit(main())
