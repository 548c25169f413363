"""PyTorch's CPU flash attention, with its preconditions met, and the pieces that replace masks.

The kernel takes a whole block of keys or a causal square. Everything else (valid ranges, causal masks of another
alignment) is cut into such pieces and put together by log-sum-exp, so that no large mask is ever built and no slot
outside the valid range is read. A few queries over a long cache get a mask after all: it is small beside the keys, and
the rounding of a log-sum-exp, which would scale the parts, stays out of the result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_MIN_SPLIT = 512  # keys; the kernel's own block
_FEW_QUERIES = 16  # of a decode step
_MIN_SAVED = (
    150_000  # numbers of keys that a core is spared, for 16 rows: about 0.1 ms, what splitting and merging costs
)


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
    pieces: list[Piece] = []
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
    query, key, value = _rows(query), _rows(key), _rows(value)
    if causal:  # heads of a group side by side: the mask goes by the query's index
        out, lse = _FORWARD(*_by_group(query, key, value), 0.0, True, scale=scale)
    else:  # heads of a group one after the other, as if they were more queries: the keys are read once
        out, lse = forward_rows(query.flatten(2, 3), key, value, scale)
    out = out.reshape(batch, kv_heads, groups, queries, -1)[..., :value_dim]
    return out, lse.reshape(batch, kv_heads, groups, queries)


def takes_as_is(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """One head dim, its elements neighbors, and queries whose heads fold into rows by a view."""
    return query.shape[3] == value.shape[3] and query.is_contiguous() and key.stride(3) == value.stride(3) == 1


def forward_rows(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """``query [B, Hkv, rows, D]``, all rows against all keys, as :func:`takes_as_is` wants them."""
    size = _rows_per_call(query)
    if query.shape[2] <= size:
        return _forward_split(query, key, value, scale)
    parts = [_forward_split(rows, key, value, scale) for rows in query.split(size, dim=2)]
    out, lse = (torch.cat(pair, dim=2) for pair in zip(*parts, strict=True))
    return out, lse


def takes_mask(query: Tensor, key: Tensor, value: Tensor, first: int) -> bool:
    """A few queries, each of which sees keys before the diagonal, and heads enough that no core waits for work."""
    queries = query.shape[3]
    if not (1 < queries <= _FEW_QUERIES and 1 < first <= key.shape[2] - queries + 1):
        return False
    rows = query.flatten(2, 3)
    return _count_splits(rows[:, :, : _rows_per_call(rows)], key, value) == 1


def forward_masked(query: Tensor, key: Tensor, value: Tensor, first: int, scale: float) -> tuple[Tensor, Tensor]:
    """Query ``i`` sees the first ``i + first`` keys; arguments and results as :func:`forward`'s, in one call."""
    batch, kv_heads, groups, queries, _ = query.shape
    value_dim = value.shape[3]
    query, scale = _with_positive_scale(query, scale)
    query, key, value = _same_width(query, key, value)
    query, key, value = _rows(query).flatten(2, 3), _rows(key), _rows(value)
    hidden = torch.arange(key.shape[2]) >= torch.arange(queries)[:, None] + first
    mask = query.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf")).repeat(groups, 1)
    size = _rows_per_call(query)
    blocks = zip(query.split(size, dim=2), mask.split(size), strict=True)
    parts = [_FORWARD(rows, key, value, 0.0, False, attn_mask=part[None, None], scale=scale) for rows, part in blocks]
    out, lse = (torch.cat(pair, dim=2) for pair in zip(*parts, strict=True))
    return out.view(batch, kv_heads, groups, queries, -1)[..., :value_dim], lse.view(batch, kv_heads, groups, queries)


def _rows_per_call(query: Tensor) -> int:
    """How many rows to give the kernel at once: 64 or more bfloat16 rows make it repack keys and values.

    That pays only for many rows. Measured with 8,192 keys on a machine with bfloat16 matrix units, a row of 64, 128,
    256, 1,024 took 3.2, 2.1, 1.3, 0.5 times as long as in blocks of 32 at head dim 576, and 1.2, 1.0, 0.8, 0.5 times
    at 128.
    """
    rows, width = query.shape[2:]
    pays = rows >= 128 if width <= 256 else rows >= 512
    return rows if query.dtype != torch.bfloat16 or rows < 64 or pays else 32


def _count_splits(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Into how many parts to split the keys so that every core has as much to do, where that saves more than it costs.

    The kernel gives a core whole heads and blocks of queries, never a part of the keys.
    """
    batch, kv_heads, queries, dim = query.shape
    keys, threads = key.shape[2], torch.get_num_threads()
    work = batch * kv_heads * keys * dim * max(queries, 16) // 16
    adjacent = batch == 1 or all(t.stride(0) == kv_heads * t.stride(1) for t in (key, value))
    if threads == 1 or work < _MIN_SAVED or not adjacent:
        return 1
    block = 256 if queries >= 768 else 64 if queries >= 192 else 32  # the kernel's blocks of queries
    blocks = batch * kv_heads * -(-queries // block)
    shares = [
        blocks * n / (-(-blocks * n // threads) * threads) for n in range(1, 2 * threads + 1)
    ]  # of cores' time used
    best, best_share = 1, shares[0]
    for splits, share in enumerate(shares[: keys // _MIN_SPLIT], 1):
        if share > best_share + 0.05:
            best, best_share = splits, share
    return best if work * (1 / shares[0] - 1 / best_share) / threads >= _MIN_SAVED else 1


def _forward_split(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One block ``[B, Hkv, rows, D]`` with its keys split over the kernel's batch dims, and merged."""
    splits = _count_splits(query, key, value)
    if splits == 1:
        return _FORWARD(query, key, value, 0.0, False, scale=scale)
    each = key.shape[2] // splits
    even = each * splits
    parts = [t[:, :, :even].flatten(0, 1).unflatten(1, (splits, each)) for t in (key, value)]
    repeated = query.flatten(0, 1)[:, None].expand(-1, splits, -1, -1)
    out, lse = _FORWARD(repeated, *parts, 0.0, False, scale=scale)  # [B * Hkv, splits, rows, D]
    if even < key.shape[2]:
        rest = [t[:, :, even:].flatten(0, 1)[:, None] for t in (key, value)]
        rest_out, rest_lse = _FORWARD(repeated[:, :1], *rest, 0.0, False, scale=scale)
        out, lse = torch.cat([out, rest_out], dim=1), torch.cat([lse, rest_lse], dim=1)
    total = torch.logsumexp(lse, dim=1)
    weights = torch.exp(lse - total[:, None])[..., None]
    return (weights * out).sum(1).to(out.dtype).view(query.shape), total.view(query.shape[:3])


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
    """The kernel reads rows as if their elements were neighbors."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two finite partial results over disjoint keys as one."""
    total = torch.logaddexp(lse, other_lse)
    ours, theirs = (lse - total).exp_()[..., None], (other_lse - total).exp_()[..., None]
    return (out * ours).addcmul_(other_out, theirs).to(out.dtype), total
