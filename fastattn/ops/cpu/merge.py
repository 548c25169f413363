"""Combining partial attention results on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.ops.cpu.native import operators


def merge_attention(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """See :func:`fastattn.ops.merge_attention`."""
    native = operators()
    if native and all(out.stride(3) == 1 for out in outs):
        return native.merge_attention(outs, lses)
    stacked = torch.stack(lses)
    lse = torch.logsumexp(stacked, dim=0)
    weights = torch.exp(stacked - lse.masked_fill(lse == float("-inf"), 0.0))[..., None]
    total = outs[0].new_zeros(outs[0].shape, dtype=lse.dtype)
    unseen = (stacked == float("-inf"))[..., None]
    if bool(unseen.any()):  # what such a part holds is neutral, NaN included
        outs = [out.masked_fill(nothing, 0.0) for out, nothing in zip(outs, unseen, strict=True)]
    for weight, out in zip(weights, outs, strict=True):
        total.addcmul_(weight, out)
    return total.to(outs[0].dtype), lse
