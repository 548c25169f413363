"""The error budget that every numeric test applies."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def rounding_unit(largest: float, dtype: torch.dtype) -> float:
    """The distance between neighboring numbers of ``dtype`` around ``largest``."""
    info = torch.finfo(dtype)
    if largest <= info.tiny:
        return info.tiny * info.eps
    return info.eps * 2.0 ** math.floor(math.log2(largest))


def plain_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the plain computation for a result in ``dtype``: see :func:`assert_within_budget`."""
    return torch.float32 if dtype == torch.float64 else dtype


def _largest(error: Tensor) -> float:
    return error.abs().max().item() if error.numel() else 0.0


def assert_within_budget(
    actual: Tensor, exact: Tensor, plain: Tensor | Sequence[Tensor], what: str = "result", *, cancelling: float = 0.0
) -> None:
    """``actual`` errs at most twice as much as ``plain``, plus one rounding unit of the largest value.

    Args:
        actual: the result under test.
        exact: float64 result of the definition.
        plain: the same computation in plain PyTorch in ``actual``'s dtype. Nothing is more exact than a float64
            result: there ``plain`` is the computation in float32, and its error counts scaled down to float64. Its
            inputs must be exact in float32 (those of :func:`tests._helpers.draw.normal` are). Of several ways to write
            it the one that errs most counts.
        what: name for the message.
        cancelling: magnitude of intermediate float32 (float64) terms that may cancel to a much smaller result, on
            which the order of summation then leaves a few units. Only where a formula cancels by construction.

    Infinities of ``exact`` must be met exactly, and ``actual`` may hold no NaN.
    """
    assert exact.dtype == torch.float64, f"the exact {what} must be float64, got {exact.dtype}"
    if not isinstance(plain, Tensor):
        finite = exact.isfinite()
        plain = max(plain, key=lambda way: _largest((way.double() - exact)[finite]))
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
        factor = 6.0  # the expected value errs as much, and the scaling is an estimate
    unit = rounding_unit(expected.abs().max().item(), actual.dtype)
    wide = torch.float64 if actual.dtype == torch.float64 else torch.float32
    if cancelling > 0:
        unit += 8 * rounding_unit(cancelling, wide)
    assert error <= factor * plain_error + unit, (
        f"{what}: error {error:.3e}, allowed {factor:g} x {plain_error:.3e} (plain PyTorch)"
        f" + {unit:.3e} (one rounding unit)"
    )


def assert_lse(
    actual: Tensor, exact: Tensor, input_dtype: torch.dtype, largest_score: float, *, rounding: float = 0.0
) -> None:
    """Log-sum-exps of ``input_dtype`` inputs, accumulated in float32 (float64), against float64.

    The bound is absolute, because a log-sum-exp is often far smaller than the scores that it sums: eight units of the
    largest score and, for half precision, 2^-14, the error of the fast exponential of PyTorch's CPU kernels. To it
    comes ``rounding``, what an operator's documentation says that rounded scores may add.
    """
    wide = torch.float64 if input_dtype == torch.float64 else torch.float32
    assert actual.dtype == wide, f"lse: got {actual.dtype}, expected {wide}"
    assert actual.shape == exact.shape
    assert torch.equal(actual.isinf(), exact.isinf()), "lse: infinities differ"
    finite = ~exact.isinf()
    assert (actual[~finite] < 0).all(), "lse: +inf"
    bound = 8 * rounding_unit(max(largest_score, 1.0), wide)
    if input_dtype in (torch.float16, torch.bfloat16):
        bound += 2.0**-14
    bound += rounding
    error = (actual - exact)[finite].abs().nan_to_num(nan=float("inf")).max().item() if finite.any() else 0.0
    assert error <= bound, f"lse: error {error:.3e}, allowed {bound:.3e}"
