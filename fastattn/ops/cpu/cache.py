"""CPU formulations of the in-place cache updates. They look at the lengths and touch only what changes."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.ops import _formats
from fastattn.ops._lengths import checked
from fastattn.ops._outputs import accumulator_dtype
from fastattn.ops.cpu.native import operators


def cache_append_(
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    lengths: Tensor,
    key: Tensor,
    value: Tensor,
    position: Tensor,
) -> None:
    batch, kv_heads, capacity, _ = key_cache.shape
    if key.numel() == 0:
        return
    native = operators()
    if native and key_cache.stride(3) == value_cache.stride(3) == key.stride(3) == value.stride(3) == 1:
        native.cache_append_(key_cache, value_cache, positions, lengths, key, value, position)
        return
    filled = checked("lengths", lengths, capacity)
    tokens, start = key.shape[2], filled[0][0]
    if tokens == 1 and start < capacity and all(length == start for row in filled for length in row):
        at = position.flatten().tolist()
        if min(at) >= 0:  # a decode step that brings every row a token
            key_cache[:, :, start : start + 1].copy_(key)
            value_cache[:, :, start : start + 1].copy_(value)
            positions[:, :, start].copy_(position)
            lengths.add_(1)
            return
    real = (position >= 0).sum(1).tolist()
    for row, count in zip(filled, real, strict=True):
        if max(row) + count > capacity:
            raise ValueError(f"key must fit the cache's {capacity} slots, but {max(row) + count} would be filled")
    buffers = ((key_cache, key), (value_cache, value), (positions, position[:, None].expand(-1, kv_heads, -1)))
    if all(count == tokens for count in real) and all(length == start for row in filled for length in row):
        for cache, new in buffers:
            cache[:, :, start : start + tokens].copy_(new)
    else:
        for b in range(batch):
            chosen = None if real[b] == tokens else (position[b] >= 0).nonzero().flatten()
            for h in range(kv_heads):
                slots = slice(filled[b][h], filled[b][h] + real[b])
                for cache, new in buffers:
                    cache[b, h, slots] = new[b, h] if chosen is None else new[b, h].index_select(0, chosen)
    lengths.add_(torch.tensor(real, dtype=torch.int32)[:, None])


def cache_compact_(
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    lengths: Tensor,
    scores: Tensor,
    budget: int,
    min_length: int,
) -> None:
    native = operators()
    if native and key_cache.stride(3) == value_cache.stride(3) == 1:
        native.cache_compact_(key_cache, value_cache, positions, lengths, scores, budget, min_length)
        return
    full = max(budget + 1, min_length)
    for b, row in enumerate(checked("lengths", lengths, key_cache.shape[2])):
        for length in sorted(set(row)):
            if length < full:
                continue
            heads = [h for h, other in enumerate(row) if other == length]
            kept = select_slots(scores[b, heads, :length], budget)
            for h, index in zip(heads, kept, strict=True):
                for buffer in (key_cache, value_cache, positions):
                    buffer[b, h, :budget] = buffer[b, h].index_select(0, index)
                positions[b, h, budget:] = -1
                lengths[b, h] = budget


def cache_append_codes_(
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    lengths: Tensor,
    key_scale: Tensor,
    value_scale: Tensor,
    key: Tensor,
    value: Tensor,
    position: Tensor,
) -> None:
    if key.numel() == 0:
        return
    native, held = operators(), _as_vectors(key_scale, value_scale)
    columns = (key_cache, value_cache, key, value, *held)
    if native and key.dtype != torch.float64 and all(tensor.stride(3) == 1 for tensor in columns):
        native.cache_append_codes_(key_cache, value_cache, positions, lengths, *held, key, value, position)
        return
    storage = _formats.storage_of(key_cache, key_scale)
    assert storage is not None
    codes, scale = _formats.encode(key.detach().to(accumulator_dtype(key.dtype)), storage)
    if value_cache.shape[3]:
        value_codes, of_value = _formats.encode(value.detach().to(accumulator_dtype(value.dtype)), storage)
    else:
        value_codes, of_value = codes[..., :0], scale.new_empty(*codes.shape[:3], 0)
    new = _as_vectors(scale, of_value)
    cache_append_(held[0], held[1], positions, lengths.clone(), new[0], new[1], position)
    cache_append_(key_cache, value_cache, positions, lengths, codes, value_codes, position)


def _as_vectors(*scales: Tensor) -> list[Tensor]:
    """Scales ``[B, Hkv, C, n]``."""
    return [scale if scale.dim() == 4 else scale[..., None] for scale in scales]


def cache_compact_codes_(
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    lengths: Tensor,
    key_scale: Tensor,
    value_scale: Tensor,
    scores: Tensor,
    budget: int,
    min_length: int,
) -> None:
    native, (of_keys, of_values) = operators(), _as_vectors(key_scale, value_scale)
    if native and all(tensor.stride(3) == 1 for tensor in (key_cache, value_cache, of_keys, of_values)):
        held = (key_cache, value_cache, positions, lengths, of_keys, of_values)
        native.cache_compact_codes_(*held, scores, budget, min_length)
        return
    # the same choice twice: scales are moved before the lengths change
    cache_compact_(of_keys, of_values, positions.clone(), lengths.clone(), scores, budget, min_length)
    cache_compact_(key_cache, value_cache, positions, lengths, scores, budget, min_length)


def select_slots(scores: Tensor, budget: int) -> Tensor:
    """Ascending indices ``[R, budget]`` of the best of ``[R, n]`` scores: later wins ties, NaN ranks lowest."""
    order = _order_preserving_int(scores)
    threshold = order.topk(budget, dim=1).values[:, -1:]
    above = order > threshold
    tied = order == threshold
    newest_first = tied.flip(1).cumsum(1).flip(1)
    keep = above | (tied & (newest_first <= budget - above.sum(1, keepdim=True)))
    return keep.nonzero()[:, 1].view(-1, budget)


def _order_preserving_int(scores: Tensor) -> Tensor:
    """Integers in the order of the floats: -0.0 equals 0.0, and NaN lies below -inf."""
    integer = torch.int64 if scores.dtype == torch.float64 else torch.int32
    bits = (scores + 0.0).view(integer)
    order = torch.where(bits < 0, bits ^ torch.iinfo(integer).max, bits)
    return order.masked_fill(scores.isnan(), torch.iinfo(integer).min)
