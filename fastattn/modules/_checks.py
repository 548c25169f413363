"""Checks of a cache's calls: the arguments, the order of layers, and failures half-way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastattn import validation as check
from fastattn.modules._call import forget_beyond_lengths
from fastattn.modules._window import forget_from_

if TYPE_CHECKING:
    from fastattn.modules.kv_cache import CompressedKVCache

_LAST_POSITION = 2**31 - 1


class Progress:
    """How far a cache's current call has come. Eager mode keeps it; compiled graphs leave it alone."""

    def __init__(self) -> None:
        self._next_layer = 0
        self._broken: str | None = None
        self.rewritten = False  # this layer's buffers, or the counters: a failure now cannot be undone
        self.warned_nan = False

    def restart(self) -> None:
        """The cache is empty or freshly loaded."""
        self._next_layer, self._broken, self.rewritten = 0, None, False

    def require_complete(self) -> None:
        """Raise unless the last call went through all layers."""
        if self._broken is not None:
            raise RuntimeError(f"the cache is invalid since {self._broken}: call reset() before using it again")
        if self._next_layer != 0:
            raise RuntimeError(
                f"the last call stopped before layer {self._next_layer}: finish it, or call reset() before using the "
                "cache again"
            )

    @contextmanager
    def guard(self, cache: CompressedKVCache, layer: int) -> Iterator[None]:
        """Run one layer's update; on a failure put the counters back, or mark the cache invalid."""
        if layer == 0 or self._broken is not None:
            self.require_complete()
        if layer != self._next_layer:
            raise ValueError(
                f"layer must be {self._next_layer}: the layers of a call come in order, 0 to {cache.num_layers - 1}, "
                f"got {layer}"
            )
        undo = cache._layer(0).lengths.clone() if layer == 0 else None
        try:
            yield
        except BaseException as error:
            if undo is None or self.rewritten:
                self._broken = f"layer {layer} failed with {type(error).__name__}"
            else:  # what was appended lies beyond the old lengths, new queries beyond the tokens seen
                cache._layer(0).lengths.copy_(undo)
                forget_beyond_lengths(cache._layer(0))
                forget_from_(cache._query_index, cache._query_positions, cache.tokens_seen)
            raise
        finally:
            self.rewritten = False
        self._next_layer = (layer + 1) % cache.num_layers


def layer_index(cache: CompressedKVCache, layer: int) -> None:
    """``layer`` is one of the cache's layers."""
    if isinstance(layer, bool) or not isinstance(layer, int):
        raise TypeError(f"layer must be an integer, got {type(layer).__name__}")
    if not 0 <= layer < cache.num_layers:
        raise ValueError(f"layer must be in 0..{cache.num_layers - 1}, got {layer}")


def row_index(cache: CompressedKVCache, index: Tensor) -> Tensor:
    """``index`` as int64 on the cache's device, its values checked on a CPU."""
    if not isinstance(index, Tensor):
        raise TypeError(f"index must be an integer tensor, got {type(index).__name__}")
    if index.dim() != 1 or index.is_floating_point() or index.dtype == torch.bool:
        raise ValueError(f"index must be integers [N], got {index.dtype} {list(index.shape)}")
    rows = cache.batch_size
    if index.device.type == "cpu" and index.numel() and not bool(((index >= 0) & (index < rows)).all()):
        raise ValueError(f"index must name rows 0..{rows - 1}, got {index.tolist()}")
    return index.to(cache.device, torch.int64)


def window_names(cache: CompressedKVCache, prefix: str) -> list[str]:
    """What the layers' query windows are called in a state; none where the policy keeps no queries."""
    return [f"{prefix}layers.{layer}.queries" for layer in range(cache.num_layers)] if cache.needs_queries else []


def holds_no_query(state: Mapping[str, Any], prefix: str) -> bool:
    """Whether ``state`` says that no slot of the query window is filled."""
    index = state.get(f"{prefix}_query_index")
    return index is not None and not bool((index >= 0).any())


def check_state(cache: CompressedKVCache, state: Mapping[str, Any], prefix: str, strict: bool) -> None:
    """``state``, whose names begin with ``prefix``, fits the cache: shapes and, if ``strict``, names.

    An empty query window that only one of the two has is no difference: it comes with the first call.
    """
    shapes = {f"{prefix}{name}": list(getattr(value, "shape", ())) for name, value in cache.state_dict().items()}
    windows = window_names(cache, prefix)
    batch, _, _, dim = cache.keys(0).shape
    for name in windows:
        if name in state and name not in shapes:
            heads = cache.num_heads or state[name].shape[1]
            shapes[name] = [batch, heads, cache._query_index.shape[1] + 1, dim]
    for name, expected in shapes.items():
        actual = list(getattr(state.get(name), "shape", ()))
        if name in state and actual != expected:
            raise ValueError(
                f"state_dict must hold {name} of shape {expected}, got {actual}: it was saved from a cache of another "
                "size"
            )
    optional = windows if holds_no_query(state, prefix) else []
    missing = [name for name in shapes if name not in state and name not in optional]
    unexpected = [name for name in state if name not in shapes]
    if strict and (missing or unexpected):
        raise ValueError(
            f"state_dict must hold what the cache holds, but it lacks {missing} and has {unexpected} besides: it was "
            "saved from another kind of cache"
        )


