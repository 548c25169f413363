"""A cache as a torch module: its buffers are made, moved, copied, saved, loaded and read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastattn.modules.kv_cache.buffers import SHARED_BUFFERS, Buffer
from fastattn.modules.kv_cache.progress import Progress
from fastattn.modules.kv_cache.query_ring import QueryRing
from fastattn.modules.kv_cache.spec import CacheSpec, LayerSpec, one_or_each
from fastattn.modules.kv_cache.state import CacheLayer, CallState
from fastattn.modules.kv_cache.validation import (
    HALF_WRITTEN,
    check_layer,
    check_saved,
    holds_no_query,
    queries_names,
)
from fastattn.modules.policies import Policy
from fastattn.modules.rotary import Rotary
from fastattn.validation import FAKE

# What transformers asks a cache for first.
_NAMES_OF_TRANSFORMERS = frozenset(
    {"is_compileable", "get_seq_length", "get_mask_sizes", "get_max_cache_shape", "activate_past_recording"}
)


class CacheModule(nn.Module):
    """State of :class:`CompressedKVCache`, all of it buffers, and what there is to read of it."""

    tokens_seen: Tensor
    columns: Tensor
    _croppable: Tensor
    _croppable_rows: Tensor
    _query_index: Tensor
    _query_positions: Tensor

    def __init__(
        self,
        spec: CacheSpec,
        rotary: Rotary | Sequence[Rotary | None] | None,
        device: torch.device | str | None,
        persistent: bool,
    ) -> None:
        super().__init__()
        if not isinstance(persistent, bool):
            raise TypeError(f"persistent must be a bool, got {type(persistent).__name__}")
        self.persistent = persistent
        self._spec = spec
        self._progress = Progress()
        dtype = spec.dtype or torch.get_default_dtype()
        with torch.inference_mode(False):  # buffers made under inference mode could not be written outside of it
            self.layers = nn.ModuleList(
                CacheLayer(spec.layer(index), spec.batch_size, dtype, device) for index in range(spec.num_layers)
            )
            self._in_order: tuple[CacheLayer, ...] = tuple(self.layers)  # type: ignore[arg-type]
            mode = torch._C._get_dispatch_mode(FAKE)  # fake tensors refer to it, and a copy of it would be another one
            self._set_rotary(copy.deepcopy(rotary, {} if mode is None else {id(mode): mode}))
            sizes = {"rows": spec.batch_size, "ring": spec.ring_size}
            for buffer in SHARED_BUFFERS:
                self.register_buffer(buffer.name, buffer.allocate(sizes, dtype, device))
        if spec.num_heads is not None and spec.ring_size:
            self._allocate_queries(spec.num_heads)

    # -- what the cache was made for ---------------------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """Chooses the tokens."""
        return self._spec.policy

    @property
    def budget(self) -> int | tuple[int, ...]:
        """Tokens kept per row and head; one number per layer where it was given so."""
        return self._spec.budget  # type: ignore[return-value]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Positions that a query sees, one number per layer; None where it sees all."""
        return self._spec.windows

    @property
    def interval(self) -> int:
        """Decode steps between two compressions."""
        return self._spec.interval

    @property
    def max_step(self) -> int:
        """Most tokens of a call that counts as a decode step."""
        return self._spec.max_step

    @property
    def capacity(self) -> int:
        """Slots per row and head; of the largest layer, where they differ."""
        return max(layer.spec.capacity for layer in self._all_layers())

    @property
    def num_layers(self) -> int:
        """Layers that attend through this cache."""
        return self._spec.num_layers

    @property
    def num_heads(self) -> int | None:
        """Query heads; None where they are not known yet."""
        return self._spec.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads per layer."""
        return self._spec.num_kv_heads

    @property
    def head_dim(self) -> int | tuple[int, ...]:
        """Dims of a key; one number per layer where they differ."""
        return self._spec.head_dim  # type: ignore[return-value]

    @property
    def v_head_dim(self) -> int | tuple[int, ...]:
        """Dims of a value; one number per layer where they differ."""
        return one_or_each(self._spec.value_dims)

    @property
    def latent_rank(self) -> int | tuple[int, ...] | None:
        """Leading dims of a key that are the value, for a latent cache; one number per layer where they differ."""
        return self._spec.latent_rank  # type: ignore[return-value]

    @property
    def storage(self) -> str | None:
        """Format of quantised keys and values; None where they are stored as they come."""
        return self._spec.storage

    @property
    def batch_size(self) -> int:
        """Rows."""
        return self._spec.batch_size

    @property
    def needs_queries(self) -> bool:
        """The policy looks at queries, so that :meth:`update` must be given them."""
        return self._spec.needs_queries

    # -- what the cache holds ----------------------------------------------------------------------------------------

    def keys(self, layer: int) -> Tensor:
        """Key buffer ``[B, Hkv, C, Dk]``; only the first ``lengths(layer)`` slots mean something.

        Codes where the cache is quantised; :meth:`dequantized` gives numbers.
        """
        keys = self._layer(layer).keys
        return keys.view(torch.float8_e4m3fn) if self._spec.storage == "fp8" else keys

    def values(self, layer: int) -> Tensor:
        """Value buffer ``[B, Hkv, C, Dv]``; for a latent cache a view of the keys."""
        values = self._layer(layer).visible_values
        return values.view(torch.float8_e4m3fn) if self._spec.storage == "fp8" else values

    def scales(self, layer: int) -> tuple[Tensor, Tensor]:
        """Scales of the key and value codes (:func:`fastattn.ops.quantize`); of a latent cache twice the same.

        Raises:
            ValueError: the cache is not quantised.
        """
        held = self._layer(layer)
        if self._spec.storage is None:
            raise ValueError("storage must be 'int8', 'fp8' or 'int4' for a cache to have scales, got None")
        return held.key_scale, held.key_scale if self._spec.latent_rank else held.value_scale

    def dequantized(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values as numbers of the cache's dtype: a copy where the cache is quantised."""
        if self._spec.storage is None:
            return self.keys(layer), self.values(layer)
        return self._layer(layer).dequantized(self.dtype)

    def positions(self, layer: int) -> Tensor:
        """Original positions int32 ``[B, Hkv, C]``, -1 where empty."""
        return self._layer(layer).positions

    def lengths(self, layer: int) -> Tensor:
        """Filled slots int32 ``[B, Hkv]``."""
        return self._layer(layer).lengths

    @property
    def nbytes(self) -> int:
        """Bytes of all state."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers())

    @property
    def dtype(self) -> torch.dtype:
        """Of queries, keys and values as they come; of a quantised cache not what is stored."""
        layer = self._layer(0)
        return layer.keys.dtype if layer.spec.storage is None else layer.number_dtype

    @property
    def device(self) -> torch.device:
        """Of all state."""
        return self._layer(0).keys.device

    def layer_spec(self, layer: int) -> LayerSpec:
        """What layer ``layer`` was made for."""
        check_layer(self._spec, layer)
        return self._in_order[layer].spec

    def _layer(self, layer: int) -> CacheLayer:
        check_layer(self._spec, layer)
        return self.layers[layer]  # type: ignore[return-value]

    def _layers_with_queries(self) -> list[CacheLayer]:
        """Those whose policy may look at queries: a window needs none."""
        return [layer for layer in self._all_layers() if layer.spec.window is None]

    def _all_layers(self) -> list[CacheLayer]:
        return list(self.layers)  # type: ignore[arg-type]

    def _declared_buffers(self) -> Iterator[tuple[Buffer, Tensor]]:
        """Every buffer of the state that is allocated, with its declaration."""
        for declared, module in [(SHARED_BUFFERS, self), *((layer.declared, layer) for layer in self._all_layers())]:
            for buffer in declared:
                tensor = getattr(module, buffer.name)
                if tensor is not None:
                    yield buffer, tensor

    def _named_buffers(self) -> dict[str, tuple[Buffer, Tensor]]:
        """The same, by their names in a saved state."""
        prefixes = ["" for _ in SHARED_BUFFERS]
        for index, layer in enumerate(self._all_layers()):
            allocated = [buffer for buffer in layer.declared if getattr(layer, buffer.name) is not None]
            prefixes += [f"layers.{index}." for _ in allocated]
        named = zip(prefixes, self._declared_buffers(), strict=True)
        return {prefix + buffer.name: (buffer, tensor) for prefix, (buffer, tensor) in named}

    @property
    def _holds_queries(self) -> bool:
        """There is room for the newest queries; there is none before their number of heads is known."""
        return any(layer.queries is not None for layer in self._all_layers())

    def _ring(self) -> QueryRing:
        return QueryRing(self._query_index, self._query_positions)

    def _call_state(self, layer: int) -> CallState:
        """What an update of ``layer`` reads and writes."""
        check_layer(self._spec, layer)
        # Past nn.Module's __getattr__, which would cost a step a call or two for every tensor.
        held: Any = self._buffers
        by_layer: nn.ModuleList | None = self._modules.get("layer_rotary")  # type: ignore[assignment]
        return CallState(
            spec=self._spec,
            index=layer,
            layer=self._in_order[layer],
            rotary=self._modules.get("rotary") if by_layer is None else by_layer[layer],  # type: ignore[arg-type]
            tokens_seen=held["tokens_seen"],
            columns=held["columns"],
            croppable=held["_croppable"],
            croppable_rows=held["_croppable_rows"],
            ring=QueryRing(held["_query_index"], held["_query_positions"]),
            progress=self._progress,
        )

    def _allocate_queries(self, num_heads: int) -> None:
        """Room for the newest queries, now that their number of heads is known."""
        for layer in self._layers_with_queries():
            layer.allocate_queries(num_heads, self._spec.ring_size)
        if num_heads != self._spec.num_heads:
            self._spec = self._spec.with_num_heads(num_heads, self._given_rotary())

    def _set_rotary(self, rotary: Rotary | Sequence[Rotary | None] | None) -> None:
        """One rotation for all layers, ``rotary``, or one for each, ``layer_rotary``, the identity where it is None."""
        self.layer_rotary: nn.ModuleList | None = None
        if isinstance(rotary, (list, tuple)):
            identity = Rotary(torch.zeros(0, device="cpu"))
            self.layer_rotary = nn.ModuleList(identity if one is None else one for one in rotary).to(self.device)
            self.rotary: Rotary | None = None
        else:
            self.rotary = rotary.to(self.device) if isinstance(rotary, Rotary) else None

    def _given_rotary(self) -> Rotary | list[Rotary] | None:
        """What the constructor was given, or the like."""
        return self.rotary if self.layer_rotary is None else list(self.layer_rotary)  # type: ignore[arg-type]

    # -- saving, loading, copying, moving ----------------------------------------------------------------------------

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        """As ``nn.Module``'s. A model's, where the cache is a part of it, lacks a cache that is not persistent."""
        if prefix and not self.persistent:
            return kwargs.get("destination")
        return super().state_dict(*args, prefix=prefix, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """As ``nn.Module``'s, but refuses a state of other shapes, or names if ``strict``, before copying anything."""
        check_saved(self._spec, self.state_dict(), state_dict, "", strict)
        with torch.inference_mode(False):
            return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """What loading does to a cache, also where it is a part of the model that is loaded."""
        left_out = bool(prefix) and not self.persistent
        for layer in self._all_layers():  # they are loaded next
            layer.left_out = left_out
        if left_out:
            return
        check_saved(self._spec, self.state_dict(), state_dict, prefix, strict=False)
        for name, layer in zip(queries_names(self._spec, prefix), self._layers_with_queries(), strict=False):
            if name in state_dict and layer.queries is None:
                self._allocate_queries(state_dict[name].shape[1])
            elif layer.queries is not None and holds_no_query(state_dict, prefix):
                state_dict.setdefault(name, layer.queries)  # saved before its first call: there is nothing to load
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._progress.restart()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self._progress.complete:  # loading refuses it
            destination[f"{prefix}{HALF_WRITTEN}"] = self.columns if keep_vars else self.columns.detach()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of pickle: what it makes under inference mode could not be written outside of it."""
        super().__setstate__(state)
        with torch.inference_mode(False):
            for module in self.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None and buffer.is_inference():
                        module._buffers[name] = buffer.clone()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        with torch.inference_mode(False):
            copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        with torch.inference_mode(False):
            return super()._apply(fn, recurse)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"

    def __getattr__(self, name: str) -> Any:
        if name in _NAMES_OF_TRANSFORMERS:
            raise AttributeError(
                f"a {type(self).__name__} is no transformers cache (no {name}): pass generate() and models of "
                "transformers what fastattn.integrations.transformers.compressed_cache(model, ...) gives"
            )
        return super().__getattr__(name)

    def extra_repr(self) -> str:
        return (
            f"policy={self.policy}, budget={self.budget}, interval={self.interval}, max_step={self.max_step}, "
            f"num_layers={self.num_layers}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, "
            f"v_head_dim={self.v_head_dim}, latent_rank={self.latent_rank}, batch_size={self.batch_size}"
            + (f", window={self.windows}" if any(self.windows) else "")
            + ("" if self.storage is None else f", storage={self.storage!r}")
        )
