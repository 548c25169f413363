"""Attention as a user of plain PyTorch would compute it: the yardstick of the error budget."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fastattn.ops import reference
from tests._helpers.budget import plain_dtype


def attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """``scaled_dot_product_attention`` with a mask, and the log-sum-exp of the scores in the same dtype.

    Args:
        query: ``[B, H, Sq, Dqk]``.
        key: ``[B, Hkv, Sk, Dqk]``; what no query sees may be NaN.
        value: ``[B, Hkv, Sk, Dv]``.
        visible: bool, broadcasts to ``[B, H, Sq, Sk]``.

    Returns:
        ``out`` (0 for a query that sees no key) and ``lse``, float32; for float64 inputs both in float32.
    """
    dtype = plain_dtype(query.dtype)
    groups = query.shape[1] // key.shape[1]
    query, key, value = (t.to(dtype) for t in (query, key, value))
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    visible = visible.expand(*query.shape[:3], key.shape[2])
    unseen = ~visible.any(2)[..., None]
    key, value = key.masked_fill(unseen, 0.0), value.masked_fill(unseen, 0.0)
    blind = ~visible.any(3)[..., None]
    if blind.numel() and key.shape[2]:
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=visible | blind, scale=scale)
        out = out.masked_fill(blind, 0.0)
    else:  # nothing to attend to, but differentiable like the rest
        out = query @ key.mT @ value
    scores = (scale * (query @ key.mT)).float().masked_fill(~visible, float("-inf"))
    return out, torch.logsumexp(scores, dim=-1)


def attention_in_three_ways(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float
) -> list[tuple[Tensor, Tensor]]:
    """:func:`attention` head by head, with a group's heads folded into the queries, and as two products.

    Products of other sizes sum in another order, some by luck several times more exactly than others. The worst of
    them is what plain PyTorch errs.
    """
    batch, heads, queries, _ = query.shape
    kv_heads, keys = key.shape[1:3]
    folded = query.reshape(batch, kv_heads, heads // kv_heads * queries, query.shape[3])
    visible = visible.expand(batch, heads, queries, keys)
    out, lse = attention(folded, key, value, visible.reshape(batch, kv_heads, folded.shape[2], keys), scale)
    dtype = plain_dtype(query.dtype)
    return [
        attention(query, key, value, visible, scale),
        (out.view(batch, heads, queries, value.shape[3]), lse.view(batch, heads, queries)),
        reference._masked_attention(query.to(dtype), key.to(dtype), value.to(dtype), visible, scale),
    ]


def visible_in_range(
    queries: int, keys: int, causal: bool, key_start: Tensor | None = None, lengths: Tensor | None = None
) -> Tensor:
    """The mask of :func:`fastattn.ops.attention`, ``[B or 1, 1, Sq, Sk]``."""
    i, j = torch.arange(queries)[:, None], torch.arange(keys)[None, :]
    visible = ((j <= i + keys - queries) if causal else torch.ones(queries, keys, dtype=torch.bool))[None, None]
    if key_start is not None:
        visible = visible & (j >= key_start[:, None, None, None])
    if lengths is not None:
        visible = visible & (j < lengths[:, None, None, None])
    return visible


def visible_in_cache(queries: int, capacity: int, lengths: Tensor, causal: bool, groups: int) -> Tensor:
    """The mask of :func:`fastattn.ops.decode_attention`, ``[B, H, Sq, C]``; ``lengths`` is ``[B, Hkv]``."""
    i, j = torch.arange(queries)[:, None], torch.arange(capacity)[None, :]
    lengths = lengths.repeat_interleave(groups, dim=1)[:, :, None, None]
    return (j < (lengths - queries + 1 + i if causal else lengths)).expand(-1, -1, queries, -1)
