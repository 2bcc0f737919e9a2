"""A real transformer in a real training loop: fp32 weights, bf16 autocast, fused AdamW, synthetic tokens.

A decoder with pre-norm blocks, causal attention (SDPA) and GELU; the large shape has 1.34 B parameters, and with
AdamW's two moments a state of 16.1 GB in about 1,170 tensors. The tokens of a step depend on the step alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.gpu.device import Device

MICRO_BATCH = 8  # sequences at once; more of them are accumulated, so that memory does not depend on the batch
BATCH_MAX = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a model, and the length of its sequences."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    sequence: int
    dropout: float = 0.0  # of the embedded tokens


class Block(nn.Module):
    """Attention, then a GELU MLP of four times the width."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.qkv, self.out = nn.Linear(shape.width, 3 * shape.width), nn.Linear(shape.width, shape.width)
        self.up, self.down = nn.Linear(shape.width, 4 * shape.width), nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        changed: Tensor = x + self.down(functional.gelu(self.up(self.norm_mlp(x))))
        return changed


class Decoder(nn.Module):
    """Tokens to logits; embedding and head are not tied."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.sequence, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device)))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Training:
    """A model, its optimizer, and one iteration after the other."""

    def __init__(self, device: Device, shape: Shape, batch: int = MICRO_BATCH, seed: int = 0) -> None:
        self.device, self.shape, self.batch = device, shape, batch
        torch.manual_seed(seed)
        with device.torch:
            self.model = Decoder(shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.step = 0

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def tensors(self) -> Iterator[Tensor]:
        """All tensors of the state."""
        yield from self.model.state_dict().values()
        for entry in self.optimizer.state.values():
            yield from (value for value in entry.values() if isinstance(value, Tensor))

    def state_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def forward_backward(self) -> Tensor:
        """The mean loss of the next step's batch; gradients are there afterwards."""
        self.step += 1
        generator = torch.Generator(self.device.torch).manual_seed(self.step)
        size = (self.batch, self.shape.sequence + 1)
        tokens = torch.randint(self.shape.vocabulary, size, generator=generator, device=self.device.torch)
        losses = []
        for part in torch.split(tokens, MICRO_BATCH):
            with torch.autocast(self.device.torch.type, torch.bfloat16):
                logits = self.model(part[:, :-1])
                loss = functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()) * (len(part) / self.batch)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def calibrate(self, *seconds: float) -> list[int]:
        """The batches with which an iteration takes about so long, from the times of two batches. Trains a little."""
        batch = self.batch
        low, high = (self._iteration_s(size) for size in (4, 2 * MICRO_BATCH))
        self.batch = batch
        slope = max((high - low) / (2 * MICRO_BATCH - 4), 1e-6)
        return [max(1, min(BATCH_MAX, round(4 + (wanted - low) / slope))) for wanted in seconds]

    def _iteration_s(self, batch: int) -> float:
        self.batch = batch
        moments = []
        for _ in range(4):
            self.forward_backward()
            self.update()
            moments.append(self.device.moment())
        return moments[-1].since(moments[0]) / 3
