"""The error budget that every numeric test applies."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rounding_unit(largest: float, dtype: torch.dtype) -> float:
    """The distance between neighbouring numbers of ``dtype`` around ``largest``."""
    info = torch.finfo(dtype)
    if largest <= info.tiny:
        return info.tiny * info.eps
    return info.eps * 2.0 ** math.floor(math.log2(largest))


def assert_within_budget(actual: Tensor, exact: Tensor, plain: Tensor, what: str = "result") -> None:
    """``actual`` errs at most twice as much as ``plain``, plus one rounding unit of the largest value.

    Args:
        actual: the result under test.
        exact: float64 result of the definition.
        plain: the same computation in plain PyTorch in ``actual``'s dtype.
        what: name for the message.

    Infinities of ``exact`` must be met exactly, and ``actual`` may hold no NaN.
    """
    assert exact.dtype == torch.float64, f"the exact {what} must be float64, got {exact.dtype}"
    assert actual.shape == exact.shape == plain.shape, (
        f"{what}: shapes {list(actual.shape)}, exact {list(exact.shape)}, plain {list(plain.shape)}"
    )
    assert plain.dtype == actual.dtype, f"{what}: got {actual.dtype}, expected {plain.dtype}"
    if actual.numel() == 0:
        return
    assert not exact.isnan().any(), f"the exact {what} holds NaN: the test is wrong"
    assert not actual.isnan().any(), f"{what}: {int(actual.isnan().sum())} NaN"
    infinite = exact.isinf()
    assert torch.equal(actual.double()[infinite], exact[infinite]), f"{what}: infinities differ"
    assert not actual[~infinite].isinf().any(), f"{what}: infinite where the exact value is finite"
    expected = exact[~infinite]
    if expected.numel() == 0:
        return
    error = (actual[~infinite].double() - expected).abs().max().item()
    plain_error = (plain[~infinite].double() - expected).abs().nan_to_num(nan=0.0, posinf=0.0).max().item()
    unit = rounding_unit(expected.abs().max().item(), actual.dtype)
    assert error <= 2 * plain_error + unit, (
        f"{what}: error {error:.3e}, allowed 2 x {plain_error:.3e} (plain PyTorch) + {unit:.3e} (one rounding unit)"
    )
