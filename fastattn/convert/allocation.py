"""Share latent ranks over layers by one threshold on what a direction costs the loss."""

from __future__ import annotations

import torch
from torch import Tensor


def allocate_globally(spectra: list[Tensor], budget: int) -> list[int]:
    """The ranks of sum ``budget`` that keep the largest sum of ``spectra``: one threshold over all layers.

    Unlike :func:`~fastattn.convert.factors.allocate_ranks` the spectra are compared as they are, not as shares of a
    layer: they must be of one unit, as expected losses are.

    Args:
        spectra: per layer the loss that each direction's removal is expected to cost, falling.
        budget: sum of the ranks; every layer gets at least 1.

    Raises:
        ValueError: fewer than one rank per layer, or more than there are.
    """
    available = sum(spectrum.numel() for spectrum in spectra)
    if not len(spectra) <= budget <= available:
        raise ValueError(f"the sum of ranks must be {len(spectra)} (one per layer) to {available}, got {budget}")
    costs = torch.cat([spectrum[1:].cpu() for spectrum in spectra])
    layers = torch.cat([torch.full((spectrum.numel() - 1,), i, device="cpu") for i, spectrum in enumerate(spectra)])
    taken = layers[costs.sort(descending=True, stable=True).indices[: budget - len(spectra)]]
    return (torch.bincount(taken, minlength=len(spectra)) + 1).tolist()
