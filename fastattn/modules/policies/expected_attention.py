"""Expected Attention: what coming queries are expected to attend to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastattn import ops
from fastattn.modules.policies.base import CacheState
from fastattn.modules.policies.protecting import ProtectingPolicy
from fastattn.validation import check_count


@dataclass(eq=False, repr=False)
class ExpectedAttention(ProtectingPolicy):
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

    n_future_positions: int = 512
    n_sink: int = 4
    use_covariance: bool = True
    use_value_norm: bool = True
    epsilon: float = 0.0
    query_window: int = 128

    needs_rotary = True
    predicated = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("n_future_positions", self.n_future_positions, 1)
        check_count("query_window", self.query_window, 1)
        self.use_covariance = bool(self.use_covariance)
        self.use_value_norm = bool(self.use_value_norm)
        if isinstance(self.epsilon, bool) or not isinstance(self.epsilon, (int, float)):
            raise TypeError(f"epsilon must be a float, got {type(self.epsilon).__name__}")
        if not 0.0 <= self.epsilon < float("inf"):
            raise ValueError(f"epsilon must be finite and not negative, got {self.epsilon}")
        self.epsilon = float(self.epsilon)

    def score(self, state: CacheState) -> Tensor:
        window = state.call if state.call is not None else state.newest_queries()
        # Only rows that are about to be compressed count: on a device the moments of the others cost nothing.
        full = (state.lengths >= state.min_length).any(1)
        valid = window.valid & (window.positions >= self.n_sink) & full[:, None]
        queries = state.before_rotation(window)
        mean, cov, samples = self._statistics(queries, valid, state)
        stored = state.stored
        score = ops.score_expected_attention(
            stored.keys,
            stored.values,
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
            key_scale=stored.key_scale,
            value_scale=stored.value_scale,
            value_dim=stored.value_dim,
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
