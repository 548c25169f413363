"""The query window: a ring of the newest queries of every row, as attention took them.

Per layer the ring is ``[B, H, ring + 1, D]``; the last slot takes what is not kept (padding, all but the newest of a
long prompt). Which query a slot holds is the same for all layers and stored once: its count in the row (``index``,
-1 where empty) and its position. The ring is ``max_step`` longer than the window, so that a decode step that fails has
overwritten nothing of the window.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastattn.modules.policies import QueryWindow


def ring_slots(tokens_seen: Tensor, position: Tensor, ring: int) -> tuple[Tensor, Tensor]:
    """Where each new query goes, and its count in the row.

    Args:
        tokens_seen: ``[B]``, before the call.
        position: ``[B, T]``, -1 at padding.
        ring: slots, without the spare one.

    Returns:
        ``slot`` and ``index``, int64 ``[B, T]``.
    """
    real = position >= 0
    index = tokens_seen[:, None] + real.cumsum(1) - 1
    newest = index >= tokens_seen[:, None] + real.sum(1, keepdim=True) - ring
    return torch.where(real & newest, index % ring, ring), index


def after_call(stored: Tensor, slot: Tensor, new: Tensor) -> Tensor:
    """``stored [B, ring]`` with ``new [B, T]`` at ``slot``, as a new tensor."""
    padded = nn.functional.pad(stored, (0, 1), value=-1)
    return padded.scatter(1, slot, new.to(stored.dtype))[:, : stored.shape[1]]


def write_queries_(queries: Tensor, slot: Tensor, query: Tensor) -> None:
    """``query [B, H, T, D]`` into the ring ``queries`` at ``slot [B, T]``, in place."""
    queries.scatter_(2, slot[:, None, :, None].expand_as(query), query)


def newest(queries: Tensor, index: Tensor, positions: Tensor, window: int) -> QueryWindow:
    """The newest ``window`` queries in time order, right-aligned; missing ones have position -1."""
    order = index.argsort(dim=1)[:, -window:]
    gather = order[:, None, :, None].expand(-1, queries.shape[1], -1, queries.shape[3])
    return QueryWindow(queries.gather(2, gather), positions.gather(1, order))


def forget_from_(index: Tensor, positions: Tensor, tokens_seen: Tensor) -> None:
    """Empty the slots of queries that are no longer part of the row, in place."""
    stale = index >= tokens_seen[:, None]
    index.masked_fill_(stale, -1)
    positions.masked_fill_(stale, -1)
