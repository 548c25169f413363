"""Policies that look at the keys alone: Knorm and KeyDiff."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fastattn import ops
from fastattn.modules.policies.base import CacheState
from fastattn.modules.policies.protecting import ProtectingPolicy


@dataclass(eq=False, repr=False)
class Knorm(ProtectingPolicy):
    r"""Keeps keys of small norm (arXiv 2406.11430): :math:`s_t = -\lVert k_t \rVert_2`.

    Args:
        n_sink: tokens with a position below are always kept; none by default.
        n_recent: as many newest positions are always kept; none by default.
    """

    n_sink: int = 0
    n_recent: int = 0

    predicated = True

    def score(self, state: CacheState) -> Tensor:
        stored = state.stored
        score = ops.score_knorm(stored.keys, state.lengths, min_length=state.min_length, key_scale=stored.key_scale)
        return self._protect(score, state)


@dataclass(eq=False, repr=False)
class KeyDiff(ProtectingPolicy):
    r"""Keeps keys that point away from the average key (arXiv 2504.15364).

    :math:`s_t = -\cos(k_t, a)` with the anchor :math:`a = \mathrm{mean}_t\, k_t / \lVert k_t \rVert`.

    Args:
        n_sink: tokens with a position below are always kept; none by default.
        n_recent: as many newest positions are always kept; none by default.
    """

    n_sink: int = 0
    n_recent: int = 0

    predicated = True

    def score(self, state: CacheState) -> Tensor:
        stored = state.stored
        score = ops.score_key_diff(stored.keys, state.lengths, min_length=state.min_length, key_scale=stored.key_scale)
        return self._protect(score, state)
