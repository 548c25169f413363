"""Checkpoints of multi-head latent attention that use other names than LowRankAttention does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# Of DeepSeek's own inference code and of torchtitan -> of DeepSeek's published checkpoints and of transformers.
_NAMES = {
    "wq": "q_proj",
    "wq_a": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "wq_b": "q_b_proj",
    "wkv_a": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "wkv_b": "kv_b_proj",
    "wo": "o_proj",
}
_LATENT = ("wkv_a", "kv_a_proj_with_mqa")  # only latent attention has this projection
_PACKED_SUFFIXES = ("scale", "weight_scale_inv", "weight_scale")


def from_deepseek_names(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """``state_dict`` with the parameters of its latent attention named as LowRankAttention names them.

    Takes the names of DeepSeek's inference code and of torchtitan (``wq``, ``wq_a``, ``q_norm``, ``wq_b``, ``wkv_a``,
    ``kv_norm``, ``wkv_b``, ``wo``) and those of transformers, which it leaves as they are. Shapes, the order of the
    rows and the interleaved rotary pairs are the same in all of them, so that tensors are passed on, not copied. Only
    names change, and only beside a ``wkv_a``: prefixes such as ``layers.3.attn.`` and everything else stay.

    Args:
        state_dict: of one attention module, of a layer or of a whole model.

    Raises:
        ValueError: there is no latent attention in it, its weights are packed (float8 or integer with scales), or two
            names mean the same parameter.
    """
    prefixes = {_split(name)[0] for name in state_dict if _split(name)[1] in _LATENT}
    if not prefixes:
        raise ValueError(
            f"state_dict must hold a latent attention, that is a parameter of {' or '.join(_LATENT)}, got "
            f"{_some(state_dict)}"
        )
    renamed: dict[str, Any] = {}
    for name, value in state_dict.items():
        prefix, module, rest = _split(name)
        if prefix in prefixes and module in (*_NAMES, *_NAMES.values()):
            _refuse_packed(name, rest, value)
            name = f"{prefix}{_NAMES.get(module, module)}.{rest}"
        if name in renamed:
            raise ValueError(f"state_dict must name every parameter once, got two for {name}")
        renamed[name] = value
    return renamed


def _split(name: str) -> tuple[str, str, str]:
    """``"layers.0.attn.wq_a.weight"`` as ``("layers.0.attn.", "wq_a", "weight")``."""
    head, _, rest = name.rpartition(".")
    prefix, dot, module = head.rpartition(".")
    return prefix + dot, module, rest


def _refuse_packed(name: str, rest: str, value: Any) -> None:
    if rest in _PACKED_SUFFIXES:
        raise ValueError(f"weights must be unpacked to a floating dtype first, got {name}, the scale of packed weights")
    if isinstance(value, Tensor) and (not value.is_floating_point() or torch.finfo(value.dtype).bits < 16):
        raise ValueError(f"{name} must be of a floating dtype of at least 16 bits, got {value.dtype}: unpack it first")


def _some(state_dict: Mapping[str, Any]) -> str:
    names = list(state_dict)
    return f"{names[:5]}" + (f" and {len(names) - 5} more" if len(names) > 5 else "")
