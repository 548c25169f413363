"""The key-query product on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor


def qk_scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """See :func:`fastattn.ops.qk_scores`."""
    batch, heads, queries, dim = query.shape
    kv_heads, keys = key.shape[1:3]
    scores = query.new_empty(batch, heads, queries, keys)
    if scores.numel() == 0:
        return scores
    if scale == 0.0:  # PyTorch multiplies what the result's memory held by beta = 0 then, NaN included
        return scores.zero_()
    # The query heads of a group are more rows of one product with their key head.
    folded = query.reshape(batch * kv_heads, heads // kv_heads * queries, dim)
    rows = scores.view(batch * kv_heads, -1, keys)
    torch.baddbmm(rows, folded, key.reshape(batch * kv_heads, keys, dim).mT, beta=0, alpha=scale, out=rows)
    return scores
