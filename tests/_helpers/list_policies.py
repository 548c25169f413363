"""One row of a cache as Python lists, for policies that look at what was attended to: a float64 model."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests._helpers import exact_policies as exact


@dataclass
class Token:
    position: int
    key: Tensor
    mass: float = 0.0
    queries: int = 0


@dataclass
class ListRow:
    """``name`` is a policy's, its options are attributes. Feed it calls, and compare ``kept()`` with the cache's."""

    name: str
    kv_heads: int
    budget: int
    interval: int
    scale: float
    window: int = 4
    kernel: int = 3
    n_recent: int | None = None
    seed: int = 0
    layer: int = 0
    n_sink: int = 0  # of Protect
    max_step: int = 1
    heads: list[list[Token]] = field(default_factory=list)
    queries: list[tuple[int, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.heads = [[] for _ in range(self.kv_heads)]

    def kept(self) -> list[list[int]]:
        return [[token.position for token in head] for head in self.heads]

    def feed(self, query: Tensor, key: Tensor, positions: list[int]) -> None:
        """A call of real tokens: rotated ``query [H, T, D]``, ``key [Hkv, T, D]``."""
        if not positions:
            return
        step = query.shape[1] <= self.max_step
        if step:  # compresses what is full before it appends, by what was known then
            self._compress(self.budget + self.interval)
        self.queries += [(p, query[:, t].double()) for t, p in enumerate(positions)]
        new = self.queries[-len(positions) :]
        for h, head in enumerate(self.heads):
            head += [Token(p, key[h, t].double()) for t, p in enumerate(positions)]
            if self.name == "h2o":
                mass, count = exact.h2o(*self._tokens(h), *self._queries(new, h), self.scale)
                for token, more, since in zip(head, mass.tolist(), count.tolist(), strict=True):
                    token.mass += more
                    token.queries += since
        if not step:
            self._compress(self.budget + 1)

    def _compress(self, limit: int) -> None:
        if not any(self.heads):
            return
        newest = max(head[-1].position for head in self.heads)
        scores = [self.scores(h, newest + 1) for h in range(self.kv_heads)]
        for h, head in enumerate(self.heads):
            if len(head) >= limit:
                self.heads[h] = [head[i] for i in exact.keep(scores[h], self.budget)]

    def scores(self, h: int, next_position: int) -> Tensor:
        keys, positions = self._tokens(h)
        n_recent = 0
        if self.name == "snap_kv":
            newest = self._queries(self.queries[-self.window :], h)
            score = exact.snap_kv(keys, positions, *newest, kernel=self.kernel, scale=self.scale)
        elif self.name == "tova":
            all_keys = torch.stack([self._tokens(g)[0] for g in range(self.kv_heads)])
            score = exact.tova(all_keys, positions, self.queries[-1][1], scale=self.scale)
        elif self.name == "h2o":
            score = torch.tensor([token.mass / token.queries for token in self.heads[h]], dtype=torch.float64)
            n_recent = self.budget // 2 if self.n_recent is None else self.n_recent
        else:
            score = exact.random(positions, h, self.layer, self.seed)
        return exact.protect(score, positions, self.n_sink, n_recent, next_position)

    def _tokens(self, h: int) -> tuple[Tensor, Tensor]:
        head = self.heads[h]
        return torch.stack([token.key for token in head]), torch.tensor([token.position for token in head])

    def _queries(self, queries: list[tuple[int, Tensor]], h: int) -> tuple[Tensor, Tensor]:
        """Of the head's group."""
        group = queries[0][1].shape[0] // self.kv_heads
        vectors = torch.stack([q[h * group : (h + 1) * group] for _, q in queries], dim=1)
        return vectors, torch.tensor([p for p, _ in queries])
