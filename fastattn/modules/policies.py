"""Policies: which tokens a compressed cache keeps.

A policy gives every cached token of every row and key/value head a score; the ``budget`` highest survive, in time
order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fastattn import ops
from fastattn.modules.rotary import Rotary


@dataclass
class QueryWindow:
    """Query vectors as attention took them (rotated), with what is needed to undo the rotation.

    Attributes:
        rotated: ``[B, H, N, D]``.
        positions: int32 ``[B, N]``, -1 where there is no query.
    """

    rotated: Tensor
    positions: Tensor

    @property
    def valid(self) -> Tensor:
        """bool ``[B, N]``."""
        return self.positions >= 0


@dataclass
class CacheState:
    """What a policy sees of one layer when it scores.

    Attributes:
        keys: ``[B, Hkv, C, D]`` as cached, after rotation. Slots beyond ``lengths`` may hold anything, NaN included.
        values: ``[B, Hkv, C, Dv]``.
        positions: int32 ``[B, Hkv, C]``, original positions of the tokens.
        lengths: int32 ``[B, Hkv]``, valid slots; they are a prefix, in time order.
        tokens_seen: int64 ``[B]``, real tokens fed to each row, this call's included.
        next_position: int64 ``[B]``, one past the row's last position; without meaning in a row that brought no real
            token to this call, which is not compressed.
        scale: the attention's softmax scale.
        rotary: the model's rotation, or None.
        min_length: only rows and heads with at least as many valid slots are about to be compressed.
        latent: the keys are latents ``[latent | rope key]``, the values their first columns.
        window: the newest ``query_window`` queries, in time order.
        call: the queries of this call where it brought more than ``max_step`` tokens (a prompt), else None.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    lengths: Tensor
    tokens_seen: Tensor
    next_position: Tensor
    scale: float
    rotary: Rotary | None
    min_length: int
    latent: bool = False
    window: QueryWindow | None = None
    call: QueryWindow | None = None

    @property
    def valid(self) -> Tensor:
        """bool ``[B, Hkv, C]``: the slots that hold a token."""
        return torch.arange(self.keys.shape[2], device=self.keys.device) < self.lengths[..., None]

    @property
    def queries(self) -> Tensor:
        """``[B, H, W, D]``: the newest ``query_window`` queries before rotation, in time order, right-aligned."""
        return self.before_rotation(self._window())

    @property
    def query_valid(self) -> Tensor:
        """bool ``[B, W]``: which of ``queries`` exist."""
        return self._window().valid

    def before_rotation(self, window: QueryWindow) -> Tensor:
        """The window's queries with the model's rotation undone, float32 (float64 for float64)."""
        wide = window.rotated if window.rotated.dtype == torch.float64 else window.rotated.float()
        if self.rotary is None:
            return wide
        return self.rotary.unrotate(wide, window.positions.clamp(min=0))

    def _window(self) -> QueryWindow:
        if self.window is None:
            raise ValueError("queries are kept only for a policy with query_window > 0, this one has 0")
        return self.window


class Policy(ABC):
    """Base class of all policies. A policy of your own is one method in plain PyTorch.

    Its argument is a :class:`fastattn.modules.policies.CacheState`: keys, values, positions, lengths and, where asked
    for, the newest queries of one layer.

    .. code-block:: python

        class NewestAndLargest(Policy):
            def score(self, state):
                size = state.values.float().norm(dim=-1)
                newest = state.positions >= state.next_position[:, None, None] - 16
                return size.masked_fill(newest, float("inf"))

    Attributes:
        query_window: how many of the newest queries the cache keeps for the policy; 0 keeps none.
        needs_rotary: the policy looks ahead and cannot work without the model's :class:`Rotary`.
        predicated: on a step that compresses nothing the score costs a device next to nothing, because its work is in
            operators that take ``state.min_length``.
        rerotate: attention sees keys and queries rotated to their index in the cache (StreamingLLM's own variant).
    """

    query_window: int = 0
    needs_rotary: ClassVar[bool] = False
    predicated: ClassVar[bool] = False
    rerotate: bool = False

    @abstractmethod
    def score(self, state: CacheState) -> Tensor:
        """Scores ``[B, Hkv, C]``, float32 (float64 for a float64 cache): higher is kept.

        Of equal scores the newer token is kept; NaN ranks lowest; slots beyond ``state.lengths`` are ignored. To be
        compiled into the decode step it must be traceable: no Python branch on tensor values.

        It may call the score of another policy. ``query_window`` and ``needs_rotary`` must then cover that one's,
        sinks and recent tokens have a score of +inf, and scores of rows that are not compressed are unspecified.

        Args:
            state: one layer of the cache, the call's new tokens included.
        """

    def check(self, budget: int) -> None:  # noqa: B027 - most policies work with any budget
        """Raise ``ValueError`` where the policy cannot work with ``budget`` tokens; called when a cache is made."""

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in sorted(vars(self).items()))
        return f"{type(self).__name__}({options})"


