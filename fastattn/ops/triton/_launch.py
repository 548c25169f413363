"""What every launcher shares: wrapping kernels for tracing, and knowing whether they are interpreted."""

from __future__ import annotations

from typing import Any

import torch

from fastattn.ops import _register


def kernel(jit_function: Any) -> Any:
    """The kernel to call: itself in eager mode, wrapped so that the graph shows it while a launcher is traced."""
    return torch.library.wrap_triton(jit_function) if _register.tracing() else jit_function
