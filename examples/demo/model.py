"""A small transformer that predicts the next byte of a text, and the text.

The text is the English that every Python carries with it, the language reference's topics that `help()` shows.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

LENGTH = 64  # bytes of text in one sample


def read_text() -> Tensor:
    """About half a megabyte of English, as bytes."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


class TextLoader:
    """Batches of random windows of a text. What it has drawn so far is in `state_dict`, so a resumed run goes on with
    the batch that the killed run would have seen next."""

    def __init__(self, text: Tensor, batch: int, length: int, seed: int) -> None:
        self.text, self.batch, self.length = text, batch, length
        self.drawn = 0
        self.generator = torch.Generator().manual_seed(seed)

    def next(self) -> tuple[Tensor, Tensor]:
        """(input, target), both of shape (batch, length); the target is the input shifted by one."""
        starts = torch.randint(len(self.text) - self.length - 1, (self.batch,), generator=self.generator)
        windows = torch.stack([self.text[start : start + self.length + 1] for start in starts.tolist()]).long()
        self.drawn += 1
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]
        self.generator.set_state(state["generator"])


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        hidden = functional.gelu(self.up(self.norm2(x)))
        return x + functional.dropout(cast(Tensor, self.down(hidden)), self.dropout, self.training)


class ByteTransformer(nn.Module):
    """Decoder-only, with the output head tied to the embedding, and dropout so that random numbers matter."""

    def __init__(self, layers: int, width: int, length: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, max(1, width // 64), dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.norm(x)))
