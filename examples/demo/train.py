"""A training script as a user of stepwell would write it.

Started again with the same arguments after it was killed, it goes on from the newest checkpoint. What it did goes to
--log, one JSON object a line: each step's loss, each save, the restore, and at the end a digest of every tensor.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

# the number of threads is part of a result's last bits: no library may change it; and waiting threads should not spin
os.environ.update(OMP_DYNAMIC="FALSE", MKL_DYNAMIC="FALSE", OMP_WAIT_POLICY="PASSIVE")

import torch  # noqa: E402  (reads the variables above when it is imported)
from torch.nn import functional  # noqa: E402

import stepwell  # noqa: E402
from examples.demo.model import ByteTransformer, TextLoader, read_text  # noqa: E402

LENGTH, BATCH, SEED = 64, 4, 1234


def make_deterministic(threads: int) -> None:
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(threads)
    torch.manual_seed(SEED)


def digests(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """sha256 of the bytes of every tensor of the model and of the optimizer's state."""
    tensors: dict[str, torch.Tensor] = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    for number, values in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer/{number}/{name}": value for name, value in values.items()}
    return {
        name: hashlib.sha256(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }


def train(args: argparse.Namespace) -> None:
    make_deterministic(args.threads)
    with open(args.log, "a", buffering=1) as log:  # line by line, so that a killed run's lines are there

        def note(**record: Any) -> None:
            log.write(json.dumps(record) + "\n")

        model = ByteTransformer(args.layers, args.width, LENGTH)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
        loader = TextLoader(read_text(), BATCH, LENGTH, SEED)

        def train_step() -> float:
            tokens, targets = loader.next()
            loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
            return loss.item()

        store = stepwell.open(args.run)
        state = {"model": model, "optimizer": optimizer, "sched": schedule, "loader": loader, "rng": stepwell.RNG()}
        began = time.perf_counter()
        checkpoint = store.restore(state)
        if checkpoint:
            note(kind="restore", step=checkpoint.step, seconds=time.perf_counter() - began)
            print(f"[{args.name}] restored step {checkpoint.step}", flush=True)
        saves = []
        for step in range(checkpoint.step + 1 if checkpoint else 1, args.steps + 1):
            loss = train_step()
            note(kind="loss", step=step, loss=loss.hex())
            print(f"[{args.name}] step {step:3d} of {args.steps}   loss {loss:.4f}", flush=True)
            if step % args.every == 0:
                began = time.perf_counter()
                note(kind="saving", step=step)
                save = store.save(step, state, metrics={"loss": loss})
                saves.append((step, time.perf_counter() - began, save))
        store.close()
        for step, blocked_s, save in saves:
            note(kind="save", step=step, blocked_s=blocked_s, seconds=max(save.report().tier_seconds.values()))
        note(kind="end", digests=digests(model, optimizer))


def parser() -> argparse.ArgumentParser:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--run", type=Path, required=True, help="folder of the checkpoints")
    parse.add_argument("--log", type=Path, required=True, help="what happened, JSON lines, appended to")
    parse.add_argument("--name", default="train", help="shown before each line")
    parse.add_argument("--steps", type=int, default=60, help="train so many steps (default: 60)")
    parse.add_argument("--every", type=int, default=10, help="save after so many steps (default: 10)")
    parse.add_argument("--layers", type=int, default=6)
    parse.add_argument("--width", type=int, default=384, help="a multiple of 64 (default: 384)")
    parse.add_argument("--threads", type=int, default=2, help="threads of torch; part of the result's last bits")
    return parse


if __name__ == "__main__":
    train(parser().parse_args())
