"""Checks of a cache's calls, of row indices, and of saved states. They take the cache's state, not the cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastattn import validation as check
from fastattn.modules.kv_cache.call import NewTokens
from fastattn.modules.kv_cache.spec import CacheSpec
from fastattn.modules.kv_cache.state import CallState
from fastattn.ops._features import check_features
from fastattn.ops.cache import check_finite

_LAST_POSITION = 2**31 - 1
HALF_WRITTEN = "_half_written"  # the name in a state that was saved between the layers of one call


def check_layer(spec: CacheSpec, layer: int) -> None:
    """``layer`` is one of the cache's layers."""
    if isinstance(layer, bool) or not isinstance(layer, int):
        raise TypeError(f"layer must be an integer, got {type(layer).__name__}")
    if not 0 <= layer < spec.num_layers:
        raise ValueError(f"layer must be in 0..{spec.num_layers - 1}, got {layer}")


def row_index(index: Tensor, rows: int, device: torch.device, name: str = "index", distinct: bool = False) -> Tensor:
    """``index`` as int64 on the cache's device, its values checked on a CPU."""
    if not isinstance(index, Tensor):
        raise TypeError(f"{name} must be an integer tensor, got {type(index).__name__}")
    if index.dim() != 1 or index.is_floating_point() or index.dtype == torch.bool:
        raise ValueError(f"{name} must be integers [N], got {index.dtype} {list(index.shape)}")
    if check.checks_values(index) and index.numel():
        if not bool(((index >= 0) & (index < rows)).all()):
            raise ValueError(f"{name} must name rows 0..{rows - 1}, got {index.tolist()}")
        if distinct and index.unique().numel() != index.numel():
            raise ValueError(f"{name} must name every row once, got {index.tolist()}")
    return index.to(device, torch.int64)


