"""Second moments of a projection's inputs, streamed in float64."""

from __future__ import annotations

import torch
from torch import Tensor


class SecondMoment:
    """``E[z z^T]`` of ``z = [x, 1]`` over every token fed, in float64.

    The constant column lets a bias ride along as one more input: the outputs of ``[W b]`` then have the second moment
    ``[W b] E[z z^T] [W b]^T``.

    Args:
        features: size of ``x``.
        device: where the sum is kept; devices without float64 (MPS) keep it on the CPU.
    """

    def __init__(self, features: int, device: torch.device | str = "cpu") -> None:
        device = torch.device(device)
        self.device = torch.device("cpu") if device.type == "mps" else device
        self.total = torch.zeros(features + 1, features + 1, dtype=torch.float64, device=self.device)
        self.tokens = 0

    def add(self, inputs: Tensor) -> None:
        """Feed ``inputs [..., features]``.

        Raises:
            ValueError: a value that is not finite; nothing is added then.
        """
        rows = inputs.detach().reshape(-1, inputs.shape[-1]).to(self.device).double()
        if not bool(torch.isfinite(rows).all()):
            raise ValueError("calibration activations must be finite, got NaN or infinity")
        features = rows.shape[1]
        self.total[:features, :features].addmm_(rows.T, rows)
        sums = rows.sum(dim=0)
        self.total[features, :features] += sums
        self.total[:features, features] += sums
        self.total[features, features] += rows.shape[0]
        self.tokens += rows.shape[0]

    def mean(self, damping: float = 0.0) -> Tensor:
        """``E[z z^T]``, with ``damping`` times the mean input energy added to the diagonal of the inputs' part.

        Raises:
            ValueError: no token was fed.
        """
        if self.tokens == 0:
            raise ValueError("calibration must hold at least one token, got none")
        mean = self.total / self.tokens
        if damping:
            inputs = mean.diagonal()[:-1]
            inputs += damping * inputs.mean()
        return mean
