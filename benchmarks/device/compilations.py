"""What a GPU would have to compile for calls that run on a CPU: their launches on sm_90, specialized as Triton does."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.lib import offline
from fastattn.ops import _register
from fastattn.ops.triton import _launch
from fastattn.ops.triton.configs import OfflineCase

FAMILY = "sm_90"


class Counting(TorchDispatchMode):
    """Inside, the kernels of every operator called are noted in ``kernels``: a name and a digest each."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if function.namespace == _register.NAMESPACE:
            self._note(function, args, kwargs or {})
        return function(*args, **(kwargs or {}))

    def _note(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = _pytree.tree_map_only(Tensor, _meta, _register._bind(function, args, kwargs))
        launcher = _register.launchers[function._schema.name.partition("::")[2]]
        with _launch.assume_target(_launch.TYPICAL[FAMILY]), _launch.record_launches() as launches:
            try:
                launcher(*arguments)
            except (TypeError, ValueError):  # what a GPU does not take, float64 for one, compiles nothing
                return
        case = OfflineCase("", lambda: None)
        for launch in launches:
            job = replace(offline._job(case, FAMILY, launch), case="")
            self.kernels.add(f"{job.kernel} {hashlib.sha256(repr(job).encode()).hexdigest()[:12]}")


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
