"""Argument checks of LowRankAttention: each names what came and what was expected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fastattn import validation as check
from fastattn.modules.kv_cache import CompressedKVCache


def check_dims(
    hidden_size: int,
    num_heads: int,
    kv_lora_rank: int,
    q_lora_rank: int | None,
    qk_nope_head_dim: int,
    qk_rope_head_dim: int,
    v_head_dim: int,
) -> None:
    """Sizes are positive integers that fit together."""
    check.check_count("hidden_size", hidden_size, 1)
    check.check_count("num_heads", num_heads, 1)
    check.check_count("kv_lora_rank", kv_lora_rank, 1)
    check.check_count("qk_nope_head_dim", qk_nope_head_dim, 0)
    check.check_count("qk_rope_head_dim", qk_rope_head_dim, 2)
    check.check_count("v_head_dim", v_head_dim, 1)
    ranks = {"kv_lora_rank": kv_lora_rank}
    if q_lora_rank is not None:
        check.check_count("q_lora_rank", q_lora_rank, 1)
        ranks["q_lora_rank"] = q_lora_rank
    for name, rank in ranks.items():
        if rank > 2 * hidden_size:
            raise ValueError(f"{name} must be at most 2 * hidden_size = {2 * hidden_size}, got {rank}")
    if qk_rope_head_dim % 2:
        raise ValueError(f"qk_rope_head_dim must be even (dims rotate in pairs), got {qk_rope_head_dim}")


def check_frequencies(inv_freq: Tensor | None, rope_dim: int, theta: float, scaling: Mapping[str, Any] | None) -> None:
    """A base and a scaling that give frequencies, or ``inv_freq`` with one per rotated pair and neither of them."""
    if isinstance(theta, bool) or not isinstance(theta, (int, float)):
        raise TypeError(f"rope_theta must be a float, got {type(theta).__name__}")
    if not 0.0 < theta < float("inf"):
        raise ValueError(f"rope_theta must be positive and finite, got {theta}")
    if scaling is not None and not isinstance(scaling, Mapping):
        raise TypeError(f"rope_scaling must be a dict with a rope_type or None, got {type(scaling).__name__}")
    if inv_freq is None:
        return
    if not isinstance(inv_freq, Tensor):
        raise TypeError(f"inv_freq must be a tensor [qk_rope_head_dim / 2], got {type(inv_freq).__name__}")
    if tuple(inv_freq.shape) != (rope_dim // 2,):
        raise ValueError(
            f"inv_freq must have shape [{rope_dim // 2}] for qk_rope_head_dim {rope_dim}, got {list(inv_freq.shape)}"
        )
    if scaling is not None:
        raise ValueError(f"rope_scaling must be None where inv_freq gives the frequencies, got {dict(scaling)}")


def check_input(hidden_states: Tensor, hidden_size: int, projection: nn.Module) -> None:
    """``[B, T, hidden_size]`` in the weights' dtype, or any float dtype under autocast."""
    check.check_tensor("hidden_states", hidden_states, "B T hidden_size")
    check.check_size("hidden_states", hidden_states, 2, hidden_size, "the module's hidden_size")
    if hidden_states.shape[1] == 0:
        raise ValueError(f"hidden_states must hold at least one token, got shape {list(hidden_states.shape)}")
    dtype = float_dtype(projection)
    if dtype in (None, hidden_states.dtype) or check.autocasts(hidden_states.device.type):
        return
    raise TypeError(f"hidden_states must have the weights' dtype {dtype}, got {hidden_states.dtype}")


def float_dtype(projection: nn.Module) -> torch.dtype | None:
    """The dtype of a projection's weight; None where it has no float weight of at least 16 bits (quantized)."""
    weight = getattr(projection, "weight", None)
    if isinstance(weight, Tensor) and weight.dtype in check.FLOATS:
        return weight.dtype
    return None


def device_of(projection: nn.Module) -> torch.device | None:
    """Where a projection's weight is; None where it has no weight or only the promise of one (the meta device)."""
    weight = getattr(projection, "weight", None)
    return weight.device if isinstance(weight, Tensor) and not weight.is_meta else None


