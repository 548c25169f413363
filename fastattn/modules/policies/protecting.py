"""Shared by the policies that keep the first tokens and the newest whatever the scores say."""

from __future__ import annotations

from torch import Tensor

from fastattn.modules.policies.base import CacheState, Policy
from fastattn.validation import check_count


class ProtectingPolicy(Policy):
    """Keeps ``n_sink`` first and ``n_recent`` newest tokens, by position. Its subclasses declare these as fields."""

    n_sink: int
    n_recent: int = 0  # on the class: repr shows it for policies that have the option

    def __post_init__(self) -> None:
        check_count("n_sink", self.n_sink, 0)
        check_count("n_recent", self.n_recent, 0)

    def check(self, budget: int) -> None:
        if budget < self.n_sink + self.n_recent:
            raise ValueError(
                f"budget must be at least the {self.n_sink + self.n_recent} tokens that {type(self).__name__} always "
                f"keeps, got {budget}"
            )

    def _protect(self, score: Tensor, state: CacheState) -> Tensor:
        if self.n_sink:
            score = score.masked_fill(state.positions < self.n_sink, float("inf"))
        if self.n_recent:
            first = (state.next_position - self.n_recent)[:, None, None]
            score = score.masked_fill(state.positions >= first, float("inf"))
        return score
