"""The attention and mask functions that transformers calls once a model is switched to ``"fastattn"``.

A forward pass that carries one of this package's caches is served by it. Any other goes to the implementation the
model had before, with the masks that one needs, so that its results do not change by a bit.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fastattn.integrations._arguments import CACHE_KEYWORD
from fastattn.integrations.transformers import _versions
from fastattn.validation import checks_values

NAME = "fastattn"

# A compressed layer reports this as the offset of its keys. transformers hands the offset to the mask function as it
# is: that is how the mask function, which never sees the cache, learns for whom it works.
COMPRESSED = -1
# Masks for compressed layers are [B, 1, 1, T], True where the new token is real. They are recognized by this dtype,
# which no other mask has: 4-D so that transformers passes them on, uint8 so that neither a caller's mask is taken for
# one of them nor one of them for a caller's. Two shapes have a meaning of their own.
MASK_DTYPE = torch.uint8
_ALL_REAL = (1, 1, 1, 0)
_UNSUPPORTED = (0, 1, 1, 1)

# id(config) -> the implementation before the switch. By identity, since configs compare by value and cannot be
# hashed, and not as an attribute of the config, which would be written into config.json.
_PREVIOUS: dict[int, str] = {}


def remember_previous(config: Any, implementation: str) -> None:
    """Note what ``config`` used before it was switched to ``"fastattn"``."""
    if id(config) not in _PREVIOUS:
        weakref.finalize(config, _PREVIOUS.pop, id(config), None)
    _PREVIOUS[id(config)] = implementation


def was_switched(config: Any) -> bool:
    """Whether what ``config`` used before is known."""
    return id(config) in _PREVIOUS


def previous_implementation(config: Any) -> str:
    """What ``config`` used before it was switched."""
    name = _PREVIOUS.get(id(config))
    if name is None:
        raise ValueError(
            f'attn_implementation="{NAME}" is set by compressed_cache(model, ...), which has not seen this '
            f"{type(config).__name__}: choose another implementation, then call compressed_cache"
        )
    return name


def eager_attention(module: nn.Module) -> Callable[..., Any] | None:
    """The ``eager`` attention of the model that ``module`` belongs to: transformers keeps it beside the model."""
    return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)


def previous_attention(module: nn.Module) -> Callable[..., Any]:
    """The attention function that ``module`` used before the switch."""
    name = previous_implementation(module.config)
    if name == "eager":
        function = eager_attention(module)
        if function is None:
            raise ValueError(f'{type(module).__name__} has no attention function "eager"')
        return function
    return ALL_ATTENTION_FUNCTIONS[name]


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """``query [B, H, T, D]``, ``key`` and ``value [B, Hkv, T, D]`` -> ``[B, T, H, Dv]`` and attention weights or None.

    ``dropout`` comes by position from functions that wrap all registered ones (kvpress does), so it stands where
    transformers' own have it.
    """
    cache = kwargs.pop(CACHE_KEYWORD, None)
    if cache is not None:
        kwargs["dropout"] = dropout
        return cache.attend(module, query, key, value, attention_mask, kwargs)
    if attention_mask is not None and attention_mask.dtype == MASK_DTYPE:
        raise ValueError(
            f"{type(module).__name__} was not handed the argument {CACHE_KEYWORD!r} that its model was called with, so "
            "its compressed cache is out of reach: the layers of this model must pass keyword arguments on"
        )
    return previous_attention(module)(module, query, key, value, attention_mask, dropout=dropout, **kwargs)


def mask_function(**arguments: Any) -> Any:
    """The mask of one forward pass: for compressed layers which new tokens are real, else the previous function's."""
    if not _is_compressed(arguments["kv_offset"]):
        return _previous_mask(arguments)
    if arguments["mask_function"] is not causal_mask_function:
        # Not an error yet: some models ask for a sliding mask whether or not a layer uses it.
        return torch.empty(_UNSUPPORTED, dtype=MASK_DTYPE)
    columns = _versions.query_columns(arguments)
    mask = arguments["attention_mask"]
    if mask is None:
        return torch.empty(_ALL_REAL, dtype=MASK_DTYPE)
    if mask.dim() != 2 or mask.shape[1] < columns:
        raise ValueError(
            f"attention_mask must be [batch, columns] with at least the {columns} new columns, got {list(mask.shape)}"
        )
    # A copy: the slice's stride grows with the text, and a compiled graph would see a new one every step.
    real = mask[:, mask.shape[1] - columns :].to(torch.bool).clone(memory_format=torch.contiguous_format)
    if checks_values(real) and bool(real.all()):
        return torch.empty(_ALL_REAL, dtype=MASK_DTYPE)
    return real.view(MASK_DTYPE)[:, None, None, :]


def new_token_mask(attention_mask: Tensor | None) -> Tensor | None:
    """bool ``[B, T]`` from what :func:`mask_function` returned, None if every new token is real.

    Raises:
        ValueError: the mask comes from elsewhere, or of a kind that is not supported.
    """
    if attention_mask is None:
        return None
    if attention_mask.dtype != MASK_DTYPE:
        raise ValueError(
            "attention_mask must be [batch, columns] for a compressed cache, which keeps no fixed relation between "
            f"slots and columns; got a prepared mask {list(attention_mask.shape)} ({attention_mask.dtype})"
        )
    if attention_mask.shape[0] == 0:
        raise ValueError(
            "a compressed cache serves causal attention: a bidirectional, packed, sliding, chunked or block mask, as "
            "asked for by this call, is not supported on its layers"
        )
    if attention_mask.shape[3] == 0:
        return None
    return attention_mask.view(torch.bool)[:, 0, 0]


def _is_compressed(offset: Any) -> bool:
    return isinstance(offset, int) and offset == COMPRESSED


def _previous_mask(arguments: dict[str, Any]) -> Any:
    name = previous_implementation(arguments["config"])
    if name not in ALL_MASK_ATTENTION_FUNCTIONS:  # as transformers does: such an implementation needs no mask
        return None
    return ALL_MASK_ATTENTION_FUNCTIONS[name](**arguments)


ALL_ATTENTION_FUNCTIONS.register(NAME, attention_forward)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask_function)
