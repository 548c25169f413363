"""Attention mass on a device.

One query, a decode step's, is Expected Attention with one sample and no variance: its kernels do that, and return at
once in rows that are skipped. More are products in PyTorch, block by block; nothing waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.ops import _formats
from fastattn.ops._outputs import accumulator_dtype
from fastattn.ops.triton.expected_attention import score_expected_attention

# A block of queries has about this many logits (128 MiB in float32) at a time.
_LOGITS = 1 << 25


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
    key = _formats.numbers(key, key_scale).to(query.dtype)
    valid = torch.arange(key.shape[2], device=key.device) < lengths[..., None]
    if query.shape[2] == 1:
        return _one_query(key, lengths, positions, query, query_positions, scale, min_length, valid)
    dtype = accumulator_dtype(key.dtype)
    batch, kv_heads, slots, dim = key.shape
    heads, queries = query.shape[1:3]
    wide = key.to(dtype).masked_fill(~valid[..., None], 0.0)
    grouped = query.to(dtype).view(batch, kv_heads, heads // kv_heads, queries, dim)
    out = torch.zeros(batch, kv_heads, slots, dtype=dtype, device=key.device)
    step = max(1, _LOGITS // (batch * heads * max(1, slots)))
    if queries <= step:
        return _block(wide, valid, positions, grouped, query_positions, scale)
    for first in range(0, queries, step):
        here = slice(first, first + step)
        out += _block(wide, valid, positions, grouped[:, :, :, here], query_positions[:, here], scale)
    return out


def _one_query(
    key: Tensor,
    lengths: Tensor,
    positions: Tensor,
    query: Tensor,
    query_positions: Tensor,
    scale: float,
    min_length: int,
    valid: Tensor,
) -> Tensor:
    # Positions rise: what the query sees is a prefix. Rows that are skipped look empty.
    visible = valid & (positions <= query_positions[:, :, None])
    seen = visible.sum(-1, dtype=torch.int32)
    seen = torch.where((lengths >= min_length).any(1, keepdim=True), seen, 0)
    sample = query.to(accumulator_dtype(key.dtype))
    mass = score_expected_attention(key, key, seen, positions, None, None, sample, scale, 0, 0.0, False, 1)
    return torch.where(visible & (seen > 0)[..., None], mass, 0.0)


def _block(
    key: Tensor, valid: Tensor, positions: Tensor, query: Tensor, query_positions: Tensor, scale: float
) -> Tensor:
    """Of ``query [B, Hkv, G, N, D]``; one product with the group's heads folded into the queries."""
    batch, kv_heads, group, queries, dim = query.shape
    logits = scale * (query.reshape(batch, kv_heads, group * queries, dim) @ key.mT)
    logits = logits.view(batch, kv_heads, group, queries, key.shape[2])
    visible = valid[:, :, None] & (positions[:, :, None] <= query_positions[:, None, :, None])
    visible = visible[:, :, None]  # [B, Hkv, 1, N, C]
    weights = logits.masked_fill(~visible, float("-inf")).softmax(-1).masked_fill(~visible, 0.0)
    return weights.sum((2, 3)) / group
