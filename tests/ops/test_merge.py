"""``merge_attention``: partial results over disjoint keys put together."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastattn import ops
from fastattn.ops import reference
from tests._helpers import draw
from tests._helpers.budget import assert_within_budget, plain_dtype


@draw.cases(60)
@given(
    st.lists(st.integers(0, 3), min_size=4, max_size=4),
    st.integers(1, 4),
    draw.dtypes,
    draw.layouts,
    draw.seeds,
    st.floats(0.0, 1.0),
)
def test_merge_equals_the_definition(
    shape: list[int], parts: int, dtype: torch.dtype, layout: str, seed: int, unseen: float
) -> None:
    """Log-sum-exps far apart, some -inf; queries that no part saw."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    outs, lses = [], []
    for part in range(parts):
        hidden = draw.uniform(*shape[:3], seed=seed + 200 + part) < unseen
        out = draw.normal(*shape, dtype=dtype, seed=seed + part).masked_fill(hidden[..., None], 0.0)
        lse = draw.normal(*shape[:3], dtype=wide, seed=seed + 100 + part, scale=20.0)
        outs.append(draw.strided(out, layout))
        lses.append(draw.strided(lse.masked_fill(hidden, float("-inf")), layout))
    out, lse = ops.merge_attention(outs, lses)
    exact, exact_lse = reference.merge_attention([t.double() for t in outs], [t.double() for t in lses])
    plain_outs = [t.to(plain_dtype(dtype)) for t in outs]
    plain, plain_lse = reference.merge_attention(plain_outs, [t.float() for t in lses])
    # Weights are exponentials of differences of log-sum-exps: their rounding scales the outputs.
    assert_within_budget(out, exact, plain, "out", cancelling=100.0)
    assert_within_budget(lse, exact_lse, plain_lse, "lse")
    assert out.is_contiguous()
    assert lse.is_contiguous()


@draw.cases(30)
@given(st.integers(0, 20), st.integers(0, 20), draw.seeds)
def test_attention_over_parts_merged_is_attention_over_all(first: int, second: int, seed: int) -> None:
    query = draw.normal(1, 4, 3, 8, dtype=torch.float64, seed=seed)
    key, value = (draw.normal(1, 2, first + second, 8, dtype=torch.float64, seed=seed + n) for n in (1, 2))
    whole, whole_lse = ops.attention(query, key, value, return_lse=True)
    parts = [
        ops.attention(query, k, v, return_lse=True)
        for k, v in zip(key.split([first, second], 2), value.split([first, second], 2), strict=True)
    ]
    out, lse = ops.merge_attention(*zip(*parts, strict=True))
    torch.testing.assert_close(out, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-12, atol=1e-12)


def numbers(out: float, lse: float) -> tuple[Tensor, Tensor]:
    return torch.full((1, 1, 1, 1), out), torch.full((1, 1, 1), lse)


def test_log_sum_exp_is_natural() -> None:
    """Fault class: lse in base 2 merged with natural ones. A part with three times the weight counts three times."""
    (one, one_lse), (two, two_lse) = numbers(1.0, 0.0), numbers(5.0, math.log(3.0))
    out, lse = ops.merge_attention([one, two], [one_lse, two_lse])
    assert out.item() == pytest.approx(4.0)
    assert lse.item() == pytest.approx(math.log(4.0))


@pytest.mark.parametrize("held", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("merge", [ops.merge_attention, reference.merge_attention], ids=["operator", "definition"])
def test_parts_that_saw_nothing_are_neutral(merge, held: float) -> None:
    """Fault class: (-inf) - (-inf), and 0 * NaN."""
    (one, one_lse), (none, none_lse) = numbers(2.0, -3.0), numbers(held, float("-inf"))
    out, lse = merge([none, one, none], [none_lse, one_lse, none_lse])
    assert (out.item(), lse.item()) == (2.0, -3.0)
    out, lse = merge([none, none], [none_lse, none_lse])
    assert (out.item(), lse.item()) == (0.0, float("-inf"))