class _Protecting(Policy):
    """Shared by policies that keep sinks and a recent window whatever the scores say, by position."""

    n_recent: int = 0  # on the class: repr shows it for policies that have the option

    def __init__(self, n_sink: int) -> None:
        self.n_sink = _count("n_sink", n_sink, 0)

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


class Knorm(_Protecting):
    r"""Keeps keys of small norm (arXiv 2406.11430): :math:`s_t = -\lVert k_t \rVert_2`.

    Args:
        n_sink: tokens with a position below are always kept; none by default.
        n_recent: as many newest positions are always kept; none by default.
    """

    predicated = True

    def __init__(self, n_sink: int = 0, n_recent: int = 0) -> None:
        super().__init__(n_sink)
        self.n_recent = _count("n_recent", n_recent, 0)

    def score(self, state: CacheState) -> Tensor:
        return self._protect(ops.score_knorm(state.keys, state.lengths, min_length=state.min_length), state)


class KeyDiff(_Protecting):
    r"""Keeps keys that point away from the average key (arXiv 2504.15364).

    :math:`s_t = -\cos(k_t, a)` with the anchor :math:`a = \mathrm{mean}_t\, k_t / \lVert k_t \rVert`.

    Args:
        n_sink: tokens with a position below are always kept; none by default.
        n_recent: as many newest positions are always kept; none by default.
    """

    predicated = True

    def __init__(self, n_sink: int = 0, n_recent: int = 0) -> None:
        super().__init__(n_sink)
        self.n_recent = _count("n_recent", n_recent, 0)

    def score(self, state: CacheState) -> Tensor:
        return self._protect(ops.score_key_diff(state.keys, state.lengths, min_length=state.min_length), state)


class StreamingLLM(_Protecting):
    """Keeps the first tokens and the newest (arXiv 2309.17453), by position: the score is the position.

    Args:
        n_sink: tokens with a position below are always kept.
        rerotate: the paper's own variant: keys, new keys and queries are rotated to their index in the cache instead
            of their original position. Needs the model's :class:`Rotary`.
    """

    predicated = True

    def __init__(self, n_sink: int = 4, rerotate: bool = False) -> None:
        super().__init__(n_sink)
        self.rerotate = bool(rerotate)

    def score(self, state: CacheState) -> Tensor:
        # Positions beyond 2**24 share floats; the newer of equal scores is kept, so the order holds all the same.
        wide = torch.float64 if state.keys.dtype == torch.float64 else torch.float32
        return self._protect(state.positions.to(wide), state)


