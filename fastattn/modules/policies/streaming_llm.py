"""StreamingLLM: the first tokens and the newest."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fastattn.modules.policies.base import CacheState
from fastattn.modules.policies.protecting import ProtectingPolicy


@dataclass(eq=False, repr=False)
class StreamingLLM(ProtectingPolicy):
    """Keeps the first tokens and the newest (arXiv 2309.17453), by position: the score is the position.

    Args:
        n_sink: tokens with a position below are always kept.
        rerotate: the paper's own variant: keys, new keys and queries are rotated to their index in the cache instead
            of their original position. Needs the model's :class:`Rotary`.
    """

    n_sink: int = 4
    rerotate: bool = False

    predicated = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rerotate = bool(self.rerotate)

    def score(self, state: CacheState) -> Tensor:
        # Positions beyond 2**24 share floats; the newer of equal scores is kept, so the order holds all the same.
        return self._protect(state.positions.to(state.score_dtype), state)
