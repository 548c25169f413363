"""Scores of tokens that are spread over ranks: what a policy needs of all of them costs a small collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from fastattn import ops
from fastattn.distributed.exchange import total, total_logsumexp
from fastattn.modules.policies import (
    TOVA,
    CacheState,
    ExpectedAttention,
    KeyDiff,
    Knorm,
    Policy,
    Protect,
    QueryWindow,
    Random,
    SnapKV,
    StreamingLLM,
)
from fastattn.modules.policies.protecting import protect

# Of the tokens of all ranks in time order, ``[B, Hkv, G]``: scores and which of them exist -> scores.
Finish = Callable[[Tensor, Tensor], Tensor]


def check_policy(policy: Policy) -> None:
    """Raise ValueError for a policy that cannot score a part of the tokens."""
    inner = policy
    while isinstance(inner, Protect):
        inner = inner.policy
    known = type(inner) in _SCORES or getattr(inner, "depends_on", None) == "tokens"
    if known and not (inner.rerotate or inner.slot_state):
        return
    raise ValueError(
        f"policy must be one of {', '.join(sorted(kind.__name__ for kind in _SCORES))} (without rerotate), or one of "
        f"your own whose scores depend on each token by itself (depends_on = 'tokens'), where tokens are spread over "
        f"ranks, got {policy!r}"
    )


def local_scores(policy: Policy, state: CacheState, mesh: DeviceMesh) -> tuple[Tensor, Finish]:
    """The scores of this rank's tokens, and what is left to do once those of all ranks are together."""
    if isinstance(policy, Protect):
        scores, finish = local_scores(policy.policy, state, mesh)
        if finish is not _done:
            raise ValueError(f"Protect cannot hold another policy's window where tokens are spread, got {policy!r}")
        return protect(scores, state, policy.n_sink, policy.n_recent), finish
    scored: tuple[Tensor, Finish] = _SCORES.get(type(policy), _by_itself)(policy, state, mesh)
    return scored


def _done(scores: Tensor, valid: Tensor) -> Tensor:
    return scores


def _by_itself(policy: Policy, state: CacheState, mesh: DeviceMesh) -> tuple[Tensor, Finish]:
    return policy.score(state), _done


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _key_diff(policy: Any, state: CacheState, mesh: DeviceMesh) -> tuple[Tensor, Finish]:
    keys = _wide(state.keys).masked_fill(~state.valid[..., None], 0.0)
    units = functional.normalize(keys, dim=-1, eps=torch.finfo(keys.dtype).tiny)
    anchor = functional.normalize(total(units.sum(2), mesh), dim=-1, eps=torch.finfo(keys.dtype).tiny)
    return policy._protect(-(units @ anchor[..., None])[..., 0], state), _done


def _logits(query: Tensor, state: CacheState) -> Tensor:
    """``[B, Hkv, G, N, W]`` of queries ``[B, H, N, D]``."""
    grouped = _wide(query).unflatten(1, (state.keys.shape[1], -1))
    keys = _wide(state.keys).masked_fill(~state.valid[..., None], 0.0)
    return state.scale * (grouped @ keys[:, :, None].mT)


