"""Counting what torch.compile does: graphs, breaks and recompilations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastattn import CompressedKVCache


@dataclass
class Counts:
    """What happened inside :func:`counting`, filled in when it ends (or by ``read``)."""

    graphs: int = 0
    breaks: int = 0

    def read(self) -> Counts:
        from torch._dynamo.utils import counters

        self.graphs = counters["stats"]["unique_graphs"]
        self.breaks = sum(counters["graph_break"].values())
        return self


@contextlib.contextmanager
def counting() -> Iterator[Counts]:
    """A fresh compiler inside; nothing of it stays behind."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    counts = Counts()
    try:
        yield counts
    finally:
        counts.read()
        torch._dynamo.reset()
        counters.clear()


@contextlib.contextmanager
def no_recompiles() -> Iterator[None]:
    """Compiling anything again inside raises."""
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


class TinyModel(nn.Module):
    """A plain two-layer language model over a cache: no framework, no rotary library, 3 lines per layer."""

    def __init__(self, layers: int = 2, heads: int = 4, kv_heads: int = 2, dim: int = 16, vocab: int = 64) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        width = heads * dim
        self.embed = nn.Embedding(vocab, width)
        self.project = nn.ModuleList(nn.Linear(width, (heads + 2 * kv_heads) * dim) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, vocab)
        inv_freq = 100.0 ** -(torch.arange(dim // 2) / (dim // 2))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(
        self, tokens: Tensor, position_ids: Tensor, cache: CompressedKVCache, mask: Tensor | None = None
    ) -> Tensor:
        """Logits ``[B, T, vocab]``."""
        x = self.embed(tokens)
        batch, count, _ = x.shape
        angle = position_ids[:, None, :, None] * self.inv_freq
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for layer, (project, out) in enumerate(zip(self.project, self.out, strict=True)):
            heads = project(x).view(batch, count, -1, self.dim).transpose(1, 2)
            query, key, value = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
            attended = cache.attend(
                layer,
                _rotate(query, cos, sin),
                _rotate(key, cos, sin),
                value,
                position_ids=position_ids,
                attention_mask=mask,
            )
            x = x + out(attended.transpose(1, 2).reshape(batch, count, -1))
        return self.head(x)

    def make_cache(self, policy: Any, budget: int = 12, batch: int = 1, **options: Any) -> CompressedKVCache:
        """A cache for this model, small enough to evict every few steps."""
        from fastattn import Rotary

        return CompressedKVCache(
            policy,
            budget,
            num_layers=len(self.project),
            num_kv_heads=self.kv_heads,
            head_dim=self.dim,
            num_heads=self.heads,
            batch_size=batch,
            rotary=Rotary(self.inv_freq),
            **{"interval": 4, "dtype": self.head.weight.dtype, **options},
        )


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def greedy(step: Any, model: TinyModel, cache: CompressedKVCache, first: Tensor, start: Tensor, steps: int) -> Tensor:
    """``steps`` tokens ``[B, steps]`` by ``step(tokens, position_ids, cache)``, from ``first [B, 1]``."""
    token, out = first, []
    for i in range(steps):
        token = step(token, start + i, cache)[:, -1:].argmax(-1)
        out.append(token)
    return torch.cat(out, dim=1)
