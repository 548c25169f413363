"""The dtype that operators accumulate in, and the tensors that attention operators return."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, scores and log-sum-exps over inputs of ``dtype``: float32, float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_out_and_lse(query: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
    """What every attention operator returns: contiguous ``[B, H, Sq, Dv]`` and ``[B, H, Sq]``."""
    batch, heads, tokens, _ = query.shape
    out = query.new_empty(batch, heads, tokens, value_dim)
    return out, query.new_empty(batch, heads, tokens, dtype=accumulator_dtype(query.dtype))
