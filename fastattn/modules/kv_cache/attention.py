"""Attention of new tokens to a layer of the cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn import ops
from fastattn.modules.kv_cache.call import LayerCall


def attend_to_cache_and_call(call: LayerCall) -> Tensor:
    """Attention to the cache before the call, merged with causal attention inside the new tokens."""
    query, key, cached_key = _inputs(call, appended=False)
    start = end = None
    if call.mask is not None:
        start = call.mask.to(torch.int32).argmax(1).to(torch.int32)
        end = start + call.mask.sum(1, dtype=torch.int32)
    value = key[..., : call.state.layer.spec.latent_rank] if call.value is None else call.value
    inside = ops.attention(
        query, key, value, causal=True, scale=call.scale, key_start=start, lengths=end, return_lse=True
    )
    if call.on_host and int(call.state.layer.lengths.amax()) == 0:
        return inside[0]
    cached = _attend_to_slots(call, query, cached_key, causal=False)
    return ops.merge_attention([cached[0], inside[0]], [cached[1], inside[1]])[0]


def attend_after_append(call: LayerCall) -> Tensor:
    """Causal attention to the cache, whose newest slots are the new tokens."""
    query, key = call.query, call.state.layer._buffers["keys"]
    if call.state.spec.policy.rerotate:
        query, _, key = _inputs(call, appended=True)
    assert query is not None
    assert key is not None
    return _attend_to_slots(call, query, key, causal=True)[0]


def _attend_to_slots(call: LayerCall, query: Tensor, key: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    if call.state.layer.spec.storage is not None:
        return _attend_to_codes(call, query, causal)
    held: dict[str, Any] = call.state.layer._buffers
    rank, lengths = call.state.layer.spec.latent_rank, held["lengths"]
    if rank is not None:
        latent, rope = query[..., :rank], query[..., rank:]
        result = ops.latent_decode(
            latent, rope, key[:, 0], lengths[:, 0], scale=call.scale, causal=causal, return_lse=True
        )
    else:
        result = ops.decode_attention(
            query, key, held["values"], lengths, scale=call.scale, causal=causal, return_lse=True
        )
    assert isinstance(result, tuple)
    return result


def _attend_to_codes(call: LayerCall, query: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    layer, scale = call.state.layer, call.scale
    rank, lengths = layer.spec.latent_rank, layer.lengths
    if rank is None:
        return ops.decode_attention(
            query, layer.keys, layer.values, lengths, scale=scale, causal=causal, key_scale=layer.key_scale,
            value_scale=layer.value_scale, return_lse=True,
        )  # fmt: skip
    latent, rope, codes, cache_scale = query[..., :rank], query[..., rank:], layer.keys[:, 0], layer.key_scale[:, 0]
    return ops.latent_decode(
        latent, rope, codes, lengths[:, 0], scale=scale, causal=causal, cache_scale=cache_scale, return_lse=True
    )


def _inputs(call: LayerCall, appended: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Query, new keys and cached keys, rotated to their index in the cache if the policy wants that.

    Each is rotated on from its original position. Only differences of positions matter to attention, and a row's new
    tokens keep theirs: one offset per row moves them.
    """
    assert call.query is not None
    layer, rotary = call.state.layer, call.state.rotary
    if not call.state.spec.policy.rerotate:
        return call.query, call.key, layer.keys
    assert rotary is not None
    slots = torch.arange(layer.keys.shape[2], device=layer.keys.device)
    cached_key = rotary.move(layer.keys, layer.positions, slots.expand_as(layer.positions))
    before = layer.lengths[:, :1] - (call.real_tokens()[:, None] if appended else 0)
    real = call.position >= 0
    index = torch.where(real, before + real.cumsum(1) - 1, call.position)
    query, key = (rotary.move(new, call.position, index) for new in (call.query, call.key))
    return query, key, cached_key
