"""One layer's part of a call: attend, append, compress."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.modules.kv_cache.attention import attend_after_append, attend_to_cache_and_call
from fastattn.modules.kv_cache.call import LayerCall
from fastattn.modules.kv_cache.query_ring import QueryRing, write_queries_
from fastattn.modules.kv_cache.scoring import observe_queries, policy_scores
from fastattn.modules.kv_cache.state import SlotStore, WorkStore
from fastattn.modules.policies import QueryWindow


def update_layer(call: LayerCall) -> Tensor | None:
    """Take in the new tokens, and return their attention if the call wants it."""
    state = call.state
    before = state.layer.lengths.clone() if state.is_last else None
    if call.tokens <= state.layer.spec.max_step:
        out = _step(call)
    else:
        out = attend_to_cache_and_call(call) if call.attend else None
        _take_in_prompt(call)
    if before is not None:
        _advance_counters(call, before)
    return out


def _step(call: LayerCall) -> Tensor | None:
    """A decode step: append in place, attend to the slots, compress the rows and heads that are full."""
    layer = call.state.layer
    # With padding among several tokens the newest slots of a row are not the queries' own.
    append_first = call.mask is None or call.tokens == 1
    out = None if append_first or not call.attend else attend_to_cache_and_call(call)
    layer.append_(call.key, call.value, call.position)
    if call.attend and append_first:
        out = attend_after_append(call)
    if layer.queries is not None and call.query is not None:
        _store_queries(call, layer.queries, call.query)
    if layer.spec.slot_state:
        observe_queries(call, layer, lambda: _newest_queries(call, layer.queries, call.state.ring))
    full = layer.spec.full_length
    if call.on_host and int(layer.lengths.amax()) < full:
        return out
    scores = policy_scores(call, layer, full, lambda: _newest_queries(call, layer.queries, call.state.ring), None)
    _compress(call, layer, scores, full)
    return out


def _take_in_prompt(call: LayerCall) -> None:
    """A prompt, a chunk, a turn: append to a work store, compress that to the budget, take over the result."""
    state, layer = call.state, call.state.layer
    work = WorkStore(layer, call.tokens)
    work.append_(call.key, call.value, call.position)
    filled = work.lengths
    queries, ring = _queries_after_call(call)
    if layer.spec.slot_state:
        observe_queries(call, work, lambda: _newest_queries(call, queries, ring))
    # A row that brings no real token is left as it is: to the compression it looks empty.
    active = (call.position >= 0).any(1)[:, None]
    work.lengths = torch.where(active, filled, 0)
    if not (call.on_host and int(work.lengths.amax()) <= layer.spec.budget):
        call_queries = None if call.query is None else QueryWindow(call.query, call.position)
        window = _newest_queries(call, queries, ring)
        scores = policy_scores(call, work, 0, lambda: window, call_queries)
        _compress(call, work, scores, 0)
    call.mark_rewritten()
    layer.take_over_(work, torch.where(active, work.lengths, filled))
    if queries is not None and layer.queries is not None:
        layer.queries.copy_(queries)
        state.ring.copy_(ring)


def _compress(call: LayerCall, store: SlotStore, scores: Tensor, min_length: int) -> None:
    call.mark_rewritten()
    store.compact_(scores, min_length)


def _advance_counters(call: LayerCall, before: Tensor) -> None:
    """Count the call, whose last layer had the lengths ``before``."""
    state, real = call.state, call.real_tokens()
    unbroken = state.croppable + call.tokens
    if call.mask is not None:
        trailing = (call.position >= 0).all(0).flip(0).cumprod(0).sum()
        unbroken = torch.where(trailing == call.tokens, unbroken, trailing)
    compressed = (state.layer.lengths != before + real[:, None]).any()
    call.mark_rewritten()
    state.croppable.copy_(torch.where(compressed, 0, unbroken))
    state.tokens_seen.add_(real)
    state.columns.add_(call.tokens)


# -- the newest queries ----------------------------------------------------------------------------------------------


def _store_queries(call: LayerCall, queries: Tensor, query: Tensor) -> None:
    """Put the new queries into the layer's, and note them in the ring with the first layer."""
    state = call.state
    place, index = state.ring.places(state.tokens_seen, call.position)
    write_queries_(queries, place, query)
    if state.is_first:
        state.ring.copy_(state.ring.after_call(place, index, call.position))


def _queries_after_call(call: LayerCall) -> tuple[Tensor | None, QueryRing]:
    """The layer's queries and the ring with the new queries, as new tensors; no queries where none are kept."""
    state, stored = call.state, call.state.layer.queries
    if stored is None or call.query is None:
        return None, state.ring
    place, index = state.ring.places(state.tokens_seen, call.position)
    queries = stored.clone()
    write_queries_(queries, place, call.query)
    return queries, state.ring.after_call(place, index, call.position)


def _newest_queries(call: LayerCall, queries: Tensor | None, ring: QueryRing) -> QueryWindow | None:
    return None if queries is None else ring.newest(queries, call.state.spec.policy.query_window)
