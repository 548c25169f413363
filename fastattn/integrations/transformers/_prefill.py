"""Feeding a long prompt in chunks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from fastattn.integrations.transformers import _versions
from fastattn.integrations.transformers._cache import CompressedCache
from fastattn.validation import check_count


@torch.no_grad()
def prefill(
    model: Any,
    input_ids: Tensor,
    cache: CompressedCache,
    chunk_size: int = 2048,
    attention_mask: Tensor | None = None,
    *,
    progress: bool = True,
) -> Tensor:
    """Feed ``input_ids`` in chunks, each compressed before the next comes, so that memory stays bounded.

    What it returns stays at ``cache.next_logits`` as well, for :func:`save_prefix` and :func:`score_continuations`.

    Args:
        model: the model that ``cache`` was made for.
        input_ids: ``[B, T]``, what follows the tokens already in the cache.
        cache: from :func:`compressed_cache`.
        chunk_size: tokens per forward pass.
        attention_mask: ``[B, T]``, 0 or False at padding; may also cover the columns fed earlier, as ``generate`` has
            it.
        progress: show a progress bar where there is more than one chunk.

    Returns:
        The logits of the last column, ``[B, vocabulary]``.

    Raises:
        TypeError, ValueError: arguments that do not fit.
    """
    if not isinstance(cache, CompressedCache):
        raise TypeError(f"cache must come from compressed_cache, got {type(cache).__name__}")
    if isinstance(input_ids, Mapping) and "input_ids" in input_ids:
        raise TypeError(f'input_ids must be token ids, got {type(input_ids).__name__}: pass its ["input_ids"]')
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or input_ids.shape[1] == 0:
        raise ValueError(f"input_ids must be a tensor [B, T] of at least one token, got {_shape(input_ids)}")
    check_count("chunk_size", chunk_size, 1)
    rows, tokens = input_ids.shape
    cache.size_for(rows)
    before = int(cache.kv.columns)
    mask = whole_mask(attention_mask, before, input_ids, cache)
    logits = None
    with tqdm(total=tokens, unit="tok", desc="prefill", disable=not progress or tokens <= chunk_size) as bar:
        for start in range(0, tokens, chunk_size):
            chunk = slice(start, start + chunk_size)
            logits = feed(model, input_ids[:, chunk], cache, mask[:, : before + start + chunk_size], last=True)
            bar.update(input_ids[:, chunk].shape[1])
    assert logits is not None  # at least one chunk ran
    cache.next_logits = logits[:, -1].clone()
    return cache.next_logits


def feed(model: Any, input_ids: Tensor, cache: CompressedCache, mask: Tensor, last: bool = False) -> Tensor:
    """One call of ``model``: logits ``[B, T or 1, vocabulary]`` of all new columns, or where possible of the last.

    Args:
        model: the model.
        input_ids: ``[B, T]``.
        cache: of ``B`` rows.
        mask: ``[B, columns]``, of all columns so far, these included.
        last: the others' logits are not wanted.
    """
    keep = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters and last else {}
    real = mask[:, -input_ids.shape[1] :]
    positions = cache.kv.tokens_seen.to(real.device)[:, None] + real.cumsum(1) - 1
    carried = {_versions.cache_argument(model): cache}
    logits: Tensor = model(
        input_ids=input_ids,
        attention_mask=mask,
        position_ids=positions.clamp(min=0),
        use_cache=True,
        **keep,
        **carried,
    ).logits
    return logits


def whole_mask(attention_mask: Tensor | None, before: int, input_ids: Tensor, cache: CompressedCache) -> Tensor:
    """The mask over the ``before`` columns fed earlier and the new ones, as sliding-window layers need it."""
    rows, tokens = input_ids.shape
    if attention_mask is None:
        mask = torch.ones(rows, tokens, dtype=torch.int64, device=input_ids.device)
    else:
        if attention_mask.dim() != 2 or attention_mask.shape not in ((rows, tokens), (rows, before + tokens)):
            raise ValueError(
                f"attention_mask must be [{rows}, {tokens}], or [{rows}, {before + tokens}] with the columns fed "
                f"earlier, got {_shape(attention_mask)}"
            )
        mask = attention_mask.to(torch.int64)
    if mask.shape[1] == before + tokens:
        return mask
    if cache.has_windows and bool((cache.kv.tokens_seen != before).any()):
        raise ValueError(
            f"attention_mask must be [{rows}, {before + tokens}] for a model with sliding-window layers: the columns "
            f"fed earlier held padding, got {_shape(attention_mask)}"
        )
    return torch.cat([mask.new_ones(rows, before), mask], dim=1)


def _shape(value: object) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__
