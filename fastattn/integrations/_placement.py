"""Where modules compute, with weights that are here, offloaded (accelerate's hooks) or nowhere."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import nn


def device_of(module: nn.Module) -> torch.device | None:
    """Where ``module`` computes: with its tensors, or where its hooks bring them. None if neither is known."""
    for tensor in chain(module.parameters(), module.buffers()):
        if not tensor.is_meta:
            return tensor.device
    for part in module.modules():
        device = offloaded_to(part)
        if device is not None:
            return device
    return None


def offloaded_to(module: nn.Module) -> torch.device | None:
    """The device to which accelerate's hook on ``module`` brings its weights for a call, None without such a hook."""
    hook: Any = getattr(module, "_hf_hook", None)
    for each in getattr(hook, "hooks", (hook,)):  # several in a row are one hook
        device = getattr(each, "execution_device", None)
        if device is not None:
            return torch.device(device)
    return None