def check_source(held: CacheSpec, source: CacheSpec, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Rows of a cache of spec ``source`` fit into one of spec ``held``."""
    if dtypes[0] != dtypes[1]:
        raise TypeError(f"source must have the cache's dtype {dtypes[0]}, got {dtypes[1]}")
    if source.storage != held.storage:
        raise ValueError(f"source must have the cache's storage {held.storage!r}, got {source.storage!r}")
    if source.num_layers != held.num_layers:
        raise ValueError(f"source must have the cache's {held.num_layers} layers, got {source.num_layers}")
    for layer in range(held.num_layers):
        if source.layer(layer) != held.layer(layer):
            raise ValueError(
                f"source must have layers like the cache's: layer {layer} must be {held.layer(layer)}, got "
                f"{source.layer(layer)}"
            )
    if source.policy.query_window != held.policy.query_window:
        raise ValueError(
            f"source must keep the cache's {held.policy.query_window} newest queries, got a policy that keeps "
            f"{source.policy.query_window}"
        )
    if held.num_heads is not None and source.num_heads not in (None, held.num_heads):
        raise ValueError(f"source must have the cache's {held.num_heads} query heads, got {source.num_heads}")


def row_counts(tokens: Tensor, rows: int, device: torch.device) -> Tensor:
    """``tokens``, one number per row, as int64 on the cache's device."""
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise TypeError(f"tokens must be an integer or integers [B], got {tokens.dtype}")
    if list(tokens.shape) != [rows]:
        raise ValueError(f"tokens must be an integer or integers [B] = [{rows}], got {list(tokens.shape)}")
    return tokens.to(device, torch.int64)


def check_croppable_rows(tokens: Tensor, croppable: Tensor) -> None:
    """Every row can give back as many of its newest tokens."""
    wrong = ((tokens < 0) | (tokens > croppable)).nonzero().flatten().tolist()
    if wrong:
        row = wrong[0]
        raise ValueError(
            f"tokens must be at least 0 and at most {int(croppable[row])} in row {row}, the newest tokens that have "
            f"seen no compression since, got {int(tokens[row])}"
        )


# -- a saved state ---------------------------------------------------------------------------------------------------


def queries_names(spec: CacheSpec, prefix: str) -> list[str]:
    """What the layers' newest queries are called in a state; none where the policy keeps no queries."""
    return list(queries_by_layer(spec, prefix).values())


def queries_by_layer(spec: CacheSpec, prefix: str) -> dict[int, str]:
    """The same, for every layer that keeps queries."""
    with_queries = [layer for layer, window in enumerate(spec.windows) if window is None] if spec.ring_size else []
    return {layer: f"{prefix}layers.{layer}.queries" for layer in with_queries}


def holds_no_query(state: Mapping[str, Any], prefix: str) -> bool:
    """Whether ``state`` says that no place of the ring of queries is filled."""
    index = state.get(f"{prefix}_query_index")
    return index is not None and not bool((index >= 0).any())


def check_saved(
    spec: CacheSpec, held: Mapping[str, Tensor], saved: Mapping[str, Any], prefix: str, strict: bool
) -> None:
    """``saved``, whose names begin with ``prefix``, fits what the cache holds: shapes and, if ``strict``, names.

    Empty newest queries that only one of the two has are no difference: they come with the first call.
    """
    if f"{prefix}{HALF_WRITTEN}" in saved:
        raise ValueError(
            "state_dict must be of a cache whose last call went through all layers: this one was saved between the "
            "layers of a call, or after one that failed"
        )
    shapes = {f"{prefix}{name}": list(value.shape) for name, value in held.items() if name != HALF_WRITTEN}
    late = queries_names(spec, prefix)
    for layer, name in queries_by_layer(spec, prefix).items():
        if name in saved and name not in shapes:
            heads = spec.num_heads or saved[name].shape[1]
            shapes[name] = [spec.batch_size, heads, spec.ring_size + 1, spec.head_dims[layer]]
    for name, expected in shapes.items():
        actual = list(getattr(saved.get(name), "shape", ()))
        if name in saved and actual != expected:
            raise ValueError(
                f"state_dict must hold {name} of shape {expected}, got {actual}: it was saved from a cache of another "
                "size"
            )
    for layer in range(spec.num_layers):
        _check_saved_lengths(f"{prefix}layers.{layer}.lengths", saved, spec.layer(layer).capacity)
    if spec.storage is not None or any(_is_code(saved.get(name)) for name in shapes):
        for name, value in held.items():
            dtype = getattr(saved.get(f"{prefix}{name}"), "dtype", value.dtype)
            if dtype != value.dtype and not (dtype.is_floating_point and value.dtype.is_floating_point):
                raise ValueError(
                    f"state_dict must be of a cache with storage {spec.storage!r}, whose {name} are {value.dtype}, got "
                    f"{dtype}"
                )
    optional = late if holds_no_query(saved, prefix) else []
    missing = [name for name in shapes if name not in saved and name not in optional]
    unexpected = [name for name in saved if name not in shapes]
    if strict and (missing or unexpected):
        raise ValueError(
            f"state_dict must hold what the cache holds, but it lacks {missing} and has {unexpected} besides: it was "
            "saved from another kind of cache"
        )


def _check_saved_lengths(name: str, saved: Mapping[str, Any], slots: int) -> None:
    """Saved lengths lie within the buffers, where looking at them waits for no device."""
    lengths = saved.get(name)
    if not isinstance(lengths, Tensor) or not check.checks_values(lengths) or lengths.numel() == 0:
        return
    least, most = (int(value) for value in lengths.aminmax())
    if least < 0 or most > slots:
        wrong = least if least < 0 else most
        raise ValueError(f"state_dict must hold {name} within the {slots} slots of a row and head, got {wrong}")


def _is_code(saved: Any) -> bool:
    return getattr(saved, "dtype", None) in (torch.int8, torch.uint8)


# -- a call ----------------------------------------------------------------------------------------------------------


def is_plain(state: CallState, new: NewTokens) -> bool:
    """Whether the checks would find nothing, told without calling them: this runs on every step of every layer.

    True for keys, values and queries that fit, with neither mask nor positions to look at the values of. False says
    nothing; the checks then decide.
    """
    query, key, value = new.query, new.key, new.value
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        return False
    spec, layer, keys = state.spec, state.layer.spec, state.layer._buffers["keys"]
    if keys is None or query.dim() != 4 or layer.latent_rank is not None:
        return False
    if layer.storage is not None or new.features:
        return False
    if state.index == 0 and not (new.attention_mask is None and new.position_ids is None):
        return False
    rows, heads, tokens, width = query.shape
    return (
        rows == spec.batch_size
        and tokens > 0
        and width == layer.head_dim
        and heads % layer.num_kv_heads == 0
        and spec.num_heads in (None, heads)
        and key.shape == (rows, layer.num_kv_heads, tokens, width)
        and value.shape == (rows, layer.num_kv_heads, tokens, layer.v_head_dim)
        and not (query.requires_grad or key.requires_grad or value.requires_grad)
        and forward_ad._current_level < 0
        and keys.dtype == query.dtype == key.dtype == value.dtype
        and keys.device == query.device == key.device == value.device
        and (new.scale is None or type(new.scale) is float)  # checked for its value when the call is made
        and _fit_tokens(new, rows, tokens)
    )


def _fit_tokens(new: NewTokens, rows: int, tokens: int) -> bool:
    """The layers after the first: a mask and positions of the right kind, whose values the first has looked at."""
    mask, position_ids = new.attention_mask, new.position_ids
    if mask is not None and not (
        isinstance(mask, Tensor)
        and mask.shape == (rows, tokens)
        and mask.dtype == torch.bool
        and mask.device == new.key.device
    ):
        return False
    return position_ids is None or (
        isinstance(position_ids, Tensor)
        and position_ids.shape in ((rows, tokens), (1, tokens))
        and position_ids.dtype in (torch.int64, torch.int32)
        and position_ids.device == new.key.device
    )


def check_new_tokens(state: CallState, new: NewTokens) -> None:
    """Everything that can be wrong with the arguments of ``attend`` and ``update``, before anything is written."""
    spec, layer, policy = state.spec, state.layer.spec, state.spec.policy
    needs_queries = spec.needs_queries
    _check_new(state, "key", new.key, "B Hkv T Dk", layer.num_kv_heads, layer.head_dim)
    rows, _, tokens, _ = new.key.shape
    if tokens == 0:
        raise ValueError(
            "key must bring at least one new token, got none: pass the tokens that the cache has not seen, or reset() "
            "it to feed a text anew"
        )
    if new.query is not None:
        _check_new(state, "query", new.query, "B H T Dk", None, layer.head_dim)
        check.check_size("query", new.query, 2, tokens, "key's tokens")
        check.check_groups(new.query, new.key)
        if spec.num_heads is not None and new.query.shape[1] != spec.num_heads:
            raise ValueError(f"query must have the cache's {spec.num_heads} heads, got {new.query.shape[1]}")
    elif new.attend:
        raise TypeError("query must be a tensor [B H T Dk], got NoneType")
    elif needs_queries:
        raise TypeError(f"query must be a tensor: {type(policy).__name__} looks at queries, got NoneType")
    if layer.latent_rank is not None:
        if new.value is not None:
            raise ValueError(f"value must be None for a latent cache, got {list(new.value.shape)}")
        if new.scale is None and (new.attend or needs_queries):
            raise TypeError("scale must be given to a latent cache: it does not follow from its shapes, got None")
    else:
        if new.value is None:
            raise TypeError("value must be a tensor [B Hkv T Dv], got NoneType")
        _check_new(state, "value", new.value, "B Hkv T Dv", layer.num_kv_heads, layer.v_head_dim)
        check.check_size("value", new.value, 2, tokens, "key's tokens")
    check.check_no_grad("CompressedKVCache", query=new.query, key=new.key, value=new.value)
    check.resolve_scale(new.scale, layer.head_dim)
    if layer.storage is not None and check.checks_values(new.key):
        mask = new.attention_mask
        check_finite(None if mask is None or mask.shape != (rows, tokens) else mask, key=new.key, value=new.value)
    if new.query is not None and new.features:
        sinks, softcap, slopes = (new.features.get(name) for name in ("sinks", "softcap", "alibi_slopes"))
        check_features("CompressedKVCache", new.query, "query", None, sinks, softcap, slopes)
        check.check_no_grad("CompressedKVCache", sinks=sinks)
        if slopes is not None and layer.latent_rank is not None:
            raise ValueError("alibi_slopes must be None for a latent cache, got a tensor")
    _check_mask_and_positions(state, new, rows, tokens)


def _check_mask_and_positions(state: CallState, new: NewTokens, rows: int, tokens: int) -> None:
    mask, position_ids = new.attention_mask, new.position_ids
    if mask is not None:
        _check_per_token(state, "attention_mask", mask, rows, tokens)
        if mask.dtype != torch.bool:
            raise TypeError(f"attention_mask must be bool or integers, False or 0 for padding, got {mask.dtype}")
    if position_ids is not None:
        _check_per_token(state, "position_ids", position_ids, rows, tokens, broadcast=True)
        if position_ids.is_floating_point() or position_ids.dtype == torch.bool:
            raise TypeError(f"position_ids must be integers, got {position_ids.dtype}")
    if not state.is_first or not check.checks_values(new.key):
        return
    if position_ids is not None:
        _check_position_values(state, position_ids, mask)


def _check_new(state: CallState, name: str, new: Tensor, dims: str, heads: int | None, head_dim: int) -> None:
    check.check_tensor(name, new, dims)
    keys, rows = state.layer.keys, state.spec.batch_size
    dtype = keys.dtype if state.spec.storage is None else state.layer.number_dtype
    if new.shape[0] != rows:
        raise ValueError(f"{name} must have the cache's batch size {rows}, got {new.shape[0]}")
    if heads is not None and new.shape[1] != heads:
        raise ValueError(f"{name} must have the cache's {heads} key/value heads, got {new.shape[1]}")
    if new.shape[3] != head_dim:
        raise ValueError(f"{name} must have the cache's head dim {head_dim}, got {new.shape[3]}")
    if new.dtype != dtype:
        raise TypeError(
            f"{name} must have the cache's dtype {dtype}, got {new.dtype}: make the cache with "
            f"dtype={new.dtype}, or cast"
        )
    if new.device != keys.device:
        raise ValueError(f"{name} must be on the cache's device {keys.device}, got {new.device}")


def _check_per_token(state: CallState, name: str, new: Tensor, rows: int, tokens: int, broadcast: bool = False) -> None:
    check.check_tensor(name, new, "B T")
    if new.shape[1] != tokens or not (new.shape[0] == rows or (broadcast and new.shape[0] == 1)):
        raise ValueError(f"{name} must have shape [B T] = [{rows}, {tokens}], got {list(new.shape)}")
    device = state.layer.keys.device
    if new.device != device:
        raise ValueError(f"{name} must be on the cache's device {device}, got {new.device}")


def _check_position_values(state: CallState, position_ids: Tensor, mask: Tensor | None) -> None:
    """Positions of real tokens rise, on from those in the cache."""
    if mask is None:
        mask = torch.ones_like(position_ids, dtype=torch.bool)
    position_ids = position_ids.expand(mask.shape[0], -1)
    real_ids = position_ids.masked_fill(~mask, 0)
    if bool((real_ids < 0).any()):
        raise ValueError("position_ids must not be negative at real tokens")
    if bool((real_ids > _LAST_POSITION).any()):  # they are kept as int32
        raise ValueError(f"position_ids must be at most {_LAST_POSITION}, got {int(real_ids.max())}")
    before = position_ids.masked_fill(~mask, -1).cummax(1).values[:, :-1]  # over padding between real tokens too
    falling = mask[:, 1:] & (position_ids[:, 1:] <= before)
    if bool(falling.any()):
        row, column = falling.nonzero()[0].tolist()
        pair = int(before[row, column]), int(position_ids[row, column + 1])
        raise ValueError(f"position_ids must rise over a row's real tokens, got {pair[0]} then {pair[1]} in row {row}")
    if position_ids.shape[1] == 0:
        return
    state.progress.require_complete()  # else what is cached says nothing
    newest = state.layer.positions.flatten(1).amax(1)
    first = position_ids.masked_fill(~mask, torch.iinfo(position_ids.dtype).max).amin(1).expand_as(newest)
    behind = mask.any(1) & (first <= newest)
    if bool(behind.any()):
        row = int(behind.nonzero()[0])
        raise ValueError(
            f"position_ids must go on after the cached tokens, got {int(first[row])} in row {row} after "
            f"{int(newest[row])}: pass what is new, not the whole history, or reset() the cache"
        )
