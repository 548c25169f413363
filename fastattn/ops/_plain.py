"""Whether the arguments of an operator that every step runs are what they nearly always are.

The checks of an operator cost a decode step more Python calls than the operator itself. Each function here is one
expression: True where the checks would find nothing. False says nothing; the checks then decide.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastattn import validation as check


def append_is_plain(
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    lengths: Tensor,
    key: Tensor,
    value: Tensor,
    position: Tensor,
) -> bool:
    """Of :func:`fastattn.ops.cache_append_`."""
    for tensor in (key_cache, value_cache, positions, lengths, key, value, position):
        if not isinstance(tensor, Tensor):
            return False
    if key_cache.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        return False
    rows, kv_heads, slots, width = key_cache.shape
    tokens, value_width = key.shape[2], value.shape[3]
    dtype, device = key_cache.dtype, key_cache.device
    return (
        dtype in check.FLOATS
        and value_cache.shape == (rows, kv_heads, slots, value_width)
        and positions.shape == (rows, kv_heads, slots)
        and lengths.shape == (rows, kv_heads)
        and key.shape == (rows, kv_heads, tokens, width)
        and value.shape == (rows, kv_heads, tokens, value_width)
        and position.shape == (rows, tokens)
        and dtype == value_cache.dtype == key.dtype == value.dtype
        and torch.int32 == positions.dtype == lengths.dtype == position.dtype
        and device == value_cache.device == key.device == value.device
        and device == positions.device == lengths.device == position.device
        and not (key_cache.requires_grad or value_cache.requires_grad or key.requires_grad or value.requires_grad)
        and forward_ad._current_level < 0  # else each is looked at
        and key_cache.is_contiguous()
        and value_cache.is_contiguous()
        and positions.is_contiguous()
        and lengths.is_contiguous()
    )


def append_codes_is_plain(
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    lengths: Tensor,
    key: Tensor,
    value: Tensor,
    position: Tensor,
    key_scale: Tensor,
    value_scale: Tensor | None,
) -> bool:
    """Of :func:`fastattn.ops.cache_append_` over int8 codes, or fp8's as bytes, with or without values."""
    for tensor in (key_cache, value_cache, positions, lengths, key, value, position, key_scale):
        if not isinstance(tensor, Tensor):
            return False
    if key_cache.dim() != 4 or key.dim() != 4 or value.dim() != 4 or key_scale.dim() != 3:
        return False
    rows, kv_heads, slots, width = key_cache.shape
    tokens, value_width = key.shape[2], value.shape[3]
    codes, dtype, device = key_cache.dtype, key.dtype, key_cache.device
    of_value = key_scale if value_scale is None and value_width == 0 else value_scale
    return (
        isinstance(of_value, Tensor)
        and (value_width > 0 or value_scale is None)
        and (codes == torch.int8 or codes == torch.uint8)
        and dtype in check.FLOATS
        and value_cache.shape == (rows, kv_heads, slots, value_width)
        and positions.shape == (rows, kv_heads, slots) == key_scale.shape == of_value.shape
        and lengths.shape == (rows, kv_heads)
        and key.shape == (rows, kv_heads, tokens, width)
        and value.shape == (rows, kv_heads, tokens, value_width)
        and position.shape == (rows, tokens)
        and codes == value_cache.dtype
        and dtype == value.dtype
        and torch.float32 == key_scale.dtype == of_value.dtype
        and torch.int32 == positions.dtype == lengths.dtype == position.dtype
        and device == value_cache.device == key.device == value.device == key_scale.device == of_value.device
        and device == positions.device == lengths.device == position.device
        and not (key.requires_grad or value.requires_grad)
        and key_cache.is_contiguous()
        and value_cache.is_contiguous()
        and positions.is_contiguous()
        and lengths.is_contiguous()
        and key_scale.is_contiguous()
        and of_value.is_contiguous()
    )


def decode_is_plain(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> bool:
    """Of :func:`fastattn.ops.decode_attention`, without further features."""
    for tensor in (query, key, value, lengths):
        if not isinstance(tensor, Tensor):
            return False
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        return False
    rows, heads, _, width = query.shape
    kv_heads, slots = key.shape[1], key.shape[2]
    dtype, device = query.dtype, query.device
    return (
        kv_heads > 0
        and heads % kv_heads == 0
        and dtype in check.FLOATS
        and key.shape == (rows, kv_heads, slots, width)
        and value.shape == (rows, kv_heads, slots, value.shape[3])
        and lengths.shape == (rows, kv_heads)
        and dtype == key.dtype == value.dtype
        and lengths.dtype == torch.int32
        and device == key.device == value.device == lengths.device
        and not (query.requires_grad or key.requires_grad or value.requires_grad)
        and forward_ad._current_level < 0  # likewise
    )


def latent_is_plain(query_latent: Tensor, query_rope: Tensor, cache: Tensor, lengths: Tensor) -> bool:
    """Of :func:`fastattn.ops.latent_decode`, without further features."""
    for tensor in (query_latent, query_rope, cache, lengths):
        if not isinstance(tensor, Tensor):
            return False
    if query_latent.dim() != 4 or query_rope.dim() != 4 or cache.dim() != 3:
        return False
    rows, heads, tokens, rank = query_latent.shape
    dtype, device = query_latent.dtype, query_latent.device
    return (
        dtype in check.FLOATS
        and query_rope.shape == (rows, heads, tokens, query_rope.shape[3])
        and cache.shape == (rows, cache.shape[1], rank + query_rope.shape[3])
        and lengths.shape == (rows,)
        and dtype == query_rope.dtype == cache.dtype
        and lengths.dtype == torch.int32
        and device == query_rope.device == cache.device == lengths.device
        and not (query_latent.requires_grad or query_rope.requires_grad or cache.requires_grad)
        and forward_ad._current_level < 0
    )
