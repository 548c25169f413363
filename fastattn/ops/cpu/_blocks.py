"""Attention whose scores change or drop out one by one (windows, soft caps, ALiBi), block by block.

PyTorch's CPU kernel has neither a window nor a soft cap. A block of queries is multiplied with the keys that one of
them sees, so that a window costs its width and not the square; scores and weights of a block are float32 (float64).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fastattn.ops._features import Features
from fastattn.ops._outputs import accumulator_dtype

_MOST_SCORES = 1 << 22  # numbers of a block's scores: 16 MiB in float32
_MOST_QUERIES = 256


class Scores(NamedTuple):
    """Scores ``[B, Hkv, G, M, N]`` of a block, -inf where unseen, and tanh of the capped ones."""

    value: Tensor
    tanh: Tensor | None


def score(
    query: Tensor, key: Tensor, scale: float, features: Features, distance: Tensor, causal: bool, seen: Tensor | None
) -> Scores:
    """Scores of ``query [B, Hkv, G, M, D]`` and ``key [B, Hkv, N, D]``, both wide.

    Args:
        query: queries of the heads of a group.
        key: their keys.
        scale: softmax scale.
        features: what to do with a score.
        distance: query's position less the key's, broadcasts to the scores.
        causal: hide keys after the query.
        seen: bool, broadcasts to the scores: what else to hide; None for nothing.
    """
    groups, queries = query.shape[2:4]
    product = scale * (query.flatten(2, 3) @ key.mT).unflatten(2, (groups, queries))
    tanh = None
    if features.softcap > 0:
        tanh = torch.tanh(product / features.softcap)
        product = features.softcap * tanh
    if features.alibi_slopes is not None:
        slopes = features.alibi_slopes.to(product.dtype).view(query.shape[1], groups, 1, 1)
        product = product - slopes * distance.abs()
    hidden = None if seen is None else ~seen
    if causal:
        hidden = distance < 0 if hidden is None else hidden | (distance < 0)
    if features.window > 0:
        far = distance >= features.window
        hidden = far if hidden is None else hidden | far
    return Scores(product if hidden is None else product.masked_fill(hidden, float("-inf")), tanh)


def softmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and log-sum-exp; 0 and -inf where nothing is seen.

    Relative to the largest score, not to the log-sum-exp, whose rounding would scale the weights.
    """
    lse = torch.logsumexp(scores, dim=-1)
    return torch.softmax(scores, dim=-1).masked_fill_((lse == float("-inf"))[..., None], 0.0), lse


def weights(scores: Tensor, lse: Tensor) -> Tensor:
    """``exp(score - lse)``, 0 where nothing is seen."""
    return torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])


def _cut(rows: int, queries: int, keys: int, first: int, causal: bool, window: int) -> Iterator[tuple[int, ...]]:
    """Blocks ``(q0, q1, k0, k1)`` of queries and the keys that they see; query ``i`` stands at ``i + first``."""
    size = _MOST_QUERIES
    while size > 16 and rows * size * min(keys, size + window if window else keys) > _MOST_SCORES:
        size //= 2
    for q0 in range(0, queries, size):
        q1 = min(q0 + size, queries)
        k0 = max(q0 + first - window + 1, 0) if window else 0
        k1 = min(q1 + first, keys) if causal else keys
        if k0 < k1:
            yield q0, q1, k0, k1


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    first: int,
    causal: bool,
    scale: float,
    features: Features,
) -> None:
    """Query ``i`` of ``[B, Hkv, G, Sq, D]`` stands at key ``i + first``; writes ``out`` and ``lse``.

    Queries that see no key keep what ``out`` and ``lse`` hold.
    """
    wide = accumulator_dtype(query.dtype)
    for q0, q1, k0, k1 in _cut(query.shape[:3].numel(), query.shape[3], key.shape[2], first, causal, features.window):
        distance = _distance(q0, q1, k0, k1, first)
        keys, values = key[:, :, k0:k1].to(wide), value[:, :, k0:k1].to(wide)
        scores = score(query[..., q0:q1, :].to(wide), keys, scale, features, distance, causal, None)
        weight, lse[..., q0:q1] = softmax(scores.value)
        out[..., q0:q1, :] = (weight.flatten(2, 3) @ values).unflatten(2, weight.shape[2:4])


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    *,
    first: int,
    causal: bool,
    scale: float,
    features: Features,
) -> None:
    """Adds the gradients of :func:`forward` to ``grads``, which are wide."""
    wide = accumulator_dtype(query.dtype)
    for q0, q1, k0, k1 in _cut(query.shape[:3].numel(), query.shape[3], key.shape[2], first, causal, features.window):
        distance = _distance(q0, q1, k0, k1, first)
        queries, gradient = query[..., q0:q1, :].to(wide), grad_out[..., q0:q1, :].to(wide)
        keys, values = key[:, :, k0:k1].to(wide), value[:, :, k0:k1].to(wide)
        scores = score(queries, keys, scale, features, distance, causal, None)
        weight = weights(scores.value, lse[..., q0:q1])
        rows = gradient.flatten(2, 3)
        grads[2][:, :, k0:k1] += weight.flatten(2, 3).mT @ rows
        delta = (gradient * out[..., q0:q1, :]).sum(-1, keepdim=True)
        grad_score = weight * ((rows @ values.mT).unflatten(2, weight.shape[2:4]) - delta)
        if scores.tanh is not None:
            grad_score = grad_score * (1 - scores.tanh.square())
        grad_score = scale * grad_score.flatten(2, 3)
        grads[0][..., q0:q1, :] += (grad_score @ keys).unflatten(2, weight.shape[2:4])
        grads[1][:, :, k0:k1] += grad_score.mT @ queries.flatten(2, 3)


def _distance(q0: int, q1: int, k0: int, k1: int, first: int) -> Tensor:
    return torch.arange(q0 + first, q1 + first)[:, None] - torch.arange(k0, k1)


def forward_slots(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float,
    features: Features,
) -> None:
    """Queries ``[B, Hkv, G, Sq, D]`` over the slots of a cache, all valid; writes ``out`` and ``lse``.

    With ``causal`` the newest slots are the queries' own, else a query stands one past the newest. ``positions`` is
    ``[B, Hkv, C]``, by default a slot stands at its index.
    """
    wide = accumulator_dtype(query.dtype)
    queries, slots = query.shape[3], key.shape[2]
    k0 = 0
    if features.window > 0 and positions is None:  # those before every query's window
        k0 = max((slots - queries if causal else slots) - features.window + 1, 0)
    if k0 == slots:  # a window of one slot that a query past the newest stands on
        return
    slot = torch.arange(k0, slots)
    where = (slot if positions is None else positions[..., k0:].long())[..., None, None, :]
    keys, values = key[:, :, k0:].to(wide), value[:, :, k0:, : out.shape[4]].to(wide)
    size = max(1, _MOST_SCORES // max(1, query.shape[:3].numel() * slots))
    for q0 in range(0, queries, size):
        q1 = min(q0 + size, queries)
        own = torch.arange(q0, q1) + slots - queries if causal else torch.full((q1 - q0,), slots - 1)
        at = own.clamp(min=k0) - k0  # a query without a slot sees none, wherever it stands
        distance = (where[..., 0, :][..., at] + (0 if causal else 1))[..., None] - where
        seen = slot <= own[:, None] if causal else None
        scores = score(query[..., q0:q1, :].to(wide), keys, scale, features, distance, False, seen).value
        weight, lse[..., q0:q1] = softmax(scores)
        out[..., q0:q1, :] = (weight.flatten(2, 3) @ values).unflatten(2, weight.shape[2:4])
