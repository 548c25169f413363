"""A compressed cache as Python lists: what CompressedKVCache must be equal to, token by token.

One object models one layer of the whole batch. Every row is independent and every token an entry; nothing is masked,
padded or moved. Scores come from :mod:`tests._helpers.exact_policies`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Entry:
    """One cached token of one head."""

    position: int
    key: Tensor
    value: Tensor
    mass: float = 0.0  # what a policy keeps per slot
    queries: int = 0


@dataclass
class Row:
    heads: list[list[Entry]]
    seen: int = 0
    next_position: int = 0
    fresh: int = 0  # tokens appended since the row's last compression
    queries: list[tuple[int, Tensor]] = field(default_factory=list)  # position, [H, D] before rotation
    columns: list[bool] = field(default_factory=list)  # for each column since the last compression: a real token?


# Scores of one row and head: (entries, the head, next position, queries that count, all heads' entries) -> [T]
Score = Callable[[list[Entry], int, int, list[tuple[int, Tensor]], list[list[Entry]]], Tensor]
# What a call's queries add to what the entries of a head keep: (entries, the head, queries)
Observe = Callable[[list[Entry], int, list[tuple[int, Tensor]]], None]


class ListCache:
    """See the module's docstring. ``score`` gets a head's entries, the head, the next position and the queries."""

    def __init__(
        self,
        score: Score,
        keep: Callable[[Tensor, int], Tensor],
        *,
        rows: int,
        heads: int,
        budget: int,
        interval: int,
        max_step: int,
        window: int,
        observe: Observe | None = None,
        whole_window: bool = False,
    ) -> None:
        self.score, self.keep, self.observe, self.whole_window = score, keep, observe, whole_window
        self.budget, self.interval, self.max_step, self.window = budget, interval, max_step, window
        self.heads = heads
        self.rows = [Row([[] for _ in range(heads)]) for _ in range(rows)]
        self.columns = 0

    def begin(self, position: Tensor) -> None:
        """What a call does first, given its ``position [B, T]``: a step compresses what is full as it is then."""
        self.compressed = [False] * len(self.rows)
        if position.shape[1] > self.max_step:
            return
        for b, row in enumerate(self.rows):
            if (position[b] >= 0).any():
                newest = row.queries[-self.window :] if self.window else []
                self._compress(b, row, self.budget + self.interval, row.next_position, newest)

    def feed(self, key: Tensor, value: Tensor, raw_query: Tensor, position: Tensor) -> None:
        """The rest of a call: ``[B, heads, T, D]`` each, and ``position [B, T]`` (-1 at padding)."""
        tokens = key.shape[2]
        self.columns += tokens
        step = tokens <= self.max_step
        before = self.compressed
        for b, row in enumerate(self.rows):
            real = [t for t in range(tokens) if position[b, t] >= 0]
            row.columns = ([] if any(before) else row.columns) + [bool(position[b, t] >= 0) for t in range(tokens)]
            row.fresh = (0 if before[b] else row.fresh) + len(real)
            if not real:
                continue
            fed = [(int(position[b, t]), raw_query[b, :, t]) for t in real]
            row.queries = (row.queries + fed)[-(self.window + self.max_step) :] if self.window else []
            row.seen += len(real)
            row.next_position = int(position[b, real[-1]]) + 1
            for h, entries in enumerate(row.heads):
                entries += [Entry(int(position[b, t]), key[b, h, t], value[b, h, t]) for t in real]
                if self.observe is not None:
                    self.observe(entries, h, fed)
            if not step:
                queries = row.queries[-self.window :] if self.whole_window else fed
                self._compress(b, row, self.budget + 1, row.next_position, queries)
        if not step and any(self.compressed):
            for row, compressed in zip(self.rows, self.compressed, strict=True):
                row.columns, row.fresh = [], 0 if compressed else row.fresh

    def _compress(self, b: int, row: Row, limit: int, next_position: int, queries: list[tuple[int, Tensor]]) -> None:
        heads = list(row.heads)  # a policy may look at those of all heads, as they were before any was compressed
        for h, entries in enumerate(heads):
            if len(entries) >= limit:
                scores = self.score(entries, h, next_position, queries, heads)
                row.heads[h] = [entries[int(i)] for i in self.keep(scores, self.budget)]
                self.compressed[b] = True

    def attend(self, query: Tensor, key: Tensor, value: Tensor, position: Tensor, scale: float) -> Tensor:
        """What the call's queries (rotated) see: everything cached before the call, and the call's own past."""
        batch, heads, tokens, _ = query.shape
        out = torch.zeros(batch, heads, tokens, value.shape[3], dtype=torch.float64)
        group = heads // self.heads
        for b, row in enumerate(self.rows):
            for h in range(heads):
                entries = row.heads[h // group]
                for t in range(tokens):
                    own = [s for s in range(t + 1) if position[b, s] >= 0]
                    keys = [e.key for e in entries] + [key[b, h // group, s] for s in own]
                    if position[b, t] < 0 or not keys:
                        continue
                    values = [e.value for e in entries] + [value[b, h // group, s] for s in own]
                    weights = torch.softmax(scale * torch.stack(keys) @ query[b, h, t], dim=0)
                    out[b, h, t] = weights @ torch.stack(values)
        return out

    def croppable(self) -> int:
        """Newest columns that are real in every row, back to the last compression of any."""
        count = 0
        while all(len(row.columns) > count and row.columns[-1 - count] for row in self.rows):
            count += 1
        return count

    def crop(self, tokens: list[int]) -> None:
        self.columns -= min(tokens)
        even = min(tokens) == max(tokens)
        for row, count in zip(self.rows, tokens, strict=True):
            row.seen -= count
            row.fresh -= count
            row.columns = row.columns[: max(0, len(row.columns) - count)] if even else []
            if not count:
                continue
            row.queries = row.queries[:-count]
            row.heads = [entries[:-count] for entries in row.heads]
            # What follows goes on after the newest token left. A row that lost all of them starts anew.
            row.next_position = max((e.position + 1 for entries in row.heads for e in entries), default=0)

    def reorder(self, index: list[int]) -> None:
        columns = [row.columns for row in self.rows]
        self.rows = [copy.deepcopy(self.rows[i]) for i in index]
        # What may be cropped is the batch's, not the row's: it was counted over the rows as they were.
        for row, own in zip(self.rows, columns, strict=True):
            row.columns = own

    def reset_rows(self, rows: list[int]) -> None:
        for b in rows:
            self.rows[b] = Row([[] for _ in range(self.heads)])
        self._forget_columns()

    def insert(self, rows: list[int], source: ListCache, source_rows: list[int]) -> None:
        for to, b in zip(rows, source_rows, strict=True):
            self.rows[to] = copy.deepcopy(source.rows[b])
        self.columns = max(self.columns, source.columns)
        self._forget_columns()

    def _forget_columns(self) -> None:
        """Rows of different ages have no newest columns in common."""
        for row in self.rows:
            row.columns = []

    def reset(self) -> None:
        self.columns = 0
        self.rows = [Row([[] for _ in range(self.heads)]) for _ in self.rows]
