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
from fastattn.modules.policies import CacheState, CodedState, QueryWindow
from fastattn.ops._realize import realized
from fastattn.validation import autocasts


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
    if store.spec.window is not None:
        return _no_score(store)  # of equal scores the newest are kept

    def score() -> Tensor:
        state = _cache_state(call, store, lengths, min_length, window(), call_queries)
        # The comment is for whoever's policy cannot be compiled: the error shows this line.
        scores = policy.score(state)  # write it branch-free, like torch.where(state.positions < 4, torch.inf, size)
        return _checked(call, scores, store, lengths)

    with without_autocast(call.key.device.type):
        if min_length == 0 or call.on_host:  # on the host the caller has already looked
            return score()
        full = (lengths >= min_length).any()
        if store.keys.device.type == "cpu":  # compiled: a branch in the graph, except around a single operator
            # A quantised store is turned into numbers first, which is to happen in the branch alone.
            if policy.predicated and not policy.query_window and store.spec.storage is None:
                return score()
            return torch.cond(full, lambda: score().clone(), lambda: _no_score(store), ())
        # On a GPU nothing may wait for the device, inside graphs not even for a user's policy.
        if policy.predicated or call.compiling or bool(full):
            return score()
        return _no_score(store)


def observe_queries(call: LayerCall, store: SlotStore, window: Callable[[], QueryWindow | None]) -> None:
    """Let the policy bring what it keeps per slot up to date, with the call's tokens in ``store``.

    It works on copies, which are checked before they replace what is stored.
    """
    kept = store.slot_state()
    if not kept or call.query is None:
        return
    with without_autocast(call.key.device.type):
        state = _cache_state(
            call, store, store.lengths, 0, window(), QueryWindow(call.query, call.position), after=True
        )
        state.slots = {name: tensor.clone() for name, tensor in kept.items()}
        policy = call.state.spec.policy
        policy.observe(state, call.query)
        _check_observed(type(policy).__name__, state.slots, kept)
        empty = ~state.valid  # a token to come begins with zero, whatever the policy wrote there
        for name, tensor in kept.items():
            tensor.copy_(realized(state.slots[name].masked_fill(empty, 0)))


def _check_observed(policy: str, slots: Any, kept: dict[str, Tensor]) -> None:
    """What a policy left in ``state.slots`` is what it declared."""
    if not isinstance(slots, dict) or set(slots) != set(kept):
        got = sorted(slots) if isinstance(slots, dict) else type(slots).__name__
        raise ValueError(f"{policy}.observe must leave {sorted(kept)} in state.slots, got {got}")
    for name, stored in kept.items():
        new = slots[name]
        if not isinstance(new, Tensor):
            raise TypeError(f"{policy}.observe must leave a tensor in state.slots[{name!r}], got {type(new).__name__}")
        for what in ("shape", "dtype", "device"):
            if getattr(new, what) != getattr(stored, what):
                raise ValueError(
                    f"{policy}.observe must leave state.slots[{name!r}] of {what} {getattr(stored, what)}, got "
                    f"{getattr(new, what)}"
                )


def _cache_state(
    call: LayerCall,
    store: SlotStore,
    lengths: Tensor,
    min_length: int,
    window: QueryWindow | None,
    call_queries: QueryWindow | None,
    after: bool = False,
) -> CacheState:
    """What the policy sees of ``store``: a layer as it was before a step unless ``after``, a work store after it."""
    before = isinstance(store, CacheLayer) and not after
    seen: dict[str, Any] = {
        "positions": store.positions,
        "lengths": lengths,
        "tokens_seen": call.state.tokens_seen + (0 if before else call.real_tokens()),
        "next_position": (store.newest_position() if before else call.position.amax(1)).to(torch.int64) + 1,
        "scale": call.scale,
        "rotary": call.state.rotary,
        "min_length": min_length,
        "latent": store.spec.latent_rank is not None,
        "window": window,
        "call": call_queries,
        "layer": call.state.index,
        "budget": store.spec.budget,
        "slots": store.slot_state(),
    }
    if store.spec.storage is None:
        return CacheState(keys=store.keys, values=store.visible_values, **seen)
    return CodedState(store.stored(), lambda: store.dequantized(call.key.dtype), **seen)


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Scores are float32 whatever autocast makes of a model's products."""
    if autocasts(device_type):
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
