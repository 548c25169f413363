"""Attention over a cache buffer on a CPU."""

from __future__ import annotations

from torch import Tensor

from fastattn.ops.attention import empty_out_and_lse
from fastattn.ops.cpu.attention import attend_range


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """See :func:`fastattn.ops.decode_attention`."""
    out, lse = empty_out_and_lse(query, value.shape[3])
    out.zero_()
    lse.fill_(float("-inf"))
    batch, kv_heads, capacity, _ = key.shape
    queries = query.shape[2]
    grouped_query, grouped_out, grouped_lse = (t.unflatten(1, (kv_heads, -1)) for t in (query, out, lse))
    valid = lengths.clamp(0, capacity).tolist()
    blocks: list[tuple[slice, slice, int]]
    if batch and all(row == valid[0][:1] * kv_heads for row in valid):
        blocks = [(slice(batch), slice(kv_heads), valid[0][0])]
    else:
        blocks = [
            (slice(b, b + 1), slice(h, h + 1), length) for b, row in enumerate(valid) for h, length in enumerate(row)
        ]
    for rows, heads, length in blocks:
        attend_range(
            grouped_query[rows, heads],
            key[rows, heads, :length],
            value[rows, heads, :length],
            grouped_out[rows, heads],
            grouped_lse[rows, heads],
            first=length - queries + 1 if causal else length + 1,
            scale=scale,
        )
    return out, lse
