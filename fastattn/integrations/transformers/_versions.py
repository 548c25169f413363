"""What differs between the transformers releases that the project supports (5.2 to 5.24): nothing else knows."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

# The cache's name as an argument of a model: `past_key_values` became `cache`, the old name is an alias for now.
CACHE_ARGUMENTS = ("cache", "past_key_values")


def cache_argument(module: nn.Module) -> str:
    """What ``module.forward`` calls its cache.

    Raises:
        ValueError: it takes none.
    """
    parameters = inspect.signature(module.forward).parameters
    for name in CACHE_ARGUMENTS:
        if name in parameters:
            return name
    raise ValueError(f"{type(module).__name__}.forward takes none of the arguments {', '.join(CACHE_ARGUMENTS)}")


def query_columns(mask_arguments: dict[str, Any]) -> int:
    """The number of new tokens that a mask function was called for."""
    if "q_length" in mask_arguments:
        return mask_arguments["q_length"]
    return mask_arguments["cache_position"].shape[0]


def query_length(asked: Any) -> int:
    """The argument of ``get_mask_sizes``: a number, or the positions of the new columns (5.2)."""
    return asked if isinstance(asked, int) else asked.shape[0]


def columns_to_crop(tokens: int, columns: int) -> int:
    """How many columns ``Cache.crop(tokens)`` takes back.

    A negative number always counts what goes. A positive one is the length that stays (5.2), or an error for
    transformers' own caches (5.24); zero empties the cache in 5.2 and does nothing in 5.24, where assisted decoding
    calls it every step.
    """
    if tokens < 0:
        return -tokens
    if tokens == 0 and CROP_ZERO_IS_NOOP:
        return 0
    return max(columns - tokens, 0)


# `crop(max_length)` became `crop(tokens_to_remove)`.
CROP_ZERO_IS_NOOP = "tokens_to_remove" in inspect.signature(DynamicCache.crop).parameters


def standard_layers(config: Any) -> list[Any]:
    """The layers of the cache that transformers itself would make for ``config``, new and empty."""
    return DynamicCache(config=config).layers


def argument_position(module: nn.Module, name: str) -> int:
    """Where the argument ``name`` of ``module.forward`` stands when it is passed by position."""
    return list(inspect.signature(module.forward).parameters).index(name)


def takes_keywords(module: nn.Module) -> bool:
    """``module.forward`` takes keyword arguments that it does not name."""
    parameters = inspect.signature(module.forward).parameters.values()
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def takes_columns(module: nn.Module) -> bool:
    """``module.forward`` is told which columns are new (5.2), and else counts them in a way that does not compile."""
    return "cache_position" in inspect.signature(module.forward).parameters


def give_columns(args: tuple[Any, ...], kwargs: dict[str, Any], columns: Any) -> None:
    """Add the new columns, which follow ``columns`` old ones, to the ``kwargs`` of a call that does not name them."""
    tokens = args[0] if args else kwargs.get("input_ids")
    if tokens is None:
        tokens = kwargs.get("inputs_embeds")
    if tokens is not None and kwargs.get("cache_position") is None and len(args) < 2:
        kwargs["cache_position"] = torch.arange(tokens.shape[1], device=tokens.device) + columns
