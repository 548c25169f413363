"""Absorbed multi-head latent attention over a latent cache on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.ops.cpu.decode import decode_attention


def latent_decode(
    query_latent: Tensor, query_rope: Tensor, cache: Tensor, lengths: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """See :func:`fastattn.ops.latent_decode`."""
    query = torch.cat([query_latent, query_rope], dim=-1)
    latent = cache[:, None]
    # The rope columns ride along as values, which costs less than a copy of the latent without them.
    out, lse = decode_attention(query, latent, latent, lengths[:, None], scale, causal)
    return out[..., : query_latent.shape[3]].contiguous(), lse
