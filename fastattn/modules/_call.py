"""One layer's part of one call: attend, append, compress."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fastattn import ops
from fastattn.modules import _window
from fastattn.modules.policies import CacheState, QueryWindow
from fastattn.validation import fixed, resolve_scale

if TYPE_CHECKING:
    from fastattn.modules.kv_cache import CompressedKVCache


class CacheLayer(nn.Module):
    """Buffers of one layer. Valid slots are a prefix, in time order."""

    keys: Tensor
    values: Tensor
    positions: Tensor
    lengths: Tensor
    queries: Tensor | None

    def __init__(
        self, batch: int, kv_heads: int, capacity: int, k_dim: int, v_dim: int, *, dtype: torch.dtype, device: Any
    ) -> None:
        super().__init__()
        slots = (batch, kv_heads, capacity)
        self.register_buffer("keys", torch.zeros(*slots, k_dim, dtype=dtype, device=device))
        self.register_buffer("values", torch.zeros(*slots, v_dim, dtype=dtype, device=device))
        self.register_buffer("positions", torch.full(slots, -1, dtype=torch.int32, device=device))
        self.register_buffer("lengths", torch.zeros(batch, kv_heads, dtype=torch.int32, device=device))
        self.register_buffer("queries", None)

    def allocate_window(self, num_heads: int, ring: int) -> None:
        """The ring of queries and its spare slot."""
        with torch.inference_mode(False):
            batch, _, _, dim = self.keys.shape
            self.queries = self.keys.new_zeros(batch, num_heads, ring + 1, dim)


@dataclass
class _WorkBuffer:
    """What a prompt is appended to and compressed in: room for the cache and the call."""

    keys: Tensor
    values: Tensor
    positions: Tensor
    lengths: Tensor


def _without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Scores are float32 whatever autocast makes of a model's products."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def forget_beyond_lengths(layer: CacheLayer) -> None:
    """Mark the slots beyond the lengths as empty."""
    slots = torch.arange(layer.positions.shape[2], device=layer.positions.device)
    layer.positions.masked_fill_(slots >= layer.lengths[..., None], -1)


class Call:
    """Lives as long as one layer's part of a call; holds what its steps share."""

    def __init__(
        self,
        cache: CompressedKVCache,
        layer: int,
        query: Tensor | None,
        key: Tensor,
        value: Tensor | None,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        scale: float | None,
    ) -> None:
        self.cache, self.layer = cache, cache._layer(layer)
        self.is_first, self.is_last = layer == 0, layer == cache.num_layers - 1
        self.query, self.key, self.value = query, key, value
        self.tokens = key.shape[2]
        self.scale = resolve_scale(scale if scale is None else fixed(scale), cache.head_dim)
        self.compiling = torch.compiler.is_compiling()
        self.on_host = key.device.type == "cpu" and not self.compiling  # looking at values waits for no device
        if attention_mask is not None and self.on_host and bool(attention_mask.all()):
            attention_mask = None
        self.mask = attention_mask
        self.position = self._positions(position_ids)  # int32 [B, T], -1 at padding

    def run(self, attend: bool) -> Tensor | None:
        before = self.layer.lengths.clone() if self.is_last else None
        if self.tokens <= self.cache.max_step:
            out = self._step(attend)
        else:
            out = self._attend_cache_and_call() if attend else None
            self._take_in_prompt()
        if before is not None:
            self._advance_counters(before)
        return out

    def _positions(self, position_ids: Tensor | None) -> Tensor:
        if position_ids is None:
            if self.mask is None:
                ranks = torch.arange(self.tokens, device=self.key.device)[None]
            else:
                ranks = self.mask.cumsum(1) - 1
            position_ids = self.cache.tokens_seen[:, None] + ranks
        position = position_ids.expand(self.key.shape[0], -1).to(torch.int32)
        return position if self.mask is None else position.masked_fill(~self.mask, -1)

    def _real(self) -> Tensor:
        """Real tokens of each row, int64 ``[B]``."""
        return (self.position >= 0).sum(1)

    def _advance_counters(self, before: Tensor) -> None:
        cache, real = self.cache, self._real()
        unbroken = cache._croppable + self.tokens
        if self.mask is not None:
            trailing = (self.position >= 0).all(0).flip(0).cumprod(0).sum()
            unbroken = torch.where(trailing == self.tokens, unbroken, trailing)
        compressed = (self.layer.lengths != before + real[:, None]).any()
        self._no_way_back()
        cache._croppable.copy_(torch.where(compressed, 0, unbroken))
        cache.tokens_seen.add_(real)
        cache.columns.add_(self.tokens)

    # -- attention ---------------------------------------------------------------------------------------------------

    def _attend_cache_and_call(self) -> Tensor:
        """Attention to the cache, merged with causal attention inside the new tokens."""
        query, key, cached_key = self._attention_inputs(appended=False)
        start = end = None
        if self.mask is not None:
            start = self.mask.to(torch.int32).argmax(1).to(torch.int32)
            end = start + self.mask.sum(1, dtype=torch.int32)
        value = key[..., : self.cache.latent_rank] if self.value is None else self.value
        inside = ops.attention(
            query, key, value, causal=True, scale=self.scale, key_start=start, lengths=end, return_lse=True
        )
        if self.on_host and int(self.layer.lengths.amax()) == 0:
            return inside[0]
        cached = self._attend_buffer(query, cached_key, causal=False)
        return ops.merge_attention([cached[0], inside[0]], [cached[1], inside[1]])[0]

    def _attend_buffer(self, query: Tensor, key: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        rank, lengths = self.cache.latent_rank, self.layer.lengths
        if rank is not None:
            latent, rope = query[..., :rank], query[..., rank:]
            result = ops.latent_decode(
                latent, rope, key[:, 0], lengths[:, 0], scale=self.scale, causal=causal, return_lse=True
            )
        else:
            result = ops.decode_attention(
                query, key, self.layer.values, lengths, scale=self.scale, causal=causal, return_lse=True
            )
        assert isinstance(result, tuple)
        return result

    def _attention_inputs(self, appended: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Query, new keys and cached keys, rotated to their index in the cache if the policy wants that.

        Each is turned on from its original position. Only differences of positions matter to attention, and a row's
        new tokens keep theirs: one offset per row moves them.
        """
        assert self.query is not None
        layer, rotary = self.layer, self.cache.rotary
        if not self.cache.policy.rerotate:
            return self.query, self.key, layer.keys
        assert rotary is not None
        slots = torch.arange(layer.keys.shape[2], device=layer.keys.device)
        cached_key = rotary.shift(layer.keys, slots - layer.positions)
        before = layer.lengths[:, :1] - (self._real()[:, None] if appended else 0)
        real = self.position >= 0
        offset = (before + real.cumsum(1) - 1 - self.position).masked_fill(~real, 0)
        return rotary.shift(self.query, offset), rotary.shift(self.key, offset), cached_key

    # -- a decode step -----------------------------------------------------------------------------------------------

    def _step(self, attend: bool) -> Tensor | None:
        """Append in place, attend to the buffer, compress the rows and heads that are full."""
        layer, cache = self.layer, self.cache
        # With padding among several tokens the newest slots of a row are not the queries' own.
        append_first = self.mask is None or self.tokens == 1
        out = None if append_first or not attend else self._attend_cache_and_call()
        self._append_to(layer)
        if attend and append_first:
            query, _, key = self._attention_inputs(appended=True)
            out = self._attend_buffer(query, key, causal=True)[0]
        if layer.queries is not None and self.query is not None:
            self._store_queries(layer.queries)
        full = cache.budget + cache.interval
        if self.on_host and int(layer.lengths.amax()) < full:
            return out
        with _without_autocast(self.key.device.type):
            scores = self._scores(layer, full, self._stored_window, call=None)
        self._compress(layer, scores, full)
        return out

    def _append_to(self, layer: CacheLayer | _WorkBuffer) -> None:
        value = self.key[..., :0] if self.value is None else self.value
        ops.cache_append_(layer.keys, layer.values, layer.positions, layer.lengths, self.key, value, self.position)

    def _store_queries(self, queries: Tensor) -> None:
        cache = self.cache
        assert self.query is not None
        slot, index = _window.ring_slots(cache.tokens_seen, self.position, cache._query_index.shape[1])
        _window.write_queries_(queries, slot, self.query)
        if self.is_first:
            cache._query_index.copy_(_window.after_call(cache._query_index, slot, index))
            cache._query_positions.copy_(_window.after_call(cache._query_positions, slot, self.position))

    def _stored_window(self) -> QueryWindow | None:
        cache, queries = self.cache, self.layer.queries
        if queries is None:
            return None
        return _window.newest(queries, cache._query_index, cache._query_positions, cache.policy.query_window)

    # -- a prompt, a chunk, a turn -----------------------------------------------------------------------------------

    def _take_in_prompt(self) -> None:
        """Append to a work buffer, compress that to the budget, take over the result."""
        layer, cache = self.layer, self.cache
        work = self._work_buffer()
        self._append_to(work)
        filled = work.lengths
        # A row that brings no real token is left as it is: to the compression it looks empty.
        active = (self.position >= 0).any(1)[:, None]
        work.lengths = torch.where(active, filled, 0)
        ring = self._ring_after_call()
        if not (self.on_host and int(work.lengths.amax()) <= cache.budget):
            call = None if self.query is None else QueryWindow(self.query, self.position)
            window = None if ring is None else _window.newest(*ring, cache.policy.query_window)
            with _without_autocast(self.key.device.type):
                scores = self._scores(work, 0, lambda: window, call)
            self._compress(work, scores, 0)
        self._no_way_back()
        slots = cache.capacity
        layer.keys.copy_(work.keys[:, :, :slots])
        layer.values.copy_(work.values[:, :, :slots])
        layer.positions.copy_(work.positions[:, :, :slots])
        layer.lengths.copy_(torch.where(active, work.lengths, filled))
        if ring is not None and layer.queries is not None:
            layer.queries.copy_(ring[0])
            cache._query_index.copy_(ring[1])
            cache._query_positions.copy_(ring[2])

    def _work_buffer(self) -> _WorkBuffer:
        layer, tokens = self.layer, self.tokens
        batch, kv_heads, slots, k_dim = layer.keys.shape
        room = (batch, kv_heads, slots + tokens)
        keys = layer.keys.new_empty(*room, k_dim)
        values = layer.keys.new_empty(*room, layer.values.shape[3])
        keys[:, :, :slots].copy_(layer.keys)
        values[:, :, :slots].copy_(layer.values)
        positions = torch.cat([layer.positions, layer.positions.new_full((batch, kv_heads, tokens), -1)], dim=2)
        return _WorkBuffer(keys, values, positions, layer.lengths.clone())

    def _ring_after_call(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """The ring with the call's queries, its index and its positions, as new tensors."""
        cache = self.cache
        if self.layer.queries is None or self.query is None:
            return None
        slot, index = _window.ring_slots(cache.tokens_seen, self.position, cache._query_index.shape[1])
        queries = self.layer.queries.clone()
        _window.write_queries_(queries, slot, self.query)
        return (
            queries,
            _window.after_call(cache._query_index, slot, index),
            _window.after_call(cache._query_positions, slot, self.position),
        )

    # -- compression -------------------------------------------------------------------------------------------------

    def _scores(
        self,
        layer: CacheLayer | _WorkBuffer,
        min_length: int,
        window: Callable[[], QueryWindow | None],
        call: QueryWindow | None,
    ) -> Tensor:
        """The policy's scores, computed only where something is about to be compressed if that can be helped."""
        cache, policy = self.cache, self.cache.policy

        def score() -> Tensor:
            state = CacheState(
                keys=layer.keys,
                values=layer.keys[..., : cache.latent_rank] if cache.latent_rank else layer.values,
                positions=layer.positions,
                lengths=layer.lengths,
                tokens_seen=cache.tokens_seen + self._real(),
                next_position=self.position.amax(1).to(torch.int64) + 1,
                scale=self.scale,
                rotary=cache.rotary,
                min_length=min_length,
                latent=cache.latent_rank is not None,
                window=window(),
                call=call,
            )
            # The comment is for whoever's policy cannot be compiled: the error shows this line.
            scores = policy.score(state)  # write it branch-free, like torch.where(state.positions < 4, torch.inf, size)
            return self._checked(scores, layer)

        if min_length == 0 or self.on_host:  # on the host the caller has already looked
            return score()
        full = (layer.lengths >= min_length).any()
        if layer.keys.device.type == "cpu":  # compiled: a branch in the graph, except around a single operator
            if policy.predicated and not policy.query_window:
                return score()
            return torch.cond(full, lambda: score().clone(), lambda: self._no_score(layer), ())
        # On a GPU nothing may wait for the device, inside graphs not even for a user's policy.
        if policy.predicated or self.compiling or bool(full):
            return score()
        return self._no_score(layer)

    def _no_score(self, layer: CacheLayer | _WorkBuffer) -> Tensor:
        return layer.keys.new_zeros(layer.positions.shape, dtype=self._score_dtype())

    def _score_dtype(self) -> torch.dtype:
        return torch.float64 if self.key.dtype == torch.float64 else torch.float32

    def _checked(self, scores: Any, layer: CacheLayer | _WorkBuffer) -> Tensor:
        name, shape = f"{type(self.cache.policy).__name__}.score", layer.positions.shape
        if not isinstance(scores, Tensor):
            raise TypeError(f"{name} must return a tensor [B, Hkv, C], got {type(scores).__name__}")
        if scores.shape != shape:
            raise ValueError(f"{name} must return shape [B, Hkv, C] = {list(shape)}, got {list(scores.shape)}")
        if scores.dtype != self._score_dtype():
            raise TypeError(f"{name} must return {self._score_dtype()}, got {scores.dtype}")
        if scores.device != self.key.device:
            raise ValueError(f"{name} must return a tensor on {self.key.device}, got {scores.device}")
        progress = self.cache._progress
        if not self.on_host or progress.warned_nan:
            return scores
        # Beyond the lengths a score may be anything.
        valid = torch.arange(shape[2], device=layer.lengths.device) < layer.lengths[..., None]
        if bool((scores.isnan() & valid).any()):
            progress.warned_nan = True
            warnings.warn(f"{name} returned NaN; tokens with a NaN score rank lowest", stacklevel=2)
        return scores

    def _compress(self, layer: CacheLayer | _WorkBuffer, scores: Tensor, min_length: int) -> None:
        self._no_way_back()
        ops.cache_compact_(
            layer.keys,
            layer.values,
            layer.positions,
            layer.lengths,
            scores,
            self.cache.budget,
            min_length=min_length,
        )

    def _no_way_back(self) -> None:
        """From here on, until the call is over, a failure cannot be undone: what is not appended to is rewritten."""
        if not self.compiling:
            self.cache._progress.rewritten = True
