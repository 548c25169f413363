"""The four policies in float64, written from their definitions, for one row and one key/value head.

Nothing here uses fastattn. Rotations are explicit matrices, averages explicit means over positions. Keys are
``[T, D]``, values ``[T, Dv]``, positions int ``[T]``, queries before rotation ``[G, N, D]``; all of them valid.
``dtype=torch.float32`` gives the same computation in plain float32: its distance is what float32 costs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rotations(
    positions: Tensor,
    dim: int,
    inv_freq: Tensor,
    interleave: bool = False,
    start: int = 0,
    attention_factor: float = 1.0,
) -> Tensor:
    """The rotation matrices ``[P, dim, dim]`` of ``positions [P]``: a rotated vector is ``matrix @ vector``."""
    pairs = inv_freq.shape[0]
    angle = torch.outer(positions.double(), inv_freq.double())
    cos, sin = attention_factor * angle.cos(), attention_factor * angle.sin()
    matrix = torch.eye(dim, dtype=torch.float64).repeat(positions.shape[0], 1, 1)
    for f in range(pairs):
        first, second = (2 * f, 2 * f + 1) if interleave else (f, f + pairs)
        first, second = first + start, second + start
        matrix[:, first, first] = cos[:, f]
        matrix[:, first, second] = -sin[:, f]
        matrix[:, second, first] = sin[:, f]
        matrix[:, second, second] = cos[:, f]
    return matrix


def mean_rotation(next_position: int, n_future: int, dim: int, inv_freq: Tensor, **rotary: float) -> Tensor:
    """The mean ``[dim, dim]`` of the rotations of the ``n_future`` positions from ``next_position`` on."""
    ahead = torch.arange(next_position, next_position + n_future)
    return rotations(ahead, dim, inv_freq, **rotary).mean(0)  # type: ignore[arg-type]


def knorm(keys: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Minus the norm."""
    return -_norm(keys.to(dtype))


def key_diff(keys: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Minus the cosine to the mean of the normalized keys; the cosine with a zero vector is 0."""
    units = _unit(keys.to(dtype))
    anchor = _unit(units.sum(0) / units.shape[0])
    return -(units * anchor).sum(1)


def _norm(vectors: Tensor) -> Tensor:
    return (vectors**2).sum(-1).sqrt()


def _unit(vectors: Tensor) -> Tensor:
    norm = _norm(vectors)[..., None]
    return torch.where(norm > 0, vectors / norm, 0.0)


def streaming_llm(positions: Tensor, n_sink: int = 4) -> Tensor:
    """The position; sinks above all."""
    return protect(positions.double(), positions, n_sink)


def protect(scores: Tensor, positions: Tensor, n_sink: int = 0, n_recent: int = 0, next_position: int = 0) -> Tensor:
    """``scores`` with +inf for positions below ``n_sink`` and for the ``n_recent`` positions before the next."""
    protected = positions < n_sink
    if n_recent:
        protected = protected | (positions >= next_position - n_recent)
    return torch.where(protected, torch.inf, scores.double())


def expected_attention(
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    queries: Tensor,
    query_positions: Tensor,
    next_position: int,
    inv_freq: Tensor,
    *,
    interleave: bool = False,
    start: int = 0,
    attention_factor: float = 1.0,
    scale: float | None = None,
    n_sink: int = 4,
    epsilon: float = 0.0,
    use_value_norm: bool = True,
    use_covariance: bool = True,
    n_future: int = 512,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Attention expected of the next ``n_future`` positions, times the value's norm; sinks +inf.

    Args:
        queries: ``[G, N, D]`` before rotation, at ``query_positions [N]``; those below ``n_sink`` do not count.
        next_position: the row's last position + 1.
        inv_freq: ``[m]``; ``interleave``, ``start`` and ``attention_factor`` as in :func:`rotations`.
        scale: of the attention's softmax; ``D ** -0.5`` by default.
    """
    keys, values = keys.to(dtype), values.to(dtype)
    dim = keys.shape[1]
    scale = dim**-0.5 if scale is None else scale
    samples = queries.to(dtype)[:, query_positions >= n_sink]
    if samples.shape[1] == 0:
        return streaming_llm(positions, n_sink)
    scored = positions >= n_sink
    scores = torch.full(positions.shape, torch.inf, dtype=dtype)
    if not scored.any():
        return scores
    turn = mean_rotation(
        next_position, n_future, dim, inv_freq, interleave=interleave, start=start, attention_factor=attention_factor
    ).to(dtype)
    keys, values = keys[scored], values[scored]
    expected = torch.zeros(keys.shape[0], dtype=dtype)
    for head in samples:
        mean = head.mean(0)
        z = scale * (keys @ (turn @ mean))
        if use_covariance and head.shape[0] > 1:
            covariance = torch.cov(head.T, correction=0).view(dim, dim)
            ahead = turn @ covariance @ turn.T
            z = z + scale**2 / 2 * torch.einsum("td,de,te->t", keys, ahead, keys)
        expected += torch.softmax(z, 0) / samples.shape[0]
    if use_value_norm:
        expected = (expected + epsilon) * _norm(values)
    scores[scored] = expected
    return scores


def keep(scores: Tensor, budget: int) -> list[int]:
    """Ascending indices of the ``budget`` best of ``scores [T]``: of equal ones the newer, NaN lowest."""
    values = scores.tolist()

    def rank(index: int) -> tuple[bool, float, int]:
        value = values[index]
        return (False, 0.0, index) if math.isnan(value) else (True, value, index)

    return sorted(sorted(range(len(values)), key=rank)[-budget:])
