"""Running the public operators through the Triton launchers on CPU tensors, interpreted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

from fastattn.ops import _register
from fastattn.ops.triton import _launch

# The interpreter's bfloat16 products, sums and casts are wrong: bfloat16 is left to offline compilation and to a GPU.
DTYPES = (torch.float32, torch.float16)
MOST_TOKENS = 256


def examples(count: int) -> settings:
    """Settings of a hypothesis test that interprets kernels: ``count`` examples, each as slow as it is."""
    return settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))


@contextlib.contextmanager
def interpreted(family: str = "sm_90", processors: int = 4) -> Iterator[None]:
    """Operators called inside run their kernels, with the configs of ``family``.

    Few ``processors`` keep the number of splits, hence of interpreted programs, small; more give more splits.
    """
    target = _launch.Target(family, processors)
    with _register.force_triton(), _launch.assume_target(target):
        yield


def wide(tensor: Tensor | None) -> Tensor | None:
    """``tensor`` in float64, for the definitions."""
    return tensor.double() if tensor is not None and tensor.is_floating_point() else tensor
