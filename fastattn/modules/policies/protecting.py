"""Shared by the policies that keep the first tokens and the newest whatever the scores say."""

from __future__ import annotations

from torch import Tensor

from fastattn.modules.policies.base import CacheState, Policy
from fastattn.validation import check_count


def protect(score: Tensor, state: CacheState, n_sink: int, n_recent: int) -> Tensor:
    """``score`` with +inf for the first ``n_sink`` tokens and the ``n_recent`` newest, by position."""
    if n_sink:
        score = score.masked_fill(state.positions < n_sink, float("inf"))
    if n_recent:
        first = (state.next_position - n_recent)[:, None, None]
        score = score.masked_fill(state.positions >= first, float("inf"))
    return score


def check_budget(policy: Policy, budget: int) -> None:
    """``budget`` has room for what ``policy`` always keeps."""
    kept = sum(policy.always_kept(budget))
    if budget < kept:
        raise ValueError(
            f"budget must be at least the {kept} tokens that {type(policy).__name__} always keeps, got {budget}"
        )


class ProtectingPolicy(Policy):
    """Keeps ``n_sink`` first and ``n_recent`` newest tokens, by position. Its subclasses declare these as fields."""

    n_sink: int
    n_recent: int = 0  # on the class: repr shows it for policies that have the option

    def __post_init__(self) -> None:
        check_count("n_sink", self.n_sink, 0)
        check_count("n_recent", self.n_recent, 0)

    def always_kept(self, budget: int) -> tuple[int, int]:
        return self.n_sink, self.n_recent

    def check(self, budget: int) -> None:
        check_budget(self, budget)

    def _protect(self, score: Tensor, state: CacheState) -> Tensor:
        return protect(score, state, self.n_sink, self.n_recent)
