"""Peak memory of a conversion."""

from __future__ import annotations

import sys

import torch
from torch import nn


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def reset_peak_memory(model: nn.Module) -> None:
    """Start measuring anew, on a GPU."""
    if _device(model).type == "cuda":
        torch.cuda.reset_peak_memory_stats(_device(model))


def peak_memory(model: nn.Module) -> int | None:
    """Bytes: of the model's GPU since the reset, else of the process since its start; ``None`` where unknown."""
    if _device(model).type == "cuda":
        return torch.cuda.max_memory_allocated(_device(model))
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