def check_arguments(
    cache: CompressedKVCache,
    layer: int,
    query: Tensor | None,
    key: Tensor,
    value: Tensor | None,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    scale: float | None,
    attend: bool,
) -> None:
    """Everything that can be wrong with the arguments of ``attend`` and ``update``, before anything is written."""
    layer_index(cache, layer)
    keys = cache._layer(layer).keys
    _check_new(cache, "key", key, "B Hkv T Dk", keys, cache.num_kv_heads, cache.head_dim)
    rows, _, tokens, _ = key.shape
    if query is not None:
        _check_new(cache, "query", query, "B H T Dk", keys, None, cache.head_dim)
        check.check_size("query", query, 2, tokens, "key's tokens")
        check.check_groups(query, key)
        if cache.num_heads is not None and query.shape[1] != cache.num_heads:
            raise ValueError(f"query must have the cache's {cache.num_heads} heads, got {query.shape[1]}")
    elif attend:
        raise TypeError("query must be a tensor [B H T Dk], got NoneType")
    elif cache.needs_queries:
        raise TypeError(f"query must be a tensor: {type(cache.policy).__name__} looks at queries, got NoneType")
    if cache.latent_rank is not None:
        if value is not None:
            raise ValueError(f"value must be None for a latent cache, got {list(value.shape)}")
        if scale is None and (attend or cache.needs_queries):
            raise TypeError("scale must be given to a latent cache: it does not follow from its shapes, got None")
    else:
        if value is None:
            raise TypeError("value must be a tensor [B Hkv T Dv], got NoneType")
        _check_new(cache, "value", value, "B Hkv T Dv", keys, cache.num_kv_heads, cache.v_head_dim)
        check.check_size("value", value, 2, tokens, "key's tokens")
    check.check_no_grad("CompressedKVCache", query=query, key=key, value=value)
    check.resolve_scale(scale, cache.head_dim)
    if attention_mask is not None:
        _check_per_token(cache, "attention_mask", attention_mask, rows, tokens)
        if attention_mask.dtype != torch.bool:
            raise TypeError(f"attention_mask must be bool, False for padding, got {attention_mask.dtype}")
    if position_ids is not None:
        _check_per_token(cache, "position_ids", position_ids, rows, tokens, broadcast=True)
        if position_ids.is_floating_point() or position_ids.dtype == torch.bool:
            raise TypeError(f"position_ids must be integers, got {position_ids.dtype}")
    if layer == 0 and check.checks_values(key):
        _check_values(cache, position_ids, attention_mask)


def _check_new(
    cache: CompressedKVCache, name: str, new: Tensor, dims: str, keys: Tensor, heads: int | None, head_dim: int
) -> None:
    check.check_tensor(name, new, dims)
    rows = cache.batch_size
    if new.shape[0] != rows:
        raise ValueError(f"{name} must have the cache's batch size {rows}, got {new.shape[0]}")
    if heads is not None and new.shape[1] != heads:
        raise ValueError(f"{name} must have the cache's {heads} key/value heads, got {new.shape[1]}")
    if new.shape[3] != head_dim:
        raise ValueError(f"{name} must have the cache's head dim {head_dim}, got {new.shape[3]}")
    if new.dtype != keys.dtype:
        raise TypeError(f"{name} must have the cache's dtype {keys.dtype}, got {new.dtype}")
    if new.device != keys.device:
        raise ValueError(f"{name} must be on the cache's device {keys.device}, got {new.device}")


def _check_per_token(
    cache: CompressedKVCache, name: str, new: Tensor, rows: int, tokens: int, broadcast: bool = False
) -> None:
    check.check_tensor(name, new, "B T")
    if new.shape[1] != tokens or not (new.shape[0] == rows or (broadcast and new.shape[0] == 1)):
        raise ValueError(f"{name} must have shape [B T] = [{rows}, {tokens}], got {list(new.shape)}")
    if new.device != cache.device:
        raise ValueError(f"{name} must be on the cache's device {cache.device}, got {new.device}")


def _check_values(cache: CompressedKVCache, position_ids: Tensor | None, attention_mask: Tensor | None) -> None:
    """Real tokens are contiguous and their positions rise, on from those in the cache."""
    if attention_mask is not None and attention_mask.shape[1] > 1:
        starts = attention_mask[:, 1:] & ~attention_mask[:, :-1]
        runs = starts.sum(1) + attention_mask[:, 0]
        if bool((runs > 1).any()):
            row = int((runs > 1).nonzero()[0])
            raise ValueError(
                f"attention_mask must be one run of real tokens per row, got {int(runs[row])} in row {row}"
            )
    if position_ids is None:
        return
    if attention_mask is None:
        attention_mask = torch.ones_like(position_ids, dtype=torch.bool)
    position_ids = position_ids.expand(attention_mask.shape[0], -1)
    real_ids = position_ids.masked_fill(~attention_mask, 0)
    if bool((real_ids < 0).any()):
        raise ValueError("position_ids must not be negative at real tokens")
    if bool((real_ids > _LAST_POSITION).any()):  # they are kept as int32
        raise ValueError(f"position_ids must be at most {_LAST_POSITION}, got {int(real_ids.max())}")
    both = attention_mask[:, 1:] & attention_mask[:, :-1]
    falling = both & (position_ids[:, 1:] <= position_ids[:, :-1])
    if bool(falling.any()):
        row, column = falling.nonzero()[0].tolist()
        pair = position_ids[row, column : column + 2].tolist()
        raise ValueError(f"position_ids must rise over a row's real tokens, got {pair[0]} then {pair[1]} in row {row}")
    if position_ids.shape[1] == 0:
        return
    cache._progress.require_complete()  # else what is cached says nothing
    newest = cache.positions(0).flatten(1).amax(1)
    first = position_ids.masked_fill(~attention_mask, torch.iinfo(position_ids.dtype).max).amin(1).expand_as(newest)
    behind = attention_mask.any(1) & (first <= newest)
    if bool(behind.any()):
        row = int(behind.nonzero()[0])
        raise ValueError(
            f"position_ids must go on after the cached tokens, got {int(first[row])} in row {row} after "
            f"{int(newest[row])}: pass what is new, not the whole history, or reset() the cache"
        )
