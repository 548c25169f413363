"""PyTorch's CPU flash attention, with its preconditions met, and the pieces that replace masks.

The kernel takes a whole block of keys or a causal square. Everything else (valid ranges, causal masks of another
alignment) is cut into such pieces and put together by log-sum-exp, so that no mask is ever built and no slot
outside the valid range is read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class Piece(NamedTuple):
    """Queries ``[q0, q1)`` against keys ``[k0, k1)``: all of them, or a causal square."""

    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool


def cut(queries: int, keys: int, first: int) -> list[Piece]:
    """Pieces in which query ``i`` sees the first ``clamp(i + first, 0, keys)`` keys; queries that see none are in none.

    At most three: the diagonal square, the keys before it, and the queries that see everything.
    """
    seeing = min(max(1 - first, 0), queries)
    full = min(max(keys - first + 1, seeing), queries)
    prefix = seeing + first - 1  # keys that every seeing query sees, besides its part of the square
    pieces = []
    if keys == 0:
        return pieces
    if seeing < full:
        if full - seeing == 1:  # a square of one is a block
            pieces.append(Piece(seeing, full, 0, prefix + 1, False))
        else:
            if prefix > 0:
                pieces.append(Piece(seeing, full, 0, prefix, False))
            pieces.append(Piece(seeing, full, prefix, prefix + full - seeing, True))
    if full < queries:
        pieces.append(Piece(full, queries, 0, keys, False))
    return pieces


def forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """``query [B, Hkv, G, Sq, Dqk]`` against ``key [B, Hkv, Sk, Dqk]``, ``value [B, Hkv, Sk, Dv]``, none empty.

    Returns ``out [B, Hkv, G, Sq, Dv]`` and ``lse [B, Hkv, G, Sq]`` of any strides.
    """
    batch, kv_heads, groups, queries, _ = query.shape
    value_dim = value.shape[3]
    query, scale = _with_positive_scale(query, scale)
    query, key, value = _same_width(query, key, value)
    if causal:  # heads of a group side by side: the mask goes by the query's index
        query, key, value = _by_group(query, key, value)
    else:  # heads of a group one after the other, as if they were more queries: the keys are read once
        query = query.flatten(2, 3)
    out, lse = _FORWARD(_rows(query), _rows(key), _rows(value), 0.0, causal, scale=scale)
    out = out.reshape(batch, kv_heads, groups, queries, -1)[..., :value_dim]
    return out, lse.reshape(batch, kv_heads, groups, queries)


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one piece, given output and lse over *all* keys of its queries; shapes as in :func:`forward`."""
    batch, kv_heads, groups, queries, dim = query.shape
    keys, value_dim = value.shape[2:]
    grad_out, out = _widen(grad_out, max(dim, value_dim)), _widen(out, max(dim, value_dim))
    sign = -1.0 if scale < 0 else float(scale > 0)
    query, scale = _with_positive_scale(query, scale)
    query, key, value = _by_group(*_same_width(query, key, value))
    grad_out, out, lse = (t.flatten(0, 1) for t in (grad_out, out, lse))
    grads = _BACKWARD(
        _rows(grad_out), _rows(query), _rows(key), _rows(value), _rows(out), lse, 0.0, causal, scale=scale
    )
    grad_query = grads[0].view(batch, kv_heads, groups, queries, -1)[..., :dim]
    if sign != 1.0:
        grad_query = sign * grad_query
    grad_key, grad_value = (grad.view(batch, kv_heads, groups, keys, -1).sum(2) for grad in grads[1:])
    return grad_query, grad_key[..., :dim], grad_value[..., :value_dim]


def _with_positive_scale(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """The kernel masks with -inf before it scales, which a scale of 0 or less turns into NaN and +inf."""
    if scale > 0:
        return query, scale
    return (-query, -scale) if scale < 0 else (torch.zeros_like(query), 1.0)


def _by_group(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``[B * Hkv, G, tokens, D]``, keys and values repeated over the group without a copy."""
    groups = query.shape[2]
    key, value = (t.flatten(0, 1)[:, None].expand(-1, groups, -1, -1) for t in (key, value))
    return query.flatten(0, 1), key, value


def _same_width(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel wants one head dim: zeros add nothing to a product."""
    width = max(query.shape[-1], value.shape[-1], 1)
    return _widen(query, width), _widen(key, width), _widen(value, width)


def _widen(tensor: Tensor, width: int) -> Tensor:
    missing = width - tensor.shape[-1]
    return functional.pad(tensor, (0, missing)) if missing else tensor


def _rows(tensor: Tensor) -> Tensor:
    """The kernel reads rows as if their elements were neighbours."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two finite partial results over disjoint keys as one."""
    total = torch.logaddexp(lse, other_lse)
    ours, theirs = (lse - total).exp_()[..., None], (other_lse - total).exp_()[..., None]
    return (out * ours).addcmul_(other_out, theirs).to(out.dtype), total
