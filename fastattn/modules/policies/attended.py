"""Policies that keep what was attended to: SnapKV, TOVA and H2O."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional

from fastattn import ops
from fastattn.modules.policies.base import CacheState, Policy, QueryWindow
from fastattn.modules.policies.protecting import check_budget, protect
from fastattn.validation import check_count


@dataclass(eq=False, repr=False)
class SnapKV(Policy):
    r"""Keeps what the newest queries attend to, smoothed over neighbors (arXiv 2404.14469).

    :math:`A_{wt} = \mathrm{softmax}_t(c\, q_w \cdot k_t)` of the ``window`` newest queries over the tokens that each
    sees, averaged over the queries; then the mean of ``kernel`` neighbors in time order, centered, where the window's
    own tokens and what lies beyond the ends count as 0; then the mean over the heads of a group. The window's own
    tokens are always kept.

    Args:
        window: how many of the newest queries look back.
        kernel: neighbors that are averaged, an odd number.

    Raises:
        TypeError, ValueError: an option of another type or range.
    """

    window: int = 32
    kernel: int = 5

    predicated = True

    def __post_init__(self) -> None:
        check_count("window", self.window, 1)
        check_count("kernel", self.kernel, 1)
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel must be odd, to have a middle, got {self.kernel}")

    @property
    def query_window(self) -> int:  # type: ignore[override]
        """As many newest queries as look back."""
        return self.window

    def always_kept(self, budget: int) -> tuple[int, int]:
        return 0, self.window

    def check(self, budget: int) -> None:
        check_budget(self, budget)

    def score(self, state: CacheState) -> Tensor:
        window = state.newest_queries()
        count = window.valid.sum(1)
        mean = attention_mass(state, window) / count.clamp(min=1)[:, None, None]
        # Without a query every score is 0 and the newest tokens stay.
        last = torch.iinfo(torch.int32).max
        first = window.positions.masked_fill(~window.valid, last).amin(1)[:, None, None]
        before = state.valid & (state.positions < first)
        mean = mean.masked_fill(~before, 0.0)
        smooth = functional.avg_pool1d(mean, self.kernel, stride=1, padding=self.kernel // 2)
        return smooth.masked_fill(~before, float("inf"))


@dataclass(eq=False, repr=False)
class TOVA(Policy):
    r"""Keeps what the newest query attends to (arXiv 2401.06104), and the newest token.

    :math:`s_t = \mathrm{softmax}_t(c\, q \cdot k_t)`, averaged over all heads of the layer: every key/value head keeps
    the same tokens.
    """

    query_window = 1
    predicated = True

    def always_kept(self, budget: int) -> tuple[int, int]:
        return 0, 1

    def score(self, state: CacheState) -> Tensor:
        mass = attention_mass(state, state.newest_queries())
        return protect(mass.mean(1, keepdim=True).expand_as(mass), state, 0, 1)


@dataclass(eq=False, repr=False)
class H2O(Policy):
    """Keeps what has been attended to most since it was cached, and the newest tokens (arXiv 2306.14048).

    The score is the attention mass that a token got from every real query since it was cached, its own included,
    divided by the number of those queries, averaged over the heads of a group. It is added up query by query,
    which costs one product of the new queries with the cached keys per call.

    Args:
        n_recent: as many newest positions are always kept; half the budget by default.

    Raises:
        TypeError, ValueError: ``n_recent`` is no integer of at least 0.
    """

    n_recent: int | None = None

    predicated = True
    slot_state = MappingProxyType({"mass": torch.float32, "queries": torch.int32})

    def __post_init__(self) -> None:
        if self.n_recent is not None:
            check_count("n_recent", self.n_recent, 0)

    def always_kept(self, budget: int) -> tuple[int, int]:
        return 0, budget // 2 if self.n_recent is None else self.n_recent

    def check(self, budget: int) -> None:
        check_budget(self, budget)

    def observe(self, state: CacheState, query: Tensor) -> None:
        call = state.call
        assert call is not None
        state.slots["mass"] += attention_mass(state, call)
        # As many of the call's queries as stand at a token's position or behind; padding stands at -1, before all.
        tokens, (batch, kv_heads, slots) = call.positions.shape[1], state.positions.shape
        before = torch.searchsorted(call.positions.sort(1).values, state.positions.reshape(batch, kv_heads * slots))
        since = (tokens - before.view(batch, kv_heads, slots)).masked_fill(~state.valid, 0)
        state.slots["queries"] += since.to(torch.int32)

    def score(self, state: CacheState) -> Tensor:
        mean = state.slots["mass"] / state.slots["queries"].clamp(min=1)
        return protect(mean, state, *self.always_kept(state.budget))


def attention_mass(state: CacheState, window: QueryWindow) -> Tensor:
    """What every slot of the layer receives from the window's queries (:func:`fastattn.ops.attention_mass`)."""
    stored = state.stored
    return ops.attention_mass(
        stored.keys,
        state.lengths,
        state.positions,
        window.rotated,
        window.positions,
        scale=state.scale,
        min_length=state.min_length,
        key_scale=stored.key_scale,
    )
