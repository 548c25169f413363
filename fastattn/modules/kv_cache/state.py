"""The state of a cache: what a layer holds, what all layers share, and what one layer's part of a call sees of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastattn import ops
from fastattn.modules.kv_cache.buffers import Buffer, layer_buffers, layer_sizes, slot_name
from fastattn.modules.kv_cache.progress import Progress
from fastattn.modules.kv_cache.query_ring import QueryRing
from fastattn.modules.kv_cache.spec import CacheSpec, LayerSpec
from fastattn.modules.policies import Stored
from fastattn.modules.rotary import Rotary

# What cache_compact_ moves by itself.
_COMPACTED = frozenset({"keys", "values", "positions", "key_scale", "value_scale"})


class SlotStore:
    """Tokens in slots: a layer, or the larger store that a prompt is compressed in.

    Valid slots are a prefix, in time order.

    Attributes:
        spec: what the layer is made for.
        slot_buffers: the declared buffers that hold something for every slot.
    """

    spec: LayerSpec
    slot_buffers: tuple[Buffer, ...]
    keys: Tensor
    values: Tensor
    positions: Tensor
    lengths: Tensor
    key_scale: Tensor
    value_scale: Tensor
    # The same by name, as a module has them: a step reads them here, past nn.Module's __getattr__, which costs a call.
    _buffers: dict[str, Any]

    @property
    def visible_values(self) -> Tensor:
        """Values as attention takes them: for a latent cache a view of the keys."""
        if self.spec.storage == "int4" and self.spec.latent_rank:
            return self.keys  # its transform mixes latent and rope key
        return self.keys[..., : self.spec.latent_rank] if self.spec.latent_rank else self.values

    def dequantized(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A copy of all keys and values as numbers."""
        keys = ops.dequantize(self.keys, self.key_scale, dtype)
        if self.spec.latent_rank:
            return keys, keys[..., : self.spec.latent_rank]
        return keys, ops.dequantize(self.values, self.value_scale, dtype)

    def stored(self) -> Stored:
        """Codes and scales as scores take them."""
        rank = self.spec.latent_rank
        if rank:
            return Stored(self.keys, self.keys, self.key_scale, self.key_scale, rank)
        return Stored(self.keys, self.values, self.key_scale, self.value_scale)

    def slot_state(self) -> dict[str, Tensor]:
        """What the policy keeps per slot, by its own names."""
        return {name: getattr(self, slot_name(name)) for name, _ in self.spec.slot_state}

    def append_(self, key: Tensor, value: Tensor | None, position: Tensor) -> None:
        """Append tokens whose ``position [B, T]`` is not -1. Buffers of other kinds are already empty there."""
        value = key[..., :0] if value is None else value
        if self.spec.storage is None:
            held: dict[str, Any] = self._buffers
            ops.cache_append_(held["keys"], held["values"], held["positions"], held["lengths"], key, value, position)
            return
        scales = {} if self.spec.latent_rank else {"value_scale": self.value_scale}
        stored = (self.keys, self.values, self.positions, self.lengths)
        ops.cache_append_(*stored, key, value, position, key_scale=self.key_scale, **scales)

    def newest_position(self) -> Tensor:
        """Position of each row's newest token, int32 ``[B]``, -1 where there is none.

        Heads may have let go of it, but not one that has more than its budget.
        """
        newest = (self.lengths - 1).clamp(min=0)[..., None].to(torch.int64)
        return self.positions.gather(2, newest)[..., 0].amax(1)

    def compact_(self, scores: Tensor, min_length: int, lengths: Tensor) -> None:
        """Keep the best ``budget`` slots of rows and heads with at least ``min_length``.

        ``lengths`` are the store's own, or a copy of them that is 0 for rows that stay as they are.
        """
        further = [b for b in self.slot_buffers if b.name not in _COMPACTED]
        before = self.positions.clone() if further else None
        budget = self.spec.budget
        if self.spec.storage is None:
            ops.cache_compact_(self.keys, self.values, self.positions, lengths, scores, budget, min_length=min_length)
        else:
            of_values = None if self.spec.latent_rank else self.value_scale
            ops.cache_compact_(
                self.keys, self.values, self.positions, lengths, scores, budget, min_length=min_length,
                key_scale=self.key_scale, value_scale=of_values,
            )  # fmt: skip
        if lengths is not self.lengths:
            self.lengths.copy_(torch.where(lengths > 0, lengths, self.lengths))
        if before is not None:
            self._follow_(further, before)

    def forget_beyond_lengths_(self) -> None:
        """Mark the slots beyond the lengths as empty."""
        slots = torch.arange(self.positions.shape[2], device=self.positions.device)
        beyond = slots >= self.lengths[..., None]
        for buffer in self.slot_buffers:
            if buffer.empty is not None:
                tensor: Tensor = getattr(self, buffer.name)
                tensor.masked_fill_(beyond.view(*beyond.shape, *[1] * (tensor.dim() - 3)), buffer.empty)

    def _follow_(self, buffers: list[Buffer], before: Tensor) -> None:
        """Move ``buffers`` as a compaction moved the positions, which were ``before``: a token keeps its own."""
        last = torch.iinfo(before.dtype).max
        source = torch.searchsorted(before.masked_fill(before < 0, last), self.positions.clamp(min=0))
        source = source.clamp(max=before.shape[2] - 1)
        for buffer in buffers:
            tensor: Tensor = getattr(self, buffer.name)
            index = source.view(*source.shape, *[1] * (tensor.dim() - 3)).expand_as(tensor)
            tensor.copy_(tensor.gather(2, index))
            if buffer.empty is not None:  # the lengths do not say which: a row that is left alone has 0 here
                gone = self.positions < 0
                tensor.masked_fill_(gone.view(*gone.shape, *[1] * (tensor.dim() - 3)), buffer.empty)


