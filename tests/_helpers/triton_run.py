"""Running the public operators through the Triton launchers on CPU tensors, interpreted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from hypothesis import HealthCheck, Phase, settings
from torch import Tensor

from fastattn.ops import _register
from fastattn.ops.triton import _launch
from tests._helpers.budget import assert_within_budget

# The interpreter's bfloat16 products, sums and casts are wrong: bfloat16 is left to offline compilation and to a GPU.
DTYPES = (torch.float32, torch.float16)
MOST_TOKENS = 256


def examples(count: int) -> settings:
    """Settings of a hypothesis test that interprets kernels: each example is slow, and shrinking would take minutes."""
    return settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.reuse, Phase.generate),
    )


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


def assert_attention(actual: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor], plain: tuple[Tensor, Tensor]) -> None:
    """``(out, lse)`` are contiguous and within the error budget.

    ``lse`` is float32 also for float16 inputs, and so is ``plain``'s, which takes its products with a blocked sum where
    a matrix unit (and the interpreter) sums one by one: there, 1e-5 of the largest value, far below float16's own.
    """
    (out, lse), half = actual, actual[0].dtype == torch.float16
    assert out.is_contiguous()
    assert lse.is_contiguous()
    assert_within_budget(out, exact[0], plain[0], "out")
    if not half:
        assert_within_budget(lse, exact[1], plain[1], "lse")
        return
    finite = exact[1].isfinite()
    assert torch.equal(lse.double()[~finite], exact[1][~finite]), "lse: -inf expected where a query sees nothing"
    largest = max(1.0, exact[1][finite].abs().max().item()) if finite.any() else 1.0
    torch.testing.assert_close(lse.double()[finite], exact[1][finite], rtol=0, atol=1e-5 * largest)
