"""Counting collectives and the bytes that a rank brings to them.

``CommDebugMode`` counts the same, but leaves hooks on modules, which may then be called once only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_NAMESPACES = ("_c10d_functional", "c10d")
_NO_TRAFFIC = ("wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_")


class Collectives(TorchDispatchMode):
    """Counts what runs inside.

    Attributes:
        names: of the collectives, in order.
        sizes: the bytes of each one's input on this rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, Tensor) and one.__name__ == "DTensor" for one in types):
            return NotImplemented  # DTensor takes itself apart; what that runs comes back here
        namespace, _, name = str(getattr(func, "_schema", func)).partition("(")[0].partition("::")
        if namespace in _NAMESPACES and name.partition(".")[0] not in _NO_TRAFFIC:
            given = args[1:2] if name.startswith(("_allgather_base", "allgather", "_reduce_scatter")) else args[:1]
            tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
            self.names.append(name.partition(".")[0])
            self.sizes.append(sum(t.numel() * t.element_size() for t in tensors))
        return func(*args, **(kwargs or {}))
