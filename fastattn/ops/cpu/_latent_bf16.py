"""Latent attention in bfloat16 from plain matrix products, block by block of keys.

A bfloat16 product on a CPU rounds its result to bfloat16, which would blur large scores. So each block's scores are
computed relative to the largest one, by a bias that the product adds before it rounds: a key that counts has a score
near the largest, where rounding is fine, and a key far below it has no weight to blur. The output errs as much as the
flash kernel's; the log-sum-exp as much as the rounded scores let it, which is less than without the center.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

# With fewer products one call of the flash kernel costs less than these dozen; with fewer columns it is faster anyhow.
_MIN_PRODUCTS, _MIN_WIDTH = 10_000_000, 128
_BLOCK = 4096  # keys: enough to spread a product's fixed cost, few enough that their scores stay cached
_SAMPLE = 256  # keys whose largest score is the first block's center
_FAR = 2.0  # scores farther above the center are computed again, about a new one: they may err by 2.0 * 2^-8


def pays(query: Tensor, first: int) -> bool:
    """Whether :func:`forward` is faster than flash, for one row's bfloat16 ``query [H, Sq, D]`` and ``first`` keys."""
    return query.shape[-1] >= _MIN_WIDTH and query.numel() * first >= _MIN_PRODUCTS and _has_fast_products()


@functools.cache
def _has_fast_products() -> bool:
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def forward(query: Tensor, cache: Tensor, rank: int, first: int, scale: float) -> tuple[Tensor, Tensor]:
    """``query [H, Sq, D]`` against one row's latents ``cache [T, D]``, whose first ``rank`` columns are the values.

    Query ``i`` sees the first ``min(first + i, T)`` keys; ``first`` is at least 1 and ``scale`` above 0. Returns
    ``out [H, Sq, rank]`` and ``lse [H, Sq]``, both float32.
    """
    flat_query = query.flatten(0, 1)
    center = functional.linear(cache[: min(_SAMPLE, first)], flat_query).amax(0)
    origin = center.float()  # of all sums below
    out, total = origin.new_zeros(len(flat_query), rank), torch.zeros_like(origin)
    top = torch.full_like(origin, -torch.inf)
    common, last = cache[:first].split(_BLOCK), cache[first:]
    for block in (*common, last) if len(last) else common:
        if block is last:
            scores, shift = _last_scores(query, last), -origin
            largest = scores.amax(0)
        else:
            scores = functional.linear(block, flat_query, -center).float()
            largest = scores.amax(0)
            if float(largest.max()) * scale > _FAR:
                center = torch.maximum(center, (center + largest).to(flat_query.dtype))
                scores = functional.linear(block, flat_query, -center).float()
                largest = scores.amax(0)
            shift = center.float() - origin
        highest = torch.maximum(top, largest + shift)
        weights = scores.add_(shift - highest).mul_(scale).exp_()
        shrink = (top - highest).mul_(scale).exp_()
        total = total.mul_(shrink).add_(weights.sum(0))
        out = out.mul_(shrink[:, None]).add_(torch.mm(weights.to(flat_query.dtype).t(), block[:, :rank]))
        top, center = highest, (highest + origin).to(flat_query.dtype)
    lse = (top + origin) * scale + total.log()
    return (out / total[:, None]).unflatten(0, query.shape[:2]), lse.unflatten(0, query.shape[:2])


def _last_scores(query: Tensor, keys: Tensor) -> Tensor:
    """The few keys at the causal edge, ``[keys, H * Sq]`` in float32: query ``i`` sees the first ``i`` of them."""
    queries = query.shape[1]
    scores = functional.linear(keys.float(), query.flatten(0, 1).float()).unflatten(1, query.shape[:2])
    hidden = torch.arange(len(keys))[:, None] >= torch.arange(queries)
    return scores.masked_fill_(hidden[:, None], -torch.inf).flatten(1)
