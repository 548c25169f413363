"""Random: what any policy must be better than."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from fastattn.modules.policies.base import CacheState, Policy
from fastattn.validation import check_count

_MASK = 2**32 - 1
Number = TypeVar("Number", int, Tensor)


@dataclass(eq=False, repr=False)
class Random(Policy):
    r"""Keeps tokens at random: a fixed number per seed, layer, head and position, the same on every device.

    With a bijection ``mix`` of 32-bit numbers, the number is
    ``mix(mix(mix(mix(seed) ^ layer) ^ head) ^ position)``, of which the highest 24 bits, as a fraction of 1, are the
    score. ``mix`` is ``x ^= x >> 16; x *= 0x21f0aaad; x ^= x >> 15; x *= 0x735a2d97; x ^= x >> 15`` modulo 2**32.

    Args:
        seed: 0 to 2**32 - 1.

    Raises:
        TypeError, ValueError: ``seed`` is no such integer.
    """

    seed: int = 0

    predicated = True

    def __post_init__(self) -> None:
        check_count("seed", self.seed, 0)
        if self.seed > _MASK:
            raise ValueError(f"seed must be at most {_MASK}, got {self.seed}")

    def score(self, state: CacheState) -> Tensor:
        base = _mix(_mix(self.seed) ^ state.layer)
        count = state.positions.shape[1]
        heads = torch.arange(count, device=state.positions.device) + state.first_head  # int64: products stay exact
        mixed = _mix(_mix(heads ^ base)[:, None] ^ (state.positions.to(torch.int64) & _MASK))
        return (mixed >> 8).to(state.score_dtype) / 2**24


def _mix(x: Number) -> Number:
    """Of numbers below 2**32; both factors are below 2**31, so that products fit into 63 bits."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK
    return x ^ (x >> 15)
