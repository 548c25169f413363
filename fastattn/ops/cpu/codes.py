"""Attention over a quantised cache on a CPU: a block of slots is turned into floats at a time, never the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.ops import _formats
from fastattn.ops._features import Features, add_sinks
from fastattn.ops._lengths import checked
from fastattn.ops._outputs import accumulator_dtype, empty_out_and_lse
from fastattn.ops.cpu import _blocks
from fastattn.ops.cpu.decode import NATIVE_QUERIES
from fastattn.ops.cpu.native import operators

_NUMBERS = 1 << 19  # of a block's keys: 2 MiB in float32


def decode_codes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_scale: Tensor,
    value_scale: Tensor,
    lengths: Tensor,
    scale: float,
    causal: bool,
    value_dim: int,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See :func:`fastattn.ops.decode_attention`; the value is the first ``value_dim`` numbers of what its codes say."""
    arguments = (query, key, value, key_scale, value_scale, lengths, scale, causal, value_dim)
    native = operators()
    if (
        native
        and query.shape[2] <= NATIVE_QUERIES
        and query.dtype != torch.float64
        and key.stride(3) == value.stride(3) == 1
        and (key_scale.dim() == 3 or key_scale.stride(3) == value_scale.stride(3) == 1)
        and not Features(window, softcap, None, alibi_slopes).by_score
    ):
        out, lse = native.decode_codes(*arguments)
    else:
        out, lse = _block_by_block(*arguments, window, softcap, alibi_slopes, positions)
    if sinks is not None:
        add_sinks(out, lse, sinks)
    return out, lse


def _block_by_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_scale: Tensor,
    value_scale: Tensor,
    lengths: Tensor,
    scale: float,
    causal: bool,
    value_dim: int,
    window: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor]:
    out, lse = empty_out_and_lse(query, value_dim)
    kv_heads, capacity = key.shape[1:3]
    wide = accumulator_dtype(query.dtype)
    transformed = key_scale.dim() == 4
    query = query.to(wide)
    query = _formats.hadamard(query) if transformed else query
    grouped = query.unflatten(1, (kv_heads, -1))  # [B, Hkv, G, Sq, D]
    slopes = None if alibi_slopes is None else alibi_slopes.view(kv_heads, -1)
    features = Features(window, softcap, None, slopes)
    ends, own = _ends_and_places(lengths, positions, grouped.shape[3], capacity, causal)
    columns = _formats.code_width("int8", value_dim) if not transformed else value.shape[3] * 2
    top = grouped.new_full(grouped.shape[:4], float("-inf"))
    total, sums = torch.zeros_like(top), grouped.new_zeros(*grouped.shape[:4], columns)
    checked("lengths", lengths, capacity)
    longest = int(lengths.max()) if lengths.numel() else 0
    step = max(16, _NUMBERS // max(1, key.shape[0] * kv_heads * grouped.shape[4]))
    for first in range(0, longest, step):
        slots = slice(first, min(first + step, longest))
        index = torch.arange(slots.start, slots.stop)
        valid = (index < lengths[..., None])[..., None]
        keys = _formats.decode(key[:, :, slots], key_scale[:, :, slots], wide).masked_fill(~valid, 0.0)
        if value is key and value_scale is key_scale:
            values = keys[..., :columns]
        else:
            of_block = value[:, :, slots] if transformed else value[:, :, slots, :columns]
            values = _formats.decode(of_block, value_scale[:, :, slots], wide).masked_fill(~valid, 0.0)
        where = index.expand(*lengths.shape, -1) if positions is None else positions[:, :, slots].long()
        distance = (own[..., None] - where[:, :, None])[:, :, None]  # [B, Hkv, 1, Sq, N]
        seen = (index < ends[..., None])[:, :, None]
        scores = _blocks.score(grouped, keys, scale, features, distance, False, seen).value
        highest = torch.maximum(top, scores.amax(-1))
        origin = highest.masked_fill(highest == float("-inf"), 0.0)
        weights = torch.exp(scores - origin[..., None])
        shrink = torch.exp(top - origin)
        total = total * shrink + weights.sum(-1)
        product = (weights.flatten(2, 3) @ values).unflatten(2, weights.shape[2:4])
        sums, top = sums * shrink[..., None] + product, highest
    nothing = total == 0
    sums = sums / total.masked_fill(nothing, 1.0)[..., None]
    sums = _formats.hadamard(sums)[..., :value_dim] if transformed else sums
    out.copy_(sums.flatten(1, 2))
    lse.copy_((top + total.log()).masked_fill(nothing, float("-inf")).flatten(1, 2))
    return out, lse


def _ends_and_places(
    lengths: Tensor, positions: Tensor | None, queries: int, capacity: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """How many slots each query sees and where it stands, ``[B, Hkv, Sq]``."""
    length = lengths.long()[..., None]
    if not causal:
        ends = length.expand(-1, -1, queries)
        own = (ends - 1).clamp(min=0)
    else:
        ends = length - queries + 1 + torch.arange(queries)
        own = (ends - 1).clamp(min=0)
    if positions is not None and capacity:
        own = positions.long().gather(2, own)
    return ends, own if causal else own + 1
