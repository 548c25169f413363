"""The definition of every operator in plain PyTorch, in any dtype up to float64.

Written for reading, not for speed: masks instead of slices, no blocks, no in-place tricks. The tests hold every
implementation to these functions in float64. They compute in float32, or in float64 where the inputs are float64, and
take the same arguments as the functions of the same name in :mod:`fastattn.ops`, without the checks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from fastattn.ops.reference_codes import dequantize as dequantize
from fastattn.ops.reference_codes import quantize as quantize


def _wide(tensor: Tensor) -> Tensor:
    """float32, or float64 for float64."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _repeat_heads(tensor: Tensor, heads: int) -> Tensor:
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


def _masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    scale: float,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``visible`` is bool, broadcast to ``[B, H, Sq, Sk]``, as is ``bias``; ``sinks`` is ``[H]``."""
    dtype = query.dtype
    query = _wide(query)
    key = _wide(_repeat_heads(key, query.shape[1]))
    value = _wide(_repeat_heads(value, query.shape[1]))
    visible = visible.expand(*query.shape[:3], key.shape[2])
    seen = visible.any(2)[..., None]  # a key that no query sees may hold NaN, which 0 * NaN would let through
    key, value = key.masked_fill(~seen, 0.0), value.masked_fill(~seen, 0.0)
    logits = scale * query @ key.mT
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias
    logits = logits.masked_fill(~visible, float("-inf"))
    lse = torch.logsumexp(logits, dim=-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    probability = torch.exp(logits - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
    return (probability @ value).to(dtype), lse


def _position_bias(slopes: Tensor | None, distance: Tensor, like: Tensor) -> Tensor | None:
    """``-slope |p - t|`` per head, for distances ``[..., 1 or H, Sq, Sk]``."""
    return None if slopes is None else -_wide(slopes).to(_wide(like).dtype)[:, None, None] * distance.abs()


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    key_start: Tensor | None = None,
    lengths: Tensor | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """See :func:`fastattn.ops.attention`."""
    scale = query.shape[3] ** -0.5 if scale is None else scale
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        bounds = zip(*(itertools.pairwise(cu.tolist()) for cu in (cu_seqlens_q, cu_seqlens_k)), strict=True)
        outs, lses = [query.new_empty(1, query.shape[1], 0, value.shape[3])], [_wide(query)[:, :, :0, 0]]
        for (q0, q1), (k0, k1) in bounds:
            row = query[:, :, q0:q1], key[:, :, k0:k1], value[:, :, k0:k1]
            result = attention(
                *row, causal=causal, scale=scale, window=window, sinks=sinks, softcap=softcap,
                alibi_slopes=alibi_slopes, return_lse=True,
            )  # fmt: skip
            outs.append(result[0])
            lses.append(result[1])
        out, lse = torch.cat(outs, dim=2), torch.cat(lses, dim=2)
        return (out, lse) if return_lse else out
    queries, keys = query.shape[2], key.shape[2]
    position = torch.arange(queries, device=query.device)[:, None] + keys - queries
    j = torch.arange(keys, device=query.device)[None, :]
    visible = (j <= position) if causal else torch.ones_like(j <= position)
    if window is not None:
        visible = visible & (position - j < window)
    visible = visible[None, None]
    if key_start is not None:
        visible = visible & (j >= key_start[:, None, None, None])
    if lengths is not None:
        visible = visible & (j < lengths[:, None, None, None])
    bias = _position_bias(alibi_slopes, position - j, query)
    out, lse = _masked_attention(query, key, value, visible, scale, softcap, bias, sinks)
    return (out, lse) if return_lse else out


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    positions: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """See :func:`fastattn.ops.decode_attention`."""
    if key_scale is not None and value_scale is not None:
        wide = _wide(query).dtype
        key, value = dequantize(key, key_scale, wide), dequantize(value, value_scale, wide)
    queries, capacity = query.shape[2], key.shape[2]
    scale = query.shape[3] ** -0.5 if scale is None else scale
    ends = _repeat_heads(lengths, query.shape[1])[:, :, None, None]
    i = torch.arange(queries, device=query.device)[:, None]
    j = torch.arange(capacity, device=query.device)[None, :]
    visible = j < (ends - queries + 1 + i if causal else ends)
    bias = None
    if capacity and (window is not None or alibi_slopes is not None):
        slot = j.expand(*key.shape[:2], capacity)
        where = _repeat_heads(slot if positions is None else positions.long(), query.shape[1])  # [B, H, C]
        own = (ends[..., 0] - queries + i[:, 0] if causal else (ends[..., 0] - 1).expand(-1, -1, queries)).long()
        own = where.gather(2, own.clamp(0, capacity - 1)) + (0 if causal else 1)  # [B, H, Sq]
        distance = own[..., None] - where[:, :, None]
        if window is not None:
            visible = visible & (distance < window)
        bias = _position_bias(alibi_slopes, distance, query)
    out, lse = _masked_attention(query, key, value, visible, scale, softcap, bias, sinks)
    return (out, lse) if return_lse else out


def latent_decode(
    query_latent: Tensor,
    query_rope: Tensor,
    cache: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    cache_scale: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """See :func:`fastattn.ops.latent_decode`."""
    if cache_scale is not None:
        cache = dequantize(cache, cache_scale, _wide(query_latent).dtype)
    rank = query_latent.shape[3]
    query = torch.cat([query_latent, query_rope], dim=-1)
    key = cache[:, None]
    return decode_attention(
        query, key, key[..., :rank], lengths[:, None], scale=scale, causal=causal, window=window, sinks=sinks,
        softcap=softcap, return_lse=return_lse,
    )  # fmt: skip


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """See :func:`fastattn.ops.merge_attention`."""
    stacked = torch.stack(list(lses))
    lse = torch.logsumexp(stacked, dim=0)
    weights = torch.exp(stacked - lse.masked_fill(lse == float("-inf"), 0.0))
    seen = (stacked > float("-inf"))[..., None]
    parts = [_wide(part).masked_fill(~some, 0.0) for part, some in zip(outs, seen, strict=True)]
    out = sum(weight[..., None] * part for weight, part in zip(weights, parts, strict=True))
    assert isinstance(out, Tensor)
    return out.to(outs[0].dtype), lse


def qk_scores(query: Tensor, key: Tensor, *, scale: float = 1.0) -> Tensor:
    """See :func:`fastattn.ops.qk_scores`."""
    product = scale * _wide(query) @ _wide(_repeat_heads(key, query.shape[1])).mT
    return product.to(query.dtype)


def _numbers(vectors: Tensor, scale: Tensor | None, dtype: torch.dtype = torch.float64) -> Tensor:
    return vectors if scale is None else dequantize(vectors, scale, dtype)


def _valid_slots(key: Tensor, lengths: Tensor) -> Tensor:
    return torch.arange(key.shape[2], device=key.device) < lengths[..., None]


def score_knorm(key: Tensor, lengths: Tensor, *, min_length: int = 0, key_scale: Tensor | None = None) -> Tensor:
    """See :func:`fastattn.ops.score_knorm`."""
    key = _numbers(key, key_scale)
    score = -torch.linalg.vector_norm(_wide(key), dim=-1)
    return score.masked_fill(~_valid_slots(key, lengths), float("-inf"))


def score_key_diff(key: Tensor, lengths: Tensor, *, min_length: int = 0, key_scale: Tensor | None = None) -> Tensor:
    """See :func:`fastattn.ops.score_key_diff`."""
    key = _numbers(key, key_scale)
    valid = _valid_slots(key, lengths)
    unit = _unit(_wide(key).masked_fill(~valid[..., None], 0.0))
    anchor = unit.sum(2) / lengths.clamp(min=1)[..., None]
    score = -(unit @ _unit(anchor)[..., None])[..., 0]
    return score.masked_fill(~valid, float("-inf"))


def _unit(vector: Tensor) -> Tensor:
    """Divided by its norm; zero stays zero."""
    norm = torch.linalg.vector_norm(vector, dim=-1, keepdim=True)
    return vector / norm.masked_fill(norm == 0, 1.0)


def score_expected_attention(
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    positions: Tensor,
    query_mean: Tensor | None = None,
    query_cov: Tensor | None = None,
    query_samples: Tensor | None = None,
    *,
    scale: float,
    n_sink: int = 4,
    epsilon: float = 0.0,
    use_value_norm: bool = True,
    min_length: int = 0,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    value_dim: int | None = None,
) -> Tensor:
    """See :func:`fastattn.ops.score_expected_attention`."""
    key, value = _numbers(key, key_scale), _numbers(value, value_scale)[..., :value_dim]
    valid = _valid_slots(key, lengths)
    scored = valid & (positions >= n_sink)
    key = _wide(key).masked_fill(~valid[..., None], 0.0)
    value = _wide(value).masked_fill(~valid[..., None], 0.0)
    batch, kv_heads, _, dim = key.shape
    statistic = query_samples if query_samples is not None else query_mean
    assert statistic is not None
    groups = statistic.shape[1] // kv_heads
    key = key[:, :, None]  # [B, Hkv, 1, C, D]
    if query_samples is not None:
        samples = query_samples.view(batch, kv_heads, groups, query_samples.shape[2], dim)
        logits = scale * samples @ key.mT  # [B, Hkv, G, N, C]
        z = logits.mean(3) + logits.var(3, correction=0) / 2
    else:
        mean = statistic.view(batch, kv_heads, groups, dim, 1)
        z = scale * (key @ mean)[..., 0]
        if query_cov is not None:
            cov = query_cov.view(batch, kv_heads, groups, dim, dim)
            z = z + scale**2 / 2 * ((key @ cov) * key).sum(-1)
    z = z.masked_fill(~scored[:, :, None], float("-inf"))
    expected = torch.softmax(z, dim=-1).nan_to_num(nan=0.0).mean(2)  # [B, Hkv, C]
    score = expected
    if use_value_norm:
        score = (expected + epsilon) * torch.linalg.vector_norm(value, dim=-1)
    score = score.masked_fill(valid & ~scored, float("inf"))
    return score.masked_fill(~valid, float("-inf"))


def attention_mass(
    key: Tensor,
    lengths: Tensor,
    positions: Tensor,
    query: Tensor,
    query_positions: Tensor,
    *,
    scale: float,
    min_length: int = 0,
    key_scale: Tensor | None = None,
) -> Tensor:
    """See :func:`fastattn.ops.attention_mass`."""
    key = _numbers(key, key_scale, query.dtype)
    valid = _valid_slots(key, lengths)
    key = _wide(key).masked_fill(~valid[..., None], 0.0)
    group = query.shape[1] // key.shape[1]
    query = _wide(query).unflatten(1, (key.shape[1], group))
    logits = scale * query @ key[:, :, None].mT  # [B, Hkv, G, N, C]
    causal = positions[:, :, None] <= query_positions[:, None, :, None]
    visible = (valid[:, :, None] & causal & (query_positions >= 0)[:, None, :, None])[:, :, None]
    weights = logits.masked_fill(~visible, float("-inf")).softmax(-1).masked_fill(~visible, 0.0)
    return weights.sum(3).mean(2)


def query_moments(query: Tensor, valid: Tensor | None = None, *, min_length: int = 0) -> tuple[Tensor, Tensor]:
    """See :func:`fastattn.ops.query_moments`."""
    query = _wide(query)
    if valid is None:
        valid = torch.ones(query.shape[0], query.shape[2], dtype=torch.bool, device=query.device)
    mask = valid[:, None, :, None]
    count = valid.sum(1).clamp(min=1)[:, None, None]
    mean = query.masked_fill(~mask, 0.0).sum(2) / count
    centered = (query - mean[:, :, None]).masked_fill(~mask, 0.0)
    return mean, centered.mT @ centered / count[..., None]


def cache_append_(
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    lengths: Tensor,
    key: Tensor,
    value: Tensor,
    position: Tensor,
) -> None:
    """See :func:`fastattn.ops.cache_append_`."""
    batch, kv_heads, tokens, _ = key.shape
    for b in range(batch):
        for h in range(kv_heads):
            for t in range(tokens):
                slot = int(lengths[b, h])
                if position[b, t] < 0 or slot == key_cache.shape[2]:
                    continue
                key_cache[b, h, slot] = key[b, h, t]
                value_cache[b, h, slot] = value[b, h, t]
                positions[b, h, slot] = position[b, t]
                lengths[b, h] += 1


def select_slots(scores: Tensor, budget: int) -> Tensor:
    """Ascending indices of the ``budget`` best of 1-d ``scores``: later ones win ties, NaN ranks lowest."""
    ranked = sorted(
        range(scores.numel()),
        key=lambda slot: (not bool(scores[slot].isnan()), float(scores[slot].nan_to_num(nan=0.0)), slot),
        reverse=True,
    )
    return torch.tensor(sorted(ranked[:budget]), dtype=torch.int64, device=scores.device)


def cache_compact_(
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    lengths: Tensor,
    scores: Tensor,
    budget: int,
    *,
    min_length: int = 0,
) -> None:
    """See :func:`fastattn.ops.cache_compact_`."""
    for b in range(lengths.shape[0]):
        for h in range(lengths.shape[1]):
            length = int(lengths[b, h])
            if length <= budget or length < min_length:
                continue
            kept = select_slots(scores[b, h, :length], budget)
            for buffer in (key_cache, value_cache, positions):
                buffer[b, h, :budget] = buffer[b, h, kept]
            positions[b, h, budget:] = -1
            lengths[b, h] = budget
