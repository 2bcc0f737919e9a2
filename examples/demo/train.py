"""A training script as a user of stepwell would write it.

Started again with the same arguments after it was killed, it goes on from the newest checkpoint. What it did goes to
--log, one JSON object a line: each step's loss, how far each save and each tier is, the restore, and at the end a
digest of every tensor.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from pathlib import Path
from typing import Any

# the number of threads is part of a result's last bits: no library may change it; and waiting threads should not spin
os.environ.update(OMP_DYNAMIC="FALSE", MKL_DYNAMIC="FALSE", OMP_WAIT_POLICY="PASSIVE")

import torch  # noqa: E402  (reads the variables above when it is imported)
from torch.nn import functional  # noqa: E402

import stepwell  # noqa: E402
from examples.demo.diary import Diary  # noqa: E402
from examples.demo.model import LENGTH, ByteTransformer, TextLoader, read_text  # noqa: E402

BATCH, SEED = 4, 1234


def make_deterministic(threads: int) -> None:
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(threads)
    torch.manual_seed(SEED)


class Trainee:
    """Model, optimizer, schedule and data, and one step with them."""

    def __init__(self, layers: int, width: int, steps: int) -> None:
        self.model = ByteTransformer(layers, width, LENGTH)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, weight_decay=0.01)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, steps)
        self.loader = TextLoader(read_text(), BATCH, LENGTH, SEED)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "sched": self.schedule,
            "loader": self.loader,
            "rng": stepwell.RNG(),
        }

    def step(self) -> float:
        """The loss before the step."""
        tokens, targets = self.loader.next()
        loss = functional.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.schedule.step()
        return loss.item()

    def digests(self) -> dict[str, str]:
        """sha256 of the bytes of every tensor of the model and of the optimizer's state."""
        tensors: dict[str, torch.Tensor] = {f"model/{name}": value for name, value in self.model.state_dict().items()}
        for number, values in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer/{number}/{name}": value for name, value in values.items()}
        return {name: digest(tensor) for name, tensor in tensors.items()}


def digest(tensor: torch.Tensor) -> str:
    """sha256 of a tensor's bytes."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data.tobytes()).hexdigest()


def train(args: argparse.Namespace) -> None:
    make_deterministic(args.threads)
    trainee = Trainee(args.layers, args.width, args.steps)
    with stepwell.open(args.config, run=args.run) as store, Diary(args.log, store) as diary:
        began = time.perf_counter()
        checkpoint = store.restore(trainee.state)
        if checkpoint:
            seconds = time.perf_counter() - began
            diary.note(kind="restore", step=checkpoint.step, seconds=seconds, sources=checkpoint.sources)
            print(f"[{args.run}] restored step {checkpoint.step}", flush=True)
        for step in range(checkpoint.step + 1 if checkpoint else 1, args.until + 1):
            loss = trainee.step()
            diary.note(kind="loss", step=step, loss=loss.hex())
            print(f"[{args.run}] step {step:3d} of {args.steps}   loss {loss:.4f}", flush=True)
            if step % args.every == 0:
                diary.follow(store.save(step, trainee.state, metrics={"loss": loss}))
        diary.wait_until_all_is_flushed()
        diary.note(kind="end", digests=trainee.digests())


def parser() -> argparse.ArgumentParser:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--config", type=Path, required=True, help="the tiers, a TOML file")
    parse.add_argument("--run", required=True, help="name of the run")
    parse.add_argument("--log", type=Path, required=True, help="what happened, JSON lines, appended to")
    parse.add_argument("--steps", type=int, default=36, help="the whole training has so many steps (default: 36)")
    parse.add_argument("--until", type=int, help="this process only trains to that step (default: --steps)")
    parse.add_argument("--every", type=int, default=6, help="save after so many steps (default: 6)")
    parse.add_argument("--layers", type=int, default=6)
    parse.add_argument("--width", type=int, default=384, help="a multiple of 64 (default: 384)")
    parse.add_argument("--threads", type=int, default=2, help="threads of torch; part of the result's last bits")
    return parse


def main() -> None:
    args = parser().parse_args()
    args.until = args.until or args.steps
    train(args)


if __name__ == "__main__":
    main()
