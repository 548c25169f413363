"""Refit output projections, layer by layer, to what the original's residual stream holds."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from fastattn.convert.calibration import LayerWalk
from fastattn.convert.families import decoder_of

RIDGE = 1e-2
REFIT_TOKENS = 8192


def ridge_refit(gram: Tensor, cross: Tensor, weight: Tensor, ridge: float = RIDGE) -> Tensor:
    """``argmin_O sum_t w_t ||O u_t - y_t||^2 + ridge mean(diag(gram)) ||O - weight||^2``.

    Args:
        gram: ``sum_t w_t u_t u_t^T``, ``[n, n]``.
        cross: ``sum_t w_t u_t y_t^T``, ``[n, hidden]``.
        weight: the projection to start from, ``[hidden, n]``.
    """
    pull = ridge * gram.diagonal().mean()
    eye = torch.eye(gram.shape[0], dtype=gram.dtype, device=gram.device)
    return torch.linalg.solve(gram + pull * eye, cross + pull * weight.to(gram).T).T


class OutputRefit:
    """Two streams of one text: through the original and through the layers converted so far.

    Each layer's output projection is chosen so that the converted stream after attention is the original's, errors of
    earlier layers included. A token counts by the inverse energy of the original's residual stream; the first of
    a sequence, whose energy is extreme in many models, does not count.
    """

    def __init__(self, model: nn.Module, batches: list[Tensor]) -> None:
        chosen: list[Tensor] = []
        for batch in batches:
            if not chosen or sum(b.numel() for b in chosen) + batch.numel() <= REFIT_TOKENS:
                chosen.append(batch)
        self.original = LayerWalk(model, chosen, [])
        self.converted = copy(self.original)
        self.converted.hidden = list(self.original.hidden)
        self.multiplier = float(getattr(decoder_of(model).config, "residual_multiplier", 1.0))

    def skip(self, index: int) -> None:
        """Both streams pass a layer that stays as it is."""
        self.original.advance(index)
        self.converted.advance(index)

    def finish(self, index: int, parent: Any, attention: Any, *, fit: bool) -> None:
        """Both streams pass layer ``index``, whose ``attention`` gets a new output projection if ``fit``."""
        original = parent.self_attn
        inputs, targets = list(self.original.hidden), []
        hook = original.register_forward_hook(lambda module, args, output: targets.append(output[0].detach()))
        try:
            self.original.advance(index)
        finally:
            hook.remove()
        parent.self_attn = attention
        try:
            if fit:
                self._fit(index, attention, inputs, targets)
            self.converted.advance(index)
        finally:
            parent.self_attn = original

    def _fit(self, index: int, attention: Any, inputs: list[Tensor], targets: list[Tensor]) -> None:
        projection: nn.Linear = attention.o_proj
        device = torch.device("cpu") if projection.weight.device.type == "mps" else projection.weight.device
        size, hidden = projection.in_features, projection.out_features
        gram = torch.zeros(size, size, dtype=torch.float64, device=device)
        cross = torch.zeros(size, hidden, dtype=torch.float64, device=device)
        mixed: list[Tensor] = []
        hook = projection.register_forward_pre_hook(lambda module, args: mixed.append(args[0].detach()))
        try:
            for number, (before, target) in enumerate(zip(inputs, targets, strict=True)):
                self.converted._call(index, number)
                residual = before + self.multiplier * target
                wanted = (residual - self.converted.hidden[number]) / self.multiplier
                if projection.bias is not None:
                    wanted = wanted - projection.bias
                u, y, r = (x[:, 1:].flatten(0, 1).to(device).double() for x in (mixed.pop(), wanted, residual))
                weighted = u / r.square().mean(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
                gram += weighted.T @ u
                cross += weighted.T @ y
        finally:
            hook.remove()
        new = ridge_refit(gram, cross, projection.weight.detach().to(device).double())
        if not bool(torch.isfinite(new).all()):
            raise ValueError(f"calibration must determine the output projection of layer {index}, got none finite")
        with torch.no_grad():
            projection.weight.copy_(new)
