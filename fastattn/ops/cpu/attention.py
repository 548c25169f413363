"""Attention and its gradient on a CPU, from whole blocks and causal squares."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fastattn.ops._outputs import empty_out_and_lse
from fastattn.ops.cpu import _flash


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    scale: float,
    key_start: Tensor | None,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See :func:`fastattn.ops.attention`."""
    out, lse = empty_out_and_lse(query, value.shape[3])
    out.zero_()
    lse.fill_(float("-inf"))
    kv_heads = key.shape[1]
    grouped_query, grouped_out, grouped_lse = (t.unflatten(1, (kv_heads, -1)) for t in (query, out, lse))
    for rows, start, end in _rows_by_range(query, key, key_start, lengths):
        attend_range(
            grouped_query[rows],
            key[rows, :, start:end],
            value[rows, :, start:end],
            grouped_out[rows],
            grouped_lse[rows],
            first=_first(query, key, causal, start),
            scale=scale,
        )
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`attention`: the forward's pieces again, each given output and lse over all its keys."""
    grads = tuple(torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (query, key, value))
    grad_query, grad_key, grad_value = grads
    kv_heads = key.shape[1]
    grouped = [t.unflatten(1, (kv_heads, -1)) for t in (grad_out, query, out, lse, grad_query)]
    for rows, start, end in _rows_by_range(query, key, key_start, lengths):
        row_grad_out, row_query, row_out, row_lse, row_grad_query = (t[rows] for t in grouped)
        first = _first(query, key, causal, start)
        for q0, q1, k0, k1, square in _flash.cut(query.shape[2], end - start, first):
            keys = slice(start + k0, start + k1)
            piece = _flash.backward(
                row_grad_out[..., q0:q1, :],
                row_query[..., q0:q1, :],
                key[rows, :, keys],
                value[rows, :, keys],
                row_out[..., q0:q1, :],
                row_lse[..., q0:q1],
                square,
                scale,
            )
            row_grad_query[..., q0:q1, :] += piece[0]
            grad_key[rows, :, keys] += piece[1]
            grad_value[rows, :, keys] += piece[2]
    return grad_query, grad_key, grad_value


def _first(query: Tensor, key: Tensor, causal: bool, start: int) -> int:
    """How many keys from ``start`` on the first query sees; without a mask, all."""
    return key.shape[2] - query.shape[2] + 1 - start if causal else key.shape[2] + 1


def _rows_by_range(
    query: Tensor, key: Tensor, key_start: Tensor | None, lengths: Tensor | None
) -> Iterator[tuple[slice, int, int]]:
    """Neighbouring rows with the same valid keys ``[start, end)``; rows without a key are left out."""
    batch, keys = key.shape[0], key.shape[2]
    starts = [0] * batch if key_start is None else key_start.clamp(min=0).tolist()
    ends = [keys] * batch if lengths is None else lengths.clamp(max=keys).tolist()
    ranges = list(zip(starts, ends, strict=True))
    if query.shape[:-1].numel() == 0:
        return
    begin = 0
    for row in range(1, batch + 1):
        if row < batch and ranges[row] == ranges[begin]:
            continue
        start, end = ranges[begin]
        if start < end:
            yield slice(begin, row), start, end
        begin = row
