"""Where a conversion's second moments come from, checked against what it asks for."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from fastattn.convert.calibration import CHECKED_TOKENS, CalibrationStatistics, LayerWalk, token_batches
from fastattn.convert.config import LowRankConfig
from fastattn.convert.families import AttentionSite, read_weights
from fastattn.convert.weights import AttentionWeights


class MomentSource:
    """Where second moments come from: given statistics, or calibration text walked through the model."""

    def __init__(self, model: nn.Module, given: CalibrationStatistics | list[Tensor]) -> None:
        self.model = model
        self.statistics = given if isinstance(given, CalibrationStatistics) else None
        self.batches = given.batches if isinstance(given, CalibrationStatistics) else given
        if isinstance(given, CalibrationStatistics):
            self.tokens, self.context = given.tokens, given.context
            self.fingerprint: list[Any] = [float(moment.total.sum()) for moment in given.moments.values()]
        else:
            self.tokens = sum(batch.numel() for batch in given)
            self.context = max(batch.shape[1] for batch in given)
            self.fingerprint = [hashlib.sha256(batch.cpu().numpy().tobytes()).hexdigest() for batch in given]
        self.walk: LayerWalk | None = None

    def start(self, to_check: list[AttentionSite]) -> None:
        """Feed the text to the model; the walk then stands before the first layer.

        Where statistics are given, other tokens show whether the attention is read right.
        """
        if self.statistics is None:
            self.walk = LayerWalk(self.model, self.batches, to_check)
        else:
            LayerWalk(self.model, [_some_tokens(self.model)], to_check)

    def original_moment(self, site: AttentionSite, damping: float) -> Tensor:
        """Second moment of the original's input at ``site``; a walk goes on to the next layer."""
        if self.statistics is not None:
            return self.statistics.moments[site.name].mean(damping)
        assert self.walk is not None  # started by the caller
        return self.walk.attention_moment(site.index, advance=True).mean(damping)


def _some_tokens(model: nn.Module) -> Tensor:
    weight = model.get_input_embeddings().weight  # type: ignore[operator]
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randint(weight.shape[0], (1, CHECKED_TOKENS), generator=generator, device="cpu").to(weight.device)


def source_for(model: nn.Module, config: LowRankConfig, calibration: Any, sites: list[AttentionSite]) -> MomentSource:
    """The source that ``calibration`` stands for, long enough for the ranks that ``config`` asks of ``sites``."""
    if isinstance(calibration, CalibrationStatistics):
        if config.sequential:
            raise ValueError('given statistics are parallel: statistics must be "parallel", got "sequential"')
        hidden = read_weights(model, sites[0]).hidden_size
        missing = [site.name for site in sites if site.name not in calibration.moments]
        wrong = {moment.total.shape[0] - 1 for moment in calibration.moments.values()} - {hidden}
        if missing or wrong:
            raise ValueError(f"calibration must be statistics of this model, got none for {missing} or sizes {wrong}")
        source = MomentSource(model, calibration)
    else:
        source = MomentSource(model, token_batches("calibration", calibration, model))
    needed = max(largest_rank(read_weights(model, site), config) for site in sites)
    if source.tokens < needed:
        raise ValueError(f"calibration must hold at least {needed} tokens, the largest rank, got {source.tokens}")
    return source


def largest_rank(weights: AttentionWeights, config: LowRankConfig) -> int:
    """The larger of a layer's ranks, after checking them against its shapes."""
    rope = weights.max_rope_dim if config.qk_rope_head_dim is None else config.qk_rope_head_dim
    limits = {
        "qk_rope_head_dim": (rope, weights.max_rope_dim),
        "kv_lora_rank": (config.kv_lora_rank, min(weights.cached_values - rope, 2 * weights.hidden_size)),
        "q_lora_rank": (config.q_lora_rank, min(weights.query.shape[0], 2 * weights.hidden_size)),
    }
    for name, (value, most) in limits.items():
        if value is not None and value > most:
            raise ValueError(f"{name} must be at most {most} for this model, got {value}")
    if config.freq_fold != "search" and weights.inv_freq.numel() % config.freq_fold:
        raise ValueError(f"freq_fold must divide the {weights.inv_freq.numel()} frequencies, got {config.freq_fold}")
    full = min(weights.cached_values - rope, weights.hidden_size + weights.kv_bias)
    largest = full if config.kv_lora_rank is None and config.kv_rank_budget is None else config.kv_lora_rank or 1
    return max(largest, config.q_lora_rank or 1)
