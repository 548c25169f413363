"""Give a converted model the norms on its latents that DeepSeek's layout has, as a start for training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastattn.convert.attention import ConvertedAttention
from fastattn.convert.calibration import evaluating, token_batches
from fastattn.convert.families import decoder_of
from fastattn.modules.low_rank import LatentNorm


class _Fit:
    """Least-squares weights ``w`` of ``w * c / rms(c) ~ c`` over a stream of latents ``c``."""

    def __init__(self, norm: LatentNorm) -> None:
        self.norm = norm
        self.product = torch.zeros_like(norm.weight, dtype=torch.float64, device="cpu")
        self.square = torch.zeros_like(self.product)

    def add(self, latents: Tensor) -> None:
        rows = latents.detach().flatten(0, -2).cpu().double()
        normed = rows * (rows.square().mean(-1, keepdim=True) + (self.norm.eps or 0.0)).rsqrt()
        self.product += (rows * normed).sum(0)
        self.square += normed.square().sum(0)

    def weight(self) -> Tensor:
        return self.product / self.square.clamp_min(torch.finfo(torch.float64).tiny)


@torch.inference_mode(False)
def add_latent_norm_(model: nn.Module, calibration: Tensor | Sequence[Tensor]) -> None:
    """Put an RMSNorm on the latents of every converted layer, in place, near the identity on a text.

    A norm divides each token's latent by its own size, which no weight can undo: the model changes, and needs training.
    The norms' weights are the least-squares fit of the latents by their normed selves on ``calibration``.

    Args:
        model: converted by :func:`fastattn.to_low_rank_`.
        calibration: token ids ``[N, S]`` or a list of ``[S_i]``, without padding.

    Raises:
        TypeError: token ids that do not fit.
        ValueError: the model has no converted attention, or has norms already, or its latents on ``calibration`` are
            not finite. The model is unchanged then.
    """
    layers = [module for module in model.modules() if isinstance(module, ConvertedAttention)]
    if not layers or any(layer.kv_a_layernorm is not None for layer in layers):
        raise ValueError("model must hold converted attention without norms on its latents")
    fits: list[tuple[ConvertedAttention, str, _Fit]] = []
    hooks = []

    def feed(fit: _Fit, rank: int) -> Any:
        return lambda module, args, output: fit.add(output[..., :rank])

    try:
        for layer in layers:
            projections = [("kv_a_layernorm", layer.kv_a_proj_with_mqa, layer.kv_lora_rank)]
            if layer.q_lora_rank is not None:
                projections.append(("q_a_layernorm", layer.q_a_proj, layer.q_lora_rank))
            for name, projection, rank in projections:
                like = projection.weight
                fit = _Fit(LatentNorm(rank, eps=1e-6, device=like.device, dtype=like.dtype))
                fits.append((layer, name, fit))
                hooks.append(projection.register_forward_hook(feed(fit, rank)))
        with evaluating(model):
            for batch in token_batches("calibration", calibration, model):
                decoder_of(model)(input_ids=batch, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    for _, name, fit in fits:
        with torch.no_grad():
            fit.norm.weight.copy_(fit.weight())
        if not bool(torch.isfinite(fit.norm.weight).all()):
            raise ValueError(f"calibration must give finite latents, got NaN or infinity before {name}")
    for layer, name, fit in fits:
        setattr(layer, name, fit.norm.train(layer.training))
