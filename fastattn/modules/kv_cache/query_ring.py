"""The newest queries of every row, as attention took them, for policies that look at queries."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastattn.modules.policies import QueryWindow


@dataclass
class QueryRing:
    """Which query each place of the ring holds; the same for all layers, and stored once.

    The queries themselves are a buffer per layer, ``[B, H, N + 1, D]``: its last place takes what is not kept (padding,
    all but the newest of a long prompt).

    Attributes:
        index: int64 ``[B, N]``, the query's count in its row, -1 where the place is empty.
        positions: int32 ``[B, N]``, its position, -1 where the place is empty.
    """

    index: Tensor
    positions: Tensor

    @property
    def size(self) -> int:
        """Queries that the ring holds, ``N``; 0 where the policy looks at none."""
        return self.index.shape[1]

    def places(self, tokens_seen: Tensor, position: Tensor, all_real: bool = False) -> tuple[Tensor, Tensor]:
        """Where each new query goes, and its count in the row.

        Args:
            tokens_seen: ``[B]``, before the call.
            position: ``[B, T]``, -1 at padding.
            all_real: it is known that there is no padding.

        Returns:
            ``place`` and ``index``, int64 ``[B, T]``.
        """
        if all_real and position.shape[1] == 1:
            index = tokens_seen[:, None]
            return index % self.size, index
        real = position >= 0
        index = tokens_seen[:, None] + real.cumsum(1) - 1
        newest = index >= tokens_seen[:, None] + real.sum(1, keepdim=True) - self.size
        return torch.where(real & newest, index % self.size, self.size), index

    def after_call(self, place: Tensor, index: Tensor, position: Tensor) -> QueryRing:
        """The ring with new queries ``index``, ``position [B, T]`` at ``place [B, T]``, as new tensors."""
        return QueryRing(_written(self.index, place, index), _written(self.positions, place, position))

    def copy_(self, other: QueryRing) -> None:
        """Become ``other``, in place."""
        self.index.copy_(other.index)
        self.positions.copy_(other.positions)

    def forget_from_(self, tokens_seen: Tensor) -> None:
        """Empty the places of queries that are no longer part of the row, in place."""
        stale = self.index >= tokens_seen[:, None]
        self.index.masked_fill_(stale, -1)
        self.positions.masked_fill_(stale, -1)

    def newest(self, queries: Tensor, count: int) -> QueryWindow:
        """The newest ``count`` of ``queries`` in time order, right-aligned; missing ones have position -1."""
        order = self.index.argsort(dim=1)[:, -count:]
        gather = order[:, None, :, None].expand(-1, queries.shape[1], -1, queries.shape[3])
        return QueryWindow(queries.gather(2, gather), self.positions.gather(1, order))


def write_queries_(queries: Tensor, place: Tensor, query: Tensor) -> None:
    """``query [B, H, T, D]`` into a layer's ``queries`` at ``place [B, T]``, in place."""
    queries.scatter_(2, place[:, None, :, None].expand_as(query), query)


def _written(stored: Tensor, place: Tensor, new: Tensor) -> Tensor:
    """``stored [B, N]`` with ``new [B, T]`` at ``place``, as a new tensor."""
    padded = nn.functional.pad(stored, (0, 1), value=-1)
    return padded.scatter(1, place, new.to(stored.dtype))[:, : stored.shape[1]]
