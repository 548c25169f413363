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


def plain_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the plain computation for a result in ``dtype``: see :func:`assert_within_budget`."""
    return torch.float32 if dtype == torch.float64 else dtype


def assert_within_budget(actual: Tensor, exact: Tensor, plain: Tensor, what: str = "result") -> None:
    """``actual`` errs at most twice as much as ``plain``, plus one rounding unit of the largest value.

    Args:
        actual: the result under test.
        exact: float64 result of the definition.
        plain: the same computation in plain PyTorch in ``actual``'s dtype. Nothing is more exact than a float64
            result: there ``plain`` is the computation in float32, and its error counts scaled down to float64. Its
            inputs must be exact in float32 (those of :func:`tests._helpers.draw.normal` are).
        what: name for the message.

    Infinities of ``exact`` must be met exactly, and ``actual`` may hold no NaN.
    """
    assert exact.dtype == torch.float64, f"the exact {what} must be float64, got {exact.dtype}"
    assert actual.shape == exact.shape == plain.shape, (
        f"{what}: shapes {list(actual.shape)}, exact {list(exact.shape)}, plain {list(plain.shape)}"
    )
    assert plain.dtype == plain_dtype(actual.dtype), f"{what}: got {actual.dtype}, plain PyTorch gives {plain.dtype}"
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
    factor = 2.0
    if actual.dtype == torch.float64:
        plain_error *= torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        factor = 3.0  # the expected value errs as much
    unit = rounding_unit(expected.abs().max().item(), actual.dtype)
    assert error <= factor * plain_error + unit, (
        f"{what}: error {error:.3e}, allowed {factor:g} x {plain_error:.3e} (plain PyTorch)"
        f" + {unit:.3e} (one rounding unit)"
    )
