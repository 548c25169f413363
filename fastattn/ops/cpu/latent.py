"""Absorbed multi-head latent attention over a latent cache on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn.ops._outputs import empty_out_and_lse
from fastattn.ops.cpu import _latent_bf16
from fastattn.ops.cpu.attention import attend_range
from fastattn.ops.cpu.decode import NATIVE_QUERIES, blocks_of_equal_length, with_features
from fastattn.ops.cpu.native import operators


def latent_decode(
    query_latent: Tensor, query_rope: Tensor, cache: Tensor, lengths: Tensor, scale: float, causal: bool, *options: Any
) -> tuple[Tensor, Tensor]:
    """See :func:`fastattn.ops.latent_decode`; ``options`` are window, soft cap and sinks."""
    if options:
        key = cache[:, None]
        query, value = torch.cat([query_latent, query_rope], dim=-1), key[..., : query_latent.shape[3]]
        return with_features(query, key, value, lengths[:, None], scale, causal, *options)
    rank, queries = query_latent.shape[3], query_latent.shape[2]
    native = operators()
    if native and queries <= NATIVE_QUERIES and cache.stride(2) == 1:
        return native.latent_decode(query_latent, query_rope, cache, lengths, scale, causal)
    out, lse = empty_out_and_lse(query_latent, rank)
    out.zero_()
    lse.fill_(float("-inf"))
    query = torch.cat([query_latent, query_rope], dim=-1)[:, None]  # one group of H heads
    # The rope columns ride along as values, which costs less than a copy of the latent without them.
    for batch, _, length in blocks_of_equal_length(lengths[:, None], cache.shape[1]):
        first = length - queries + 1 if causal else length + 1
        if query.dtype == torch.bfloat16 and scale > 0 and _latent_bf16.pays(query[0, 0], min(first, length)):
            for b in range(batch.start, batch.stop):
                out[b], lse[b] = _latent_bf16.forward(query[b, 0], cache[b, :length], rank, min(first, length), scale)
            continue
        valid = cache[batch, None, :length]
        attend_range(
            query[batch],
            valid,
            valid,
            out[batch, None],
            lse[batch, None],
            first=first,
            scale=scale,
        )
    return out, lse