class ExpectedAttention(_Protecting):
    """Keeps what future queries are expected to attend to, weighted by the value's norm (arXiv 2510.00636).

    Query statistics before rotation, over the prompt's tokens or, while decoding, over the last ``query_window`` ones,
    are rotated to the average of the next ``n_future_positions`` positions;
    :func:`fastattn.ops.score_expected_attention` gives the score. A latent cache takes the queries absorbed.

    Args:
        n_future_positions: positions ahead that the rotation is averaged over.
        n_sink: tokens with a position below are always kept and count in no statistic.
        use_covariance: use the queries' covariance as well as their mean.
        use_value_norm: weight by the value's norm.
        epsilon: added to the expected attention before weighting.
        query_window: newest queries that the statistics of a decode step cover.
    """

    needs_rotary = True
    predicated = True

    def __init__(
        self,
        n_future_positions: int = 512,
        n_sink: int = 4,
        use_covariance: bool = True,
        use_value_norm: bool = True,
        epsilon: float = 0.0,
        query_window: int = 128,
    ) -> None:
        super().__init__(n_sink)
        self.n_future_positions = _count("n_future_positions", n_future_positions, 1)
        self.query_window = _count("query_window", query_window, 1)
        self.use_covariance = bool(use_covariance)
        self.use_value_norm = bool(use_value_norm)
        if isinstance(epsilon, bool) or not isinstance(epsilon, (int, float)):
            raise TypeError(f"epsilon must be a float, got {type(epsilon).__name__}")
        if not 0.0 <= epsilon < float("inf"):
            raise ValueError(f"epsilon must be finite and not negative, got {epsilon}")
        self.epsilon = float(epsilon)

    def score(self, state: CacheState) -> Tensor:
        window = state.call if state.call is not None else state._window()
        # Only rows that are about to be compressed count: on a device the moments of the others cost nothing.
        full = (state.lengths >= state.min_length).any(1)
        valid = window.valid & (window.positions >= self.n_sink) & full[:, None]
        queries = state.before_rotation(window)
        mean, cov, samples = self._statistics(queries, valid, state)
        score = ops.score_expected_attention(
            state.keys,
            state.values,
            state.lengths,
            state.positions,
            mean,
            cov,
            samples,
            scale=state.scale,
            n_sink=self.n_sink,
            epsilon=self.epsilon,
            use_value_norm=self.use_value_norm,
            min_length=state.min_length,
        )
        recency = self._protect(state.positions.to(score.dtype), state)
        return torch.where(valid.any(1)[:, None, None], score, recency)

    def _statistics(
        self, queries: Tensor, valid: Tensor, state: CacheState
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Mean and covariance, or samples where those are fewer numbers, rotated to the future."""
        if state.rotary is None:  # the cache refuses this policy without, but another policy may call its score
            raise ValueError(
                "state.rotary must be the model's rotation for ExpectedAttention, got None: give the cache rotary=..., "
                "and set needs_rotary = True in a policy that calls ExpectedAttention"
            )
        ahead, first = state.rotary.average, state.next_position
        as_samples = state.call is None and self.use_covariance and self.query_window < queries.shape[3]
        if as_samples:
            return None, None, ahead(_equivalent_samples(queries, valid), first, self.n_future_positions)
        mean, cov = ops.query_moments(queries, valid, min_length=1)
        mean = ahead(mean, first, self.n_future_positions)
        if not self.use_covariance:
            return mean, None, None
        cov = ahead(cov, first, self.n_future_positions)
        return mean, ahead(cov.mT, first, self.n_future_positions).mT, None


def _equivalent_samples(queries: Tensor, valid: Tensor) -> Tensor:
    """``[B, H, N, D]`` samples, all valid, with the mean and biased covariance of the valid ones.

    A valid sample's distance to the mean grows by sqrt(N / valid), an invalid one becomes the mean.
    """
    count = valid.sum(1).clamp(min=1)[:, None, None]  # [B, 1, 1]
    mask = valid[:, None, :, None]
    mean = (queries.masked_fill(~mask, 0.0).sum(2) / count)[:, :, None]
    stretch = (valid.shape[1] / count.to(queries.dtype)).sqrt()[..., None]
    return mean + torch.where(mask, (queries - mean) * stretch, 0.0)


def _count(name: str, value: int, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
    return value


_BY_NAME: dict[str, type[Policy]] = {
    "expected_attention": ExpectedAttention,
    "knorm": Knorm,
    "streaming_llm": StreamingLLM,
    "key_diff": KeyDiff,
}


def resolve_policy(policy: Policy | str) -> Policy:
    """The policy itself, or a new one with default arguments for its name."""
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str):
        got = f"the class {policy.__name__}" if isinstance(policy, type) else type(policy).__name__
        raise TypeError(f"policy must be a Policy or one of {sorted(_BY_NAME)}, got {got}")
    if policy not in _BY_NAME:
        raise ValueError(f"policy must be a Policy or one of {sorted(_BY_NAME)}, got {policy!r}")
    return _BY_NAME[policy]()
