"""Attention mass on a CPU: row by row on the valid slots, query block by query block."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.ops import _formats
from fastattn.ops._lengths import checked
from fastattn.ops._outputs import accumulator_dtype
from fastattn.ops.cpu._pieces import is_transformed, of, pieces

# A block of queries has about this many logits (8 MiB in float32) at a time.
_LOGITS = 1 << 21


def attention_mass(
    key: Tensor,
    lengths: Tensor,
    positions: Tensor,
    query: Tensor,
    query_positions: Tensor,
    scale: float,
    min_length: int,
    key_scale: Tensor | None = None,
) -> Tensor:
    out = query.new_zeros(key.shape[:3], dtype=accumulator_dtype(query.dtype))
    group = query.shape[1] // max(1, key.shape[1])
    for b, row in enumerate(checked("lengths", lengths, key.shape[2])):
        real = (query_positions[b] >= 0).nonzero().flatten()
        if max(row, default=0) < max(1, min_length) or real.numel() == 0:
            continue
        own = query_positions[b].index_select(0, real)
        for h, count in enumerate(row):
            if count == 0:
                continue
            queries = query[b, h * group : (h + 1) * group].index_select(1, real).to(out.dtype)
            _add_head_(
                out[b, h, :count],
                key[b, h, :count] if key_scale is not None else key[b, h, :count].to(out.dtype),
                of(key_scale, b, h, count),
                positions[b, h, :count],
                queries,
                own,
                scale,
            )
    return out


def _add_head_(
    mass: Tensor,
    key: Tensor,
    key_scale: Tensor | None,
    positions: Tensor,
    query: Tensor,
    query_positions: Tensor,
    scale: float,
) -> None:
    """Add what ``query [G, N, D]`` pay to ``key [T, D]``, numbers or codes, divided by G, to ``mass [T]``."""
    query = _formats.hadamard(query) if is_transformed(key_scale) else query
    group, queries, _ = query.shape
    # Both rise: each query sees a prefix, the last of a block the longest.
    seen = torch.searchsorted(positions.contiguous(), query_positions.contiguous(), right=True)
    step = max(1, _LOGITS // (group * max(1, key.shape[0])))
    for first in range(0, queries, step):
        visible = seen[first : first + step]
        most, least = int(visible.max()), int(visible.min())
        if most == 0:
            continue
        rows = query[:, first : first + step]
        if key_scale is None:
            logits = scale * (rows @ key[:most].mT)
        else:
            logits = rows.new_empty(group, rows.shape[1], most)
            for part, numbers in pieces(key[:most], key_scale[:most], rows.dtype):
                logits[..., part] = scale * (rows @ numbers.mT)
        if least < most:
            hidden = torch.arange(least, most) >= visible[:, None]
            logits[:, :, least:].masked_fill_(hidden, float("-inf"))
        weights = logits.softmax(-1)
        if least == 0:  # a query that sees nothing pays nothing
            weights = weights.masked_fill(visible[:, None] == 0, 0.0)
        mass[:most] += weights.sum((0, 1)) / group
