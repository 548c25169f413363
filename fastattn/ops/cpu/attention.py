"""Attention and its gradient on a CPU, from whole blocks and causal squares."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fastattn.ops._features import Features, add_sinks
from fastattn.ops._lengths import checked
from fastattn.ops._outputs import accumulator_dtype, empty_out_and_lse
from fastattn.ops.cpu import _blocks, _flash


class Part(NamedTuple):
    """Batch rows whose queries attend to the same keys; query ``i`` stands at key ``i + first`` of them."""

    rows: slice
    queries: slice
    keys: slice
    first: int


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    scale: float,
    key_start: Tensor | None,
    lengths: Tensor | None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See :func:`fastattn.ops.attention`."""
    features = Features(window, softcap, sinks, alibi_slopes)
    out, lse = empty_out_and_lse(query, value.shape[3])
    out.zero_()
    lse.fill_(float("-inf"))
    kv_heads = key.shape[1]
    grouped_query, grouped_out, grouped_lse = (t.unflatten(1, (kv_heads, -1)) for t in (query, out, lse))
    for rows, queries, keys, first in _parts(query, key, key_start, lengths, cu_seqlens_q, cu_seqlens_k):
        arguments = (
            grouped_query[rows, ..., queries, :],
            key[rows, :, keys],
            value[rows, :, keys],
            grouped_out[rows, ..., queries, :],
            grouped_lse[rows, ..., queries],
        )
        if features.by_score:
            _blocks.forward(*arguments, first=first, causal=causal, scale=scale, features=features)
        else:
            attend_range(*arguments, first=first + 1 if causal else keys.stop - keys.start + 1, scale=scale)
    if sinks is not None:
        add_sinks(out, lse, sinks)
    return out, lse


def attend_range(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    first: int,
    scale: float,
) -> None:
    """Query ``i`` of ``[B, Hkv, G, Sq, D]`` sees the first ``i + first`` keys; writes into ``out`` and ``lse``.

    Queries that see no key keep what ``out`` and ``lse`` hold. ``out`` may be narrower than ``value``: it then takes
    the first columns.
    """
    if query.shape[:-1].numel() == 0:
        return
    if query.shape[3] > 1 and _flash.takes_mask(query, key, value, first):
        result = _flash.forward_masked(query, key, value, first, scale)
        out[...], lse[...] = result[0][..., : out.shape[4]], result[1]
        return
    partial: tuple[Tensor, Tensor] | None = None
    for q0, q1, k0, k1, causal in _flash.cut(query.shape[3], key.shape[2], first):
        result = _flash.forward(query[..., q0:q1, :], key[:, :, k0:k1], value[:, :, k0:k1], causal, scale)
        if partial is not None and k0 > 0:  # the square after the keys before it: the same queries
            result = _flash.merge(*partial, *result)
        partial = result
        out[..., q0:q1, :], lse[..., q0:q1] = result[0][..., : out.shape[4]], result[1]


def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    key_start: Tensor | None,
    lengths: Tensor | None,
    window: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`attention`: the forward's pieces again, each given output and lse over all its keys.

    A sink needs no mention: it is part of ``lse``, and it has no value.
    """
    features = Features(window, softcap, None, alibi_slopes)
    dtype = accumulator_dtype(query.dtype) if features.by_score else query.dtype
    grads = [torch.zeros(t.shape, dtype=dtype) for t in (query, key, value)]
    kv_heads = key.shape[1]
    grouped = [t.unflatten(1, (kv_heads, -1)) for t in (grad_out, query, out, lse, grads[0])]
    for rows, queries, keys, first in _parts(query, key, key_start, lengths, cu_seqlens_q, cu_seqlens_k):
        part_grad_out, part_query, part_out, part_lse, grad_query = (t[rows, :, :, queries] for t in grouped)
        part_key, part_value, grad_key, grad_value = (t[rows, :, keys] for t in (key, value, *grads[1:]))
        part_grads = grad_query, grad_key, grad_value
        arguments = part_grad_out, part_query, part_key, part_value, part_out, part_lse, part_grads
        if features.by_score:
            _blocks.backward(*arguments, first=first, causal=causal, scale=scale, features=features)
        else:
            _add_gradients(*arguments, first=first + 1 if causal else keys.stop - keys.start + 1, scale=scale)
    grad_query, grad_key, grad_value = (grad.to(query.dtype) for grad in grads)
    return grad_query, grad_key, grad_value


def _add_gradients(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    *,
    first: int,
    scale: float,
) -> None:
    """Adds the gradients of :func:`attend_range` to ``grads``."""
    for q0, q1, k0, k1, square in _flash.cut(query.shape[3], key.shape[2], first):
        piece = _flash.backward(
            grad_out[..., q0:q1, :],
            query[..., q0:q1, :],
            key[:, :, k0:k1],
            value[:, :, k0:k1],
            out[..., q0:q1, :],
            lse[..., q0:q1],
            square,
            scale,
        )
        grads[0][..., q0:q1, :] += piece[0]
        grads[1][:, :, k0:k1] += piece[1]
        grads[2][:, :, k0:k1] += piece[2]


def _parts(
    query: Tensor,
    key: Tensor,
    key_start: Tensor | None,
    lengths: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> Iterator[Part]:
    """Packed rows one by one, else neighboring rows with the same valid keys; none without a query or a key."""
    batch, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    if query.shape[:-1].numel() == 0:
        return
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        bounds = [list(itertools.pairwise(cu)) for cu in (cu_seqlens_q.tolist(), cu_seqlens_k.tolist())]
        for (q0, q1), (k0, k1) in zip(*bounds, strict=True):
            if q0 < q1 and k0 < k1:
                yield Part(slice(0, 1), slice(q0, q1), slice(k0, k1), (k1 - k0) - (q1 - q0))
        return
    starts = [0] * batch if key_start is None else checked("key_start", key_start, keys)
    ends = [keys] * batch if lengths is None else checked("lengths", lengths, keys)
    ranges = list(zip(starts, ends, strict=True))
    begin = 0
    for row in range(1, batch + 1):
        if row < batch and ranges[row] == ranges[begin]:
            continue
        start, end = ranges[begin]
        if start < end:
            yield Part(slice(begin, row), slice(0, queries), slice(start, end), keys - queries - start)
        begin = row
