"""The policies in float64, written from their definitions, for one row and one key/value head.

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


# -- what was attended to: SnapKV, TOVA, H2O; and the baseline -------------------------------------------------------
# Queries here are rotated, ``[G, N, D]`` at ``query_positions [N]``: as attention takes them.


def attention_paid(
    keys: Tensor,
    positions: Tensor,
    queries: Tensor,
    query_positions: Tensor,
    scale: float,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """``[G, N, T]``: the softmax of every query over the tokens that do not stand behind it, one query at a time."""
    keys = keys.to(dtype)
    paid = torch.zeros(*queries.shape[:2], keys.shape[0], dtype=dtype)
    for w, position in enumerate(query_positions.tolist()):
        seen = positions <= position
        for g in range(queries.shape[0]):
            logits = scale * (keys[seen] * queries[g, w].to(dtype)).sum(-1)
            weights = (logits - logits.max()).exp()
            paid[g, w, seen] = weights / weights.sum()
    return paid


def snap_kv(
    keys: Tensor,
    positions: Tensor,
    queries: Tensor,
    query_positions: Tensor,
    *,
    kernel: int = 5,
    scale: float,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Mean over the window, then of ``kernel`` neighbors before the window, then over the heads; the window +inf."""
    paid = attention_paid(keys, positions, queries, query_positions, scale, dtype).mean(1)  # [G, T]
    before = int((positions < query_positions.min()).sum())  # positions rise
    scores = torch.full((keys.shape[0],), torch.inf, dtype=dtype)
    reach = kernel // 2
    for t in range(before):
        near = paid[:, max(0, t - reach) : min(before, t + reach + 1)]
        scores[t] = (near.sum(1) / kernel).mean()
    return scores


def tova(keys: Tensor, positions: Tensor, query: Tensor, *, scale: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """Of ``keys [Hkv, T, D]`` and the newest query ``[H, D]``: the mean over all heads ``[T]``; the newest +inf."""
    group = query.shape[0] // keys.shape[0]
    newest = positions[-1:]
    paid = [
        attention_paid(keys[h // group], positions, query[h : h + 1, None], newest, scale, dtype)[0, 0]
        for h in range(query.shape[0])
    ]
    return torch.cat([torch.stack(paid).mean(0)[:-1], torch.full((1,), torch.inf, dtype=dtype)])


def h2o(keys: Tensor, positions: Tensor, queries: Tensor, query_positions: Tensor, scale: float) -> tuple[Tensor, ...]:
    """What one call adds to every token: the mass ``[T]`` that it received, and how many queries stand not before."""
    mass = attention_paid(keys, positions, queries, query_positions, scale).sum(1).mean(0)
    return mass, (query_positions[None] >= positions[:, None]).sum(1)


def random(positions: Tensor, head: int, layer: int = 0, seed: int = 0) -> Tensor:
    """A fraction of 1 per token, from a chain of 32-bit mixing steps in Python's integers."""

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x21F0AAAD % 2**32
        x ^= x >> 15
        x = x * 0x735A2D97 % 2**32
        return x ^ (x >> 15)

    base = mix(mix(mix(seed) ^ layer) ^ head)
    return torch.tensor([(mix(base ^ p) // 2**8) / 2**24 for p in positions.tolist()], dtype=torch.float64)