def _mass(state: CacheState, window: QueryWindow, mesh: DeviceMesh) -> Tensor:
    """:func:`fastattn.ops.attention_mass` over the tokens of all ranks: its softmax is theirs."""
    logits = _logits(window.rotated, state)
    seen = state.valid[:, :, None] & (state.positions[:, :, None] <= window.positions[:, None, :, None])
    logits = logits.masked_fill(~seen[:, :, None], -torch.inf)
    lse = total_logsumexp(logits.logsumexp(-1), mesh)
    weights = (logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return weights.sum(3).mean(2)


def _tova(policy: Any, state: CacheState, mesh: DeviceMesh) -> tuple[Tensor, Finish]:
    # Heads hold different tokens on a rank, but the same ones over all ranks: the mean over heads is taken there.
    newest = state.positions >= (state.next_position - 1)[:, None, None]
    mass = _mass(state, state.newest_queries(), mesh)

    def finish(scores: Tensor, valid: Tensor) -> Tensor:
        return scores.mean(1, keepdim=True).expand_as(scores)

    return mass.masked_fill(newest, torch.inf), finish


def _snap_kv(policy: Any, state: CacheState, mesh: DeviceMesh) -> tuple[Tensor, Finish]:
    window = state.newest_queries()
    mean = _mass(state, window, mesh) / window.valid.sum(1).clamp(min=1)[:, None, None]
    last = torch.iinfo(torch.int32).max
    first = window.positions.masked_fill(~window.valid, last).amin(1)[:, None, None]
    mean = mean.masked_fill(state.positions >= first, torch.inf)

    def finish(scores: Tensor, valid: Tensor) -> Tensor:
        before = valid & (scores != torch.inf)
        smooth = functional.avg_pool1d(scores.masked_fill(~before, 0.0), policy.kernel, 1, policy.kernel // 2)
        return smooth.masked_fill(~before, torch.inf)

    return mean, finish


def _expected(policy: Any, state: CacheState, mesh: DeviceMesh) -> tuple[Tensor, Finish]:
    window = state.call if state.call is not None else state.newest_queries()
    valid = window.valid & (window.positions >= policy.n_sink)
    ahead, first = state.rotary.average, state.next_position  # type: ignore[union-attr]
    mean, cov = ops.query_moments(state.before_rotation(window), valid)
    mean = ahead(mean, first, policy.n_future_positions)
    logits = _logits(mean[:, :, None], state)[..., 0, :]  # [B, Hkv, G, W]
    if policy.use_covariance:
        cov = ahead(ahead(cov, first, policy.n_future_positions).mT, first, policy.n_future_positions)
        keys = _wide(state.keys).masked_fill(~state.valid[..., None], 0.0)[:, :, None]
        spread = ((keys @ cov.unflatten(1, (state.keys.shape[1], -1)).to(keys.dtype)) * keys).sum(-1)
        logits = logits + 0.5 * state.scale**2 * spread
    sink = state.positions < policy.n_sink
    logits = logits.masked_fill((sink | ~state.valid)[:, :, None], -torch.inf)
    lse = total_logsumexp(logits.logsumexp(-1), mesh)
    expected = (logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp().mean(2)
    if policy.use_value_norm:
        expected = (expected + policy.epsilon) * _wide(state.values).norm(dim=-1)
    recency = state.positions.to(expected.dtype)
    score = torch.where(valid.any(1)[:, None, None], expected, recency)
    return score.masked_fill(sink, torch.inf), _done


_SCORES: dict[type[Policy], Callable[..., tuple[Tensor, Finish]]] = {
    Knorm: _by_itself,
    StreamingLLM: _by_itself,
    Random: _by_itself,
    KeyDiff: _key_diff,
    TOVA: _tova,
    SnapKV: _snap_kv,
    ExpectedAttention: _expected,
}


def best_of_all(gathered: Tensor, dtype: torch.dtype, finish: Finish, budget: int, due: Tensor) -> Tensor:
    """Which tokens of all ranks stay: bool ``[ranks, B, Hkv, W]``, the same on every rank.

    Of the rows and heads that are ``due``, bool ``[B, Hkv]``, the ``budget`` best: of equal scores the higher position,
    NaN lowest. The others keep what they have.

    Args:
        gathered: scores and positions of all ranks, ``[ranks, 2, B, Hkv, W]`` (:func:`pack`); position -1 where
            there is no token.
        dtype: of the scores.
    """
    every, where = unpack(gathered, dtype)
    ranks, _, _, width = where.shape
    positions = where.permute(1, 2, 0, 3).flatten(2)  # [B, Hkv, ranks * W]
    order = positions.argsort(dim=2, stable=True)  # in time; what does not exist comes first
    valid = positions.gather(2, order) >= 0
    scores = every.permute(1, 2, 0, 3).flatten(2).gather(2, order)
    scores = finish(scores.masked_fill(~valid, 0.0), valid)
    # By existence, numbers before NaN, score, time: the least significant is sorted by first.
    rank = scores.masked_fill(scores.isnan(), -torch.inf).argsort(dim=2, stable=True)
    kind = torch.where(valid, 2 - scores.isnan().int(), 0)
    rank = rank.gather(2, kind.gather(2, rank).argsort(dim=2, stable=True))
    best = torch.zeros_like(valid).scatter(2, rank[..., -budget:], True) & valid
    keep = torch.zeros_like(valid).scatter(2, order, torch.where(due[..., None], best, valid))
    return keep.unflatten(2, (ranks, width)).permute(2, 0, 1, 3)


def pack(scores: Tensor, positions: Tensor) -> Tensor:
    """Scores and positions as one tensor of bits, ``[2, B, Hkv, W]``: one collective brings both."""
    kind = torch.int64 if scores.dtype == torch.float64 else torch.int32
    return torch.stack([scores.contiguous().view(kind), positions.to(kind)])


def unpack(packed: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The inverse of :func:`pack`, of all ranks."""
    return packed[:, 0].contiguous().view(dtype), packed[:, 1]