class CacheLayer(SlotStore, nn.Module):
    """The buffers of one layer, as :func:`layer_buffers` declares them."""

    queries: Tensor | None
    left_out = False  # of the state that is being loaded
    number_dtype: torch.dtype  # of queries and new tokens, where what is stored is quantised

    def __init__(self, spec: LayerSpec, rows: int, dtype: torch.dtype, device: Any) -> None:
        super().__init__()
        self.spec = spec
        self.declared = layer_buffers(spec)
        self.slot_buffers = tuple(buffer for buffer in self.declared if buffer.per_slot)
        self.number_dtype = dtype
        sizes = layer_sizes(spec, rows)
        for buffer in self.declared:
            self.register_buffer(buffer.name, None if buffer.late else buffer.allocate(sizes, dtype, device))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """A change of dtype is that of keys and values: scales and what the policy keeps per slot keep their own."""
        kept = {b.name: getattr(self, b.name) for b in self.declared if b.dtype is not None and b.per_slot}
        super()._apply(fn, recurse)
        self.number_dtype = fn(torch.empty(0, dtype=self.number_dtype, device=self.keys.device)).dtype
        for buffer in self.declared:
            if buffer.name in kept:
                dtype = buffer.resolve_dtype(self.keys.dtype)
                setattr(self, buffer.name, kept[buffer.name].to(self.keys.device, dtype))
        return self

    def allocate_queries(self, num_heads: int, ring_size: int) -> None:
        """The newest queries, and a spare place for what is not kept."""
        sizes = layer_sizes(self.spec, self.keys.shape[0]) | {"heads": num_heads, "ring_and_spare": ring_size + 1}
        with torch.inference_mode(False):
            for buffer in self.declared:
                if buffer.late:
                    dtype = self.keys.dtype if self.spec.storage is None else self.number_dtype
                    setattr(self, buffer.name, buffer.allocate(sizes, dtype, self.keys.device))

    def _load_from_state_dict(self, *args: Any) -> None:
        if not self.left_out:
            super()._load_from_state_dict(*args)

    def take_over_(self, work: WorkStore) -> None:
        """Become what ``work`` holds, in place."""
        for buffer in self.slot_buffers:
            tensor: Tensor = getattr(self, buffer.name)
            tensor.copy_(getattr(work, buffer.name)[:, :, : tensor.shape[2]])
        self.lengths.copy_(work.lengths)


class WorkStore(SlotStore):
    """A copy of a layer's slots with room for ``tokens`` more: what a prompt is appended to and compressed in."""

    def __init__(self, layer: CacheLayer, tokens: int) -> None:
        self.spec, self.slot_buffers = layer.spec, layer.slot_buffers
        for buffer in layer.slot_buffers:
            setattr(self, buffer.name, _with_room(getattr(layer, buffer.name), tokens, buffer.empty))
        self.lengths = layer.lengths.clone()
        self._buffers = {name: getattr(self, name) for name in ("keys", "values", "positions", "lengths")}


def _with_room(stored: Tensor, tokens: int, empty: int | None) -> Tensor:
    """``stored`` with ``tokens`` more slots, empty or, where that may be anything, as the memory is found."""
    rows, kv_heads, slots, *rest = stored.shape
    if empty is not None:
        return torch.cat([stored, stored.new_full((rows, kv_heads, tokens, *rest), empty)], dim=2)
    larger = stored.new_empty(rows, kv_heads, slots + tokens, *rest)
    larger[:, :, :slots].copy_(stored)
    return larger


@dataclass
class CallState:
    """What one layer's part of a call reads and writes, in place of the cache itself.

    Attributes:
        spec: what the cache is made for.
        index: of the layer.
        layer: its buffers.
        rotary: its rotation.
        tokens_seen: int64 ``[B]``, real tokens fed to each row before the call.
        columns: int64, tokens fed, padding included.
        croppable: int64, newest columns that may be taken back.
        croppable_rows: int64 ``[B]``, newest tokens of each row that may be taken back.
        ring: which queries the layers hold.
        progress: marks the cache half-written.
    """

    spec: CacheSpec
    index: int
    layer: CacheLayer
    rotary: Rotary | None
    tokens_seen: Tensor
    columns: Tensor
    croppable: Tensor
    croppable_rows: Tensor
    ring: QueryRing
    progress: Progress

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.spec.num_layers - 1

    def remember(self) -> Callable[[], None]:
        """Note the layer's lengths; the returned function takes back what was appended since.

        That lies beyond the old lengths, and new queries beyond the tokens seen.
        """
        lengths = self.layer.lengths.clone()
        observed = []
        if self.layer.spec.slot_state:
            observed = [(kept, kept.clone()) for kept in self.layer.slot_state().values()]

        def undo() -> None:
            self.layer.lengths.copy_(lengths)
            for kept, before in observed:
                kept.copy_(before)
            self.layer.forget_beyond_lengths_()
            self.ring.forget_from_(self.tokens_seen)

        return undo
