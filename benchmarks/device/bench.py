"""Where the device check runs, how large, and how its inputs get there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Bench:
    """Where the checks run, and how large. Inputs are drawn on the CPU and moved, whatever the default device is."""

    def __init__(self, device: str, small: bool) -> None:
        self.device, self.small = device, small
        self.cuda = torch.device(device).type == "cuda"

    def normal(self, *shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
        """Normal numbers, the same on every device."""
        generator = torch.Generator("cpu").manual_seed(seed)
        return torch.randn(shape, generator=generator, device="cpu").to(dtype).to(self.device)

    def noise(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Normal numbers drawn where they are needed: gigabytes that are timed and not compared."""
        return torch.randn(shape, dtype=dtype, device=self.device)

    def int32(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)
