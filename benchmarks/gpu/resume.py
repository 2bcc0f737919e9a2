"""Is a training that was killed and resumed the same, bit by bit, as one that was not?

Three processes train the same small model with deterministic algorithms, dropout and a schedule: one without a break;
one that saves lazily and is killed by kill -9, with saves under way; one that goes on from what is on the disk. Losses
of all steps and the state at the end must be equal.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import stepwell
from benchmarks.gpu.bench import MIB, TINY, Bench, Record
from benchmarks.gpu.device import Device
from benchmarks.gpu.model import Shape, Training
from stepwell.saving import Save

ROOT = Path(__file__).resolve().parents[2]
SHAPE = Shape(layers=4, width=256, heads=4, vocabulary=1024, sequence=128, dropout=0.1)
EVERY = 2  # steps between two saves
KILLED_AT = 0.69  # of the steps
TIMEOUT_S = 150

_CONFIG = """
[[tier]]
name = "host"
driver = "host"
capacity = {capacity}

[[tier]]
name = "nvme"
driver = "file"
path = "{path}"
"""


def run(bench: Bench) -> list[Record]:
    """One record: how many steps and bytes differ."""
    steps = bench.scale.resume_steps
    with bench.scratch() as folder:
        whole = _start(bench, folder, "whole", steps)  # beside the others
        try:
            _end(_start(bench, folder, "killed", steps), -signal.SIGKILL)
            _end(_start(bench, folder, "resumed", steps), 0)
            _end(whole, 0)
        finally:
            whole.kill()
            whole.wait()
        told = {role: json.loads((folder / f"{role}.json").read_text()) for role in ("whole", "resumed")}
    begin = told["resumed"]["from"]
    pairs = zip(told["whole"]["losses"][begin:], told["resumed"]["losses"], strict=True)
    wrong = sum(one != other for one, other in pairs)
    wrong += told["whole"]["digest"] != told["resumed"]["digest"]
    details = {"steps": steps, "killed_at": int(steps * KILLED_AT), "resumed_from": begin}
    bench.record("resumed training: losses and states that differ", wrong, "", ("<=", 0), **details)
    return bench.records


def _start(bench: Bench, folder: Path, role: str, steps: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.gpu.resume", role, str(folder), str(steps), str(bench.device.torch)]
    if bench.scale is TINY:
        command.append("--small")
    environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # what torch's deterministic algorithms need
    return subprocess.Popen(command, cwd=ROOT, env=environment)


def _end(process: subprocess.Popen[bytes], expected: int) -> None:
    try:
        code = process.wait(TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
    if code != expected:
        raise RuntimeError(f"{process.args!r} ended with {code}, not {expected}")


class Run:
    """One of the three processes."""

    def __init__(self, device: Device, shape: Shape, folder: Path) -> None:
        self.training, self.folder = Training(device, shape, batch=4), folder
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.training.optimizer, 1000)
        self.losses: list[str] = []

    @property
    def state(self) -> dict[str, Any]:
        return {**self.training.state, "schedule": self.schedule, "rng": stepwell.RNG()}

    def step(self) -> None:
        self.losses.append(float(self.training.forward_backward()).hex())
        self.training.update()
        self.schedule.step()

    def store(self) -> stepwell.CheckpointStore:
        config = self.folder / "config.toml"
        config.write_text(_CONFIG.format(capacity=3 * self.training.state_bytes() + 512 * MIB, path=self.folder))
        return stepwell.open(config, run="resume")

    def until_killed(self, last: int) -> None:
        """Trains about up to that step with saves, and dies while the last one is under way."""
        store = self.store()
        store.guard(self.training.optimizer)
        before: Save | None = None
        while self.training.step + EVERY <= last:
            for _ in range(EVERY):
                self.step()
            if self.training.step + EVERY > last and before is not None:
                before.wait("nvme")
            before = store.save(self.training.step, self.state)
        os.kill(os.getpid(), signal.SIGKILL)

    def go_on(self) -> None:
        """Takes up what the killed one has left."""
        with self.store() as store:
            found = store.restore(self.state)
        if found is None:
            raise RuntimeError("there is nothing to resume from")
        self.training.step = found.step

    def tell(self, role: str, begin: int) -> None:
        digest = hashlib.sha256()
        for tensor in self.training.tensors():
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        told = {"from": begin, "losses": self.losses, "digest": digest.hexdigest()}
        (self.folder / f"{role}.json").write_text(json.dumps(told))


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.gpu.resume", description="One process of the measurement.")
    parser.add_argument("role", choices=["whole", "killed", "resumed"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("device")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    run = Run(Device(args.device), TINY.shape if args.small else SHAPE, args.folder)
    if args.role == "killed":
        run.until_killed(int(args.steps * KILLED_AT))
    if args.role == "resumed":
        run.go_on()
    begin = run.training.step
    while run.training.step < args.steps:
        run.step()
    run.tell(args.role, begin)


if __name__ == "__main__":
    main()
