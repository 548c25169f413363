"""A copy that a compiled graph makes where it is written, not where it is used.

Inductor computes elementwise results where they are used. One that reads the memory of a cache and is used only after
an in-place operator has changed it would read the new values (seen with PyTorch 2.13 on ``lengths``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.ops._register import register_opaque


def realized(tensor: Tensor) -> Tensor:
    """``tensor`` itself; in a graph a copy that exists before the next operator runs."""
    return REALIZED(tensor) if torch.compiler.is_compiling() else tensor


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


REALIZED = register_opaque("realized", "(Tensor tensor) -> Tensor", _copy)
