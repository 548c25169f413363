"""Protect: any policy, and tokens that it may not evict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fastattn.modules.policies.base import CacheState, Policy
from fastattn.modules.policies.protecting import check_budget, protect
from fastattn.validation import check_count


@dataclass(eq=False, repr=False)
class Protect(Policy):
    """Another policy's choice among the tokens that are neither sinks nor recent; those are always kept.

    Args:
        policy: gives the scores, and says what queries, rotation and numbers per slot it needs.
        n_sink: tokens with a position below are always kept.
        n_recent: as many newest positions are always kept.

    Raises:
        TypeError, ValueError: ``policy`` is no :class:`Policy` object, a count no integer of at least 0.
    """

    policy: Policy
    n_sink: int = 4
    n_recent: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.policy, Policy):
            got = f"the class {self.policy.__name__}" if isinstance(self.policy, type) else type(self.policy).__name__
            raise TypeError(f"policy must be a Policy, got {got}")
        check_count("n_sink", self.n_sink, 0)
        check_count("n_recent", self.n_recent, 0)

    @property
    def query_window(self) -> int:  # type: ignore[override]
        """The inner policy's."""
        return self.policy.query_window

    @property
    def needs_rotary(self) -> bool:  # type: ignore[override]
        """The inner policy's."""
        return self.policy.needs_rotary

    @property
    def predicated(self) -> bool:  # type: ignore[override]
        """The inner policy's."""
        return self.policy.predicated

    @property
    def rerotate(self) -> bool:  # type: ignore[override]
        """The inner policy's."""
        return self.policy.rerotate

    @property
    def slot_state(self) -> Mapping[str, torch.dtype]:  # type: ignore[override]
        """The inner policy's."""
        return self.policy.slot_state

    def always_kept(self, budget: int) -> tuple[int, int]:
        first, newest = self.policy.always_kept(budget)
        return max(first, self.n_sink), max(newest, self.n_recent)

    def check(self, budget: int) -> None:
        self.policy.check(budget)
        check_budget(self, budget)

    def observe(self, state: CacheState, query: Tensor) -> None:
        self.policy.observe(state, query)

    def score(self, state: CacheState) -> Tensor:
        return protect(self.policy.score(state), state, self.n_sink, self.n_recent)
