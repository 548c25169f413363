"""One layer's part of a call: attend, append, compress."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.modules.kv_cache.attention import attend_after_append, attend_to_cache_and_call, goes_by_position
from fastattn.modules.kv_cache.call import LayerCall
from fastattn.modules.kv_cache.query_ring import QueryRing, write_queries_
from fastattn.modules.kv_cache.scoring import observe_queries, policy_scores
from fastattn.modules.kv_cache.state import WorkStore
from fastattn.modules.policies import QueryWindow


def update_layer(call: LayerCall) -> Tensor | None:
    """Take in the new tokens, and return their attention if the call wants it."""
    out = _step(call) if call.is_step else _take_in_prompt(call)
    if call.state.is_last:
        _advance_counters(call)
    elif call.before is not None:
        _note_compression(call)
    return out


def _step(call: LayerCall) -> Tensor | None:
    """A decode step: compress the rows and heads that are full, append in place, attend to the slots."""
    layer = call.state.layer
    _compress_full(call)
    layer.append_(call.key, call.value, call.position)
    out = attend_after_append(call, layer) if call.attend else None
    queries = layer._buffers.get("queries")
    # A window keeps no queries, but the ring is written with the last layer, whatever that is.
    if call.query is not None and (queries is not None or (layer.spec.window and call.state.ring.size)):
        _store_queries(call, queries, call.query)
    if layer.spec.slot_state:
        observe_queries(call, layer, lambda: _window_after_call(call))
    return out


def _compress_full(call: LayerCall) -> None:
    """Compress what is full before a step appends, so that what it appends can always be taken back."""
    layer = call.state.layer
    full, lengths = layer.spec.full_length, layer._buffers["lengths"]
    assert lengths is not None
    if call.mask is not None:
        lengths = torch.where(call.brings_tokens(), lengths, 0)
    if call.on_host and int(lengths.amax()) < full:
        return
    _remember_lengths(call)
    scores = policy_scores(
        call, layer, lengths, full, lambda: _newest_queries(call, layer.queries, call.state.ring), None
    )
    call.mark_rewritten()
    layer.compact_(scores, full, lengths)


def _take_in_prompt(call: LayerCall) -> Tensor | None:
    """A prompt, a chunk, a turn: attend, append to a work store, compress that to the budget, take over the result."""
    _remember_lengths(call)
    state, layer = call.state, call.state.layer
    by_position = call.attend and goes_by_position(call)
    out = attend_to_cache_and_call(call) if call.attend and not by_position else None
    work = WorkStore(layer, call.tokens)
    work.append_(call.key, call.value, call.position)
    if by_position:
        out = attend_after_append(call, work)
    queries, ring = _queries_after_call(call)
    if layer.spec.slot_state:
        observe_queries(call, work, lambda: _newest_queries(call, queries, ring))
    # A row that brings no real token is left as it is: to the compression it looks empty.
    lengths = torch.where(call.brings_tokens(), work.lengths, 0)
    if not (call.on_host and int(lengths.amax()) <= layer.spec.budget):
        call_queries = None if call.query is None else QueryWindow(call.query, call.position)
        window = _newest_queries(call, queries, ring)
        scores = policy_scores(call, work, lengths, 0, lambda: window, call_queries)
        work.compact_(scores, 0, lengths)
    call.mark_rewritten()
    layer.take_over_(work)
    if queries is not None and layer.queries is not None:
        layer.queries.copy_(queries)
        state.ring.copy_(ring)
    return out


def _remember_lengths(call: LayerCall) -> None:
    """The last layer's lengths say in the end which rows were compressed; where budgets differ, every layer's do."""
    if call.state.is_last or call.state.spec.budgets_differ:
        call.before = call.state.layer.lengths.clone()


def _note_compression(call: LayerCall) -> None:
    """Let :func:`_advance_counters` find nothing to take back before a call that compressed a layer before the last.

    A step's tokens come after the compression and count, a prompt's do not: counts begin at 0, or at minus the call.
    """
    state, real = call.state, call.real_tokens()
    assert call.before is not None
    compressed = (state.layer.lengths != call.before + real[:, None]).any(1)
    call.mark_rewritten()
    none = torch.zeros_like(real) if call.is_step else -real
    state.croppable_rows.copy_(torch.where(compressed, none, state.croppable_rows))
    state.croppable.copy_(torch.where(compressed.any(), 0 if call.is_step else -call.tokens, state.croppable))


def _advance_counters(call: LayerCall) -> None:
    """Count the call."""
    state = call.state
    if call.before is None and call.mask is None:  # every token is real, and all can be taken back
        call.mark_rewritten()
        for counter in (state.croppable, state.croppable_rows, state.tokens_seen, state.columns):
            counter.add_(call.tokens)
        return
    real = call.real_tokens()
    before = state.layer.lengths - real[:, None] if call.before is None else call.before
    compressed = (state.layer.lengths != before + real[:, None]).any(1)
    # A step compresses before it appends, a prompt after: what the call brought is then still there, or may not be.
    left = real if call.is_step else torch.zeros_like(real)
    trailing = state.columns.new_full((), call.tokens)
    unbroken = state.croppable + call.tokens
    if call.mask is not None:
        trailing = (call.position >= 0).all(0).flip(0).cumprod(0).sum()
        unbroken = torch.where(trailing == call.tokens, unbroken, trailing)
    if state.spec.budgets_differ:  # below 0: an earlier layer was compressed after the call's tokens
        unbroken = torch.where(state.croppable < 0, 0, unbroken)
    call.mark_rewritten()
    state.croppable.copy_(torch.where(compressed.any(), trailing if call.is_step else 0, unbroken))
    state.croppable_rows.copy_(torch.where(compressed, left, state.croppable_rows + real))
    state.tokens_seen.add_(real)
    state.columns.add_(call.tokens)


# -- the newest queries ----------------------------------------------------------------------------------------------


def _store_queries(call: LayerCall, queries: Tensor | None, query: Tensor) -> None:
    """Put the new queries into the layer's, if it keeps them, and note them in the ring with the last layer.

    Until then the ring says what each layer held before the call, which is what a layer is compressed by.
    """
    state = call.state
    place, index = state.ring.places(state.tokens_seen, call.position, all_real=call.mask is None)
    if queries is not None:
        write_queries_(queries, place, query)
    if state.is_last:
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


def _window_after_call(call: LayerCall) -> QueryWindow | None:
    """The newest queries once a step's are stored; the ring itself is written with the last layer."""
    state = call.state
    if state.layer.queries is None:
        return None
    place, index = state.ring.places(state.tokens_seen, call.position)
    return _newest_queries(call, state.layer.queries, state.ring.after_call(place, index, call.position))