def check_positions(position_ids: Tensor | None, hidden_states: Tensor) -> None:
    """int ``[B, T]``."""
    if position_ids is None:
        return
    check.check_tensor("position_ids", position_ids, "B T")
    if position_ids.is_floating_point() or position_ids.dtype == torch.bool:
        raise TypeError(f"position_ids must be an integer tensor, got {position_ids.dtype}")
    if position_ids.shape != hidden_states.shape[:2]:
        raise ValueError(
            f"position_ids must have the shape [B, T] of hidden_states, {list(hidden_states.shape[:2])}, "
            f"got {list(position_ids.shape)}"
        )
    check.check_device("position_ids", position_ids, "hidden_states", hidden_states)


def bool_mask(mask: Tensor | None) -> Tensor | None:
    """A mask of integers, as tokenizers give it, as bool."""
    if isinstance(mask, Tensor) and not mask.is_floating_point() and not mask.is_complex():
        return mask.bool()
    return mask


def spreads_tokens(cache: Any) -> bool:
    """Whether this is a cache of ``fastattn.distributed``, which attends as one and shows no slots of its own."""
    return getattr(cache, "token_mesh", None) is not None


def check_owner(cache: CompressedKVCache, layer: int, module: nn.Module) -> None:
    """No other module uses this layer of the cache (looked at in eager mode)."""
    if not torch.compiler.is_compiling() and isinstance(cache, CompressedKVCache):
        cache._progress.claim(layer, module)


def check_mask(mask: Tensor | None, hidden_states: Tensor) -> None:
    """bool ``[B, T]`` whose True stretch is contiguous in every row (looked at in eager mode on a CPU)."""
    if mask is None:
        return
    check.check_tensor("attention_mask", mask, "B T")
    if mask.dtype != torch.bool:
        raise TypeError(f"attention_mask must be bool or integers (False or 0 for padding), got {mask.dtype}")
    if mask.shape != hidden_states.shape[:2]:
        raise ValueError(
            f"attention_mask must have the shape [B, T] of hidden_states, {list(hidden_states.shape[:2])}, "
            f"got {list(mask.shape)}"
        )
    check.check_device("attention_mask", mask, "hidden_states", hidden_states)
    if check.checks_values(mask):
        split = check.find_split_row(mask)
        if split is not None:
            row, stretches = split
            raise ValueError(
                f"attention_mask must be True over one contiguous stretch of every row, got {stretches} "
                f"stretches in row {row}"
            )


def check_cache(
    cache: CompressedKVCache,
    layer: int,
    hidden_states: Tensor,
    rank: int,
    rope_dim: int,
    causal: bool,
    absorb: bool | None,
) -> None:
    """A latent cache of this module's dims in ``layer`` and of the input's batch, used causally."""
    if not isinstance(cache, CompressedKVCache) and not spreads_tokens(cache):
        raise TypeError(f"cache must be a CompressedKVCache (make_cache gives one) or None, got {type(cache).__name__}")
    if not causal:
        raise ValueError("causal must be True with a cache: its tokens come before the new ones, got False")
    held = cache.layer_spec(layer)
    if held.latent_rank != rank or held.head_dim != rank + rope_dim or held.num_kv_heads != 1:
        raise ValueError(
            f"cache must be a latent cache of latent_rank {rank}, head_dim {rank + rope_dim} and one key/value head "
            f"in layer {layer} (make_cache gives one), got latent_rank {held.latent_rank}, head_dim {held.head_dim} "
            f"and {held.num_kv_heads} key/value heads"
        )
    if hidden_states.shape[0] != cache.batch_size:
        raise ValueError(
            f"hidden_states must have the cache's batch size {cache.batch_size}, got {hidden_states.shape[0]}"
        )
    if absorb is False and cache.policy.rerotate:
        raise ValueError(
            f"absorb must be None or True with {cache.policy!r}, which rotates cached keys again for every call, "
            "got False"
        )
    if absorb is False and spreads_tokens(cache):
        raise ValueError("absorb must be None or True with a cache whose tokens are spread over ranks, got False")


def check_absorb(absorb: bool | None) -> None:
    """True, False or None: nothing else decides between the paths."""
    if absorb is not None and not isinstance(absorb, bool):
        raise TypeError(f"absorb must be a bool or None, got {type(absorb).__name__}")


def check_no_grad(*tensors: Tensor) -> None:
    """No gradient flows into a cache, and no derivative of forward mode."""
    check.refuse_forward_mode("LowRankAttention with a cache", *tensors)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ValueError("a cache passes no gradient on: call the module with cache= under torch.no_grad()")
