"""The scores of a policy: what it is shown, when it is asked, and what it may answer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fastattn.modules.kv_cache.call import LayerCall
from fastattn.modules.kv_cache.state import CacheLayer, SlotStore
from fastattn.modules.policies import CacheState, QueryWindow


def policy_scores(
    call: LayerCall,
    store: SlotStore,
    lengths: Tensor,
    min_length: int,
    window: Callable[[], QueryWindow | None],
    call_queries: QueryWindow | None,
) -> Tensor:
    """The policy's scores of ``store``, computed only where something is about to be compressed if possible.

    Args:
        call: the call.
        store: the layer as it was before a step, or the store that the call's prompt was appended to.
        lengths: the store's, but 0 for rows that must not be compressed.
        min_length: rows and heads with as many tokens are about to be compressed.
        window: gives the newest queries, for a policy that looks at them.
        call_queries: the queries of a prompt.

    Returns:
        ``[B, Hkv, C]``.
    """
    policy = call.state.spec.policy
    before = isinstance(store, CacheLayer)

    def score() -> Tensor:
        state = CacheState(
            keys=store.keys,
            values=store.visible_values,
            positions=store.positions,
            lengths=lengths,
            tokens_seen=call.state.tokens_seen + (0 if before else call.real_tokens()),
            next_position=(store.newest_position() if before else call.position.amax(1)).to(torch.int64) + 1,
            scale=call.scale,
            rotary=call.state.rotary,
            min_length=min_length,
            latent=store.spec.latent_rank is not None,
            window=window(),
            call=call_queries,
        )
        # The comment is for whoever's policy cannot be compiled: the error shows this line.
        scores = policy.score(state)  # write it branch-free, like torch.where(state.positions < 4, torch.inf, size)
        return _checked(call, scores, store, lengths)

    with _without_autocast(call.key.device.type):
        if min_length == 0 or call.on_host:  # on the host the caller has already looked
            return score()
        full = (lengths >= min_length).any()
        if store.keys.device.type == "cpu":  # compiled: a branch in the graph, except around a single operator
            if policy.predicated and not policy.query_window:
                return score()
            return torch.cond(full, lambda: score().clone(), lambda: _no_score(store), ())
        # On a GPU nothing may wait for the device, inside graphs not even for a user's policy.
        if policy.predicated or call.compiling or bool(full):
            return score()
        return _no_score(store)


def _without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Scores are float32 whatever autocast makes of a model's products."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def _no_score(store: SlotStore) -> Tensor:
    return store.keys.new_zeros(store.positions.shape, dtype=_score_dtype(store.keys))


def _score_dtype(key: Tensor) -> torch.dtype:
    return torch.float64 if key.dtype == torch.float64 else torch.float32


def _checked(call: LayerCall, scores: Any, store: SlotStore, lengths: Tensor) -> Tensor:
    """``scores``, once they are known to be what a policy must return. NaN is warned of once."""
    name, shape = f"{type(call.state.spec.policy).__name__}.score", store.positions.shape
    if not isinstance(scores, Tensor):
        raise TypeError(f"{name} must return a tensor [B, Hkv, C], got {type(scores).__name__}")
    if scores.shape != shape:
        raise ValueError(f"{name} must return shape [B, Hkv, C] = {list(shape)}, got {list(scores.shape)}")
    if scores.dtype != _score_dtype(call.key):
        raise TypeError(f"{name} must return {_score_dtype(call.key)}, got {scores.dtype}")
    if scores.device != call.key.device:
        raise ValueError(f"{name} must return a tensor on {call.key.device}, got {scores.device}")
    progress = call.state.progress
    if not call.on_host or progress.warned_nan:
        return scores
    # Beyond the lengths a score may be anything.
    valid = torch.arange(shape[2], device=lengths.device) < lengths[..., None]
    if bool((scores.isnan() & valid).any()):
        progress.warned_nan = True
        warnings.warn(f"{name} returned NaN; tokens with a NaN score rank lowest", stacklevel=2)
    return scores
