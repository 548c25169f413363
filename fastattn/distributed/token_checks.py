"""What a cache whose tokens are spread over ranks is made for, and what its calls may bring."""

from __future__ import annotations

from typing import Any

import torch

from fastattn.distributed.token_scores import check_policy
from fastattn.modules.kv_cache.call import NewTokens
from fastattn.modules.kv_cache.spec import CacheSpec
from fastattn.validation import check_no_grad, check_size, check_tensor, checks_values, find_split_row


def check_spec(spec: CacheSpec, rotary: Any) -> None:
    """What can be spread: one rotation, no window, no codes, a policy that scores a part of the tokens."""
    if spec.storage is not None:
        raise ValueError(f"storage must be None where tokens are spread over ranks, got {spec.storage!r}")
    if any(window is not None for window in spec.windows) or isinstance(rotary, (list, tuple)):
        raise ValueError(
            "window must be None and rotary one for all layers where tokens are spread over ranks, got windows "
            f"{list(spec.windows)} and {type(rotary).__name__}"
        )
    check_policy(spec.policy)


def check_new_tokens(spec: CacheSpec, new: NewTokens, layer: int, dtype: torch.dtype, device: torch.device) -> None:
    """The arguments of a call for ``layer``, before anything is written."""
    if new.layer != layer:
        raise ValueError(f"layer must be {layer}: the layers of a call come in order, got {new.layer}")
    heads, rows, held = spec.num_kv_heads, spec.batch_size, spec.layer(layer)
    widths = {"query": held.head_dim, "key": held.head_dim}
    tensors = {"query": new.query, "key": new.key}
    if held.latent_rank is None:
        tensors["value"], widths["value"] = new.value, held.v_head_dim
    elif new.value is not None or new.scale is None:
        raise ValueError("value must be None and scale be given for a latent cache")
    for name, tensor in tensors.items():
        check_tensor(name, tensor, "B H T D")
        assert tensor is not None
        check_size(name, tensor, 0, rows, "the cache's batch size")
        check_size(name, tensor, 2, new.key.shape[2], "key's tokens")
        check_size(name, tensor, 3, widths[name], "the cache's head dim")
        if name != "query":
            check_size(name, tensor, 1, heads, "the cache's key/value heads")
        elif tensor.shape[1] % heads:
            raise ValueError(f"query must have a multiple of the cache's {heads} heads, got {tensor.shape[1]}")
        if tensor.dtype != dtype or tensor.device != device:
            raise TypeError(f"{name} must be {dtype} on {device}, got {tensor.dtype} on {tensor.device}")
    check_no_grad("ContextParallelCache", **tensors)
    for name, given in (("attention_mask", new.attention_mask), ("position_ids", new.position_ids)):
        if given is not None and list(given.shape) != [rows, new.key.shape[2]]:
            raise ValueError(f"{name} must have shape [B T] = [{rows}, {new.key.shape[2]}], got {list(given.shape)}")
    mask = new.attention_mask
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"attention_mask must be bool or integers, False or 0 for padding, got {mask.dtype}")
    if mask is not None and checks_values(mask) and (split := find_split_row(mask)) is not None:
        row, runs = split
        raise ValueError(f"attention_mask must be one run of real tokens per row, got {runs} in row {row}")
