"""Attention of new tokens to a layer of the cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn import ops
from fastattn.modules.kv_cache.call import LayerCall
from fastattn.modules.kv_cache.state import SlotStore
from fastattn.validation import find_split_row


def goes_by_position(call: LayerCall) -> bool:
    """Whether distances between positions matter to a prompt's attention, and differ from those between columns.

    A window and ALiBi look at distances; without cached tokens and gaps, columns tell them as well. A graph that is
    being traced can't look.
    """
    layer = call.state.layer
    if layer.spec.window is None and "alibi_slopes" not in call.features:
        return False
    if call.compiling or int(layer.lengths.amax()) > 0:
        return True
    real = call.position >= 0
    offset = call.position - real.cumsum(1)
    last = torch.iinfo(offset.dtype).max
    return bool((offset.masked_fill(~real, -last).amax(1) > offset.masked_fill(~real, last).amin(1)).any())


def attend_to_cache_and_call(call: LayerCall) -> Tensor:
    """Attention to the cache before the call, merged with causal attention inside the new tokens."""
    layer = call.state.layer
    query, key, cached_key = _inputs(call, layer, appended=False)
    value = key[..., : layer.spec.latent_rank] if call.value is None else call.value
    order = start = end = None
    if call.mask is not None:
        if call.on_host and find_split_row(call.mask) is None:
            start = call.mask.to(torch.int32).argmax(1).to(torch.int32)
            end = start + call.mask.sum(1, dtype=torch.int32)
        else:
            order = _real_last(call)
            query, key, value = (_in_order(part, order) for part in (query, key, value))
            start = (call.tokens - call.real_tokens()).to(torch.int32)
    inside = ops.attention(
        query,
        key,
        value,
        causal=True,
        scale=call.scale,
        key_start=start,
        lengths=end,
        window=layer.spec.window,
        return_lse=True,
        **call.features,
    )
    if call.on_host and int(layer.lengths.amax()) == 0:
        out = inside[0]
    else:
        cached = _attend_to_slots(call, layer, query, cached_key, causal=False)
        out = ops.merge_attention([cached[0], inside[0]], [cached[1], inside[1]])[0]
    return out if order is None else _put_back(out, order)


def attend_after_append(call: LayerCall, store: SlotStore) -> Tensor:
    """Causal attention to ``store``, whose newest slots are the new tokens."""
    query, key = call.query, store._buffers["keys"]
    if call.state.spec.policy.rerotate:
        query, _, key = _inputs(call, store, appended=True)
    assert query is not None
    if call.mask is None or call.tokens == 1:
        return _attend_to_slots(call, store, query, key, causal=True)[0]
    order = _real_last(call)  # so that the newest slots are the last queries' own
    return _put_back(_attend_to_slots(call, store, _in_order(query, order), key, causal=True)[0], order)


def _attend_to_slots(
    call: LayerCall, store: SlotStore, query: Tensor, key: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    spec, features = store.spec, call.features
    if not causal and "sinks" in features:  # they join the sum once, with the call's own tokens
        features = {name: value for name, value in features.items() if name != "sinks"}
    if spec.storage is not None:
        return _attend_to_codes(call, store, query, causal, features)
    rank, lengths = spec.latent_rank, store._buffers["lengths"]
    if rank is not None:
        latent, rope = query[..., :rank], query[..., rank:]
        result = ops.latent_decode(
            latent,
            rope,
            key[:, 0],
            lengths[:, 0],
            scale=call.scale,
            causal=causal,
            window=spec.window,
            return_lse=True,
            **features,
        )
    elif spec.window is None and not features:
        result = ops.decode_attention(
            query, key, store._buffers["values"], lengths, scale=call.scale, causal=causal, return_lse=True
        )
    else:
        result = ops.decode_attention(
            query,
            key,
            store.values,
            lengths,
            scale=call.scale,
            causal=causal,
            window=spec.window,
            positions=store.positions,
            return_lse=True,
            **features,
        )
    assert isinstance(result, tuple)
    return result


def _attend_to_codes(
    call: LayerCall, store: SlotStore, query: Tensor, causal: bool, features: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    scale, window = call.scale, store.spec.window
    rank, lengths = store.spec.latent_rank, store.lengths
    if rank is None:
        positions = None if window is None and not features else store.positions
        return ops.decode_attention(
            query, store.keys, store.values, lengths, scale=scale, causal=causal, window=window, positions=positions,
            key_scale=store.key_scale, value_scale=store.value_scale, return_lse=True, **features,
        )  # fmt: skip
    latent, rope, codes, cache_scale = query[..., :rank], query[..., rank:], store.keys[:, 0], store.key_scale[:, 0]
    return ops.latent_decode(
        latent, rope, codes, lengths[:, 0], scale=scale, causal=causal, window=window, cache_scale=cache_scale,
        return_lse=True, **features,
    )  # fmt: skip


def _inputs(call: LayerCall, store: SlotStore, appended: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Query, new keys and cached keys, rotated to their index in the cache if the policy wants that.

    Each is rotated on from its original position. Only differences of positions matter to attention, and a row's new
    tokens keep theirs: one offset per row moves them.
    """
    assert call.query is not None
    rotary = call.state.rotary
    if not call.state.spec.policy.rerotate or store.spec.window is not None:
        return call.query, call.key, store.keys
    assert rotary is not None
    slots = torch.arange(store.keys.shape[2], device=store.keys.device)
    cached_key = rotary.move(store.keys, store.positions, slots.expand_as(store.positions))
    before = store.lengths[:, :1] - (call.real_tokens()[:, None] if appended else 0)
    real = call.position >= 0
    index = torch.where(real, before + real.cumsum(1) - 1, call.position)
    query, key = (rotary.move(new, call.position, index) for new in (call.query, call.key))
    return query, key, cached_key


# -- rows whose real tokens are not one run at the end ---------------------------------------------------------------


def _real_last(call: LayerCall) -> Tensor:
    """The columns of every row in an order that puts padding first and leaves real tokens in theirs, ``[B, T]``."""
    return (call.position >= 0).to(torch.int32).argsort(dim=1, stable=True)


def _in_order(part: Tensor, order: Tensor) -> Tensor:
    """``part [B, H, T, D]`` with its columns in ``order [B, T]``."""
    return part.gather(2, order[:, None, :, None].expand_as(part))


def _put_back(part: Tensor, order: Tensor) -> Tensor:
    """The inverse of :func:`_in_order`."""
    return _in_order(part, order.argsort(dim=1))
