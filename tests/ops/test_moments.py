"""``query_moments``: means and covariances against the definition in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastattn import ops
from fastattn.ops import reference
from fastattn.ops.cpu import scores as cpu_scores
from tests._helpers import draw
from tests._helpers.budget import assert_within_budget


def check_moments(query: Tensor, valid: Tensor | None = None, min_length: int = 0) -> tuple[Tensor, Tensor]:
    double = query.dtype == torch.float64
    actual = ops.query_moments(query, valid, min_length=min_length)
    exact = reference.query_moments(query.double(), valid)
    plain = reference.query_moments(query.float() if double else query, valid)
    used = torch.ones(query.shape[0], dtype=torch.bool)
    if valid is not None:
        used = valid.sum(1) >= min_length
    elif query.shape[2] < min_length:
        used = ~used
    for a, e, p, what in zip(actual, exact, plain, ("mean", "cov"), strict=True):
        assert a.dtype == (torch.float64 if double else torch.float32)
        # A mean that cancels is as far off as its terms are large; squares of centered numbers do not cancel.
        largest = query.double().nan_to_num().abs().max().item() if what == "mean" and query.numel() else 0.0
        assert_within_budget(a[used], e[used], p[used], what, cancelling=largest)
    return actual


@given(data=st.data())
@settings(max_examples=50)
def test_query_moments(data: st.DataObject) -> None:
    batch, heads = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 4))
    tokens, dim = data.draw(draw.sizes(130)), data.draw(st.sampled_from([1, 16, 33, 64]))
    seed = data.draw(draw.seeds)
    query = draw.normal(batch, heads, tokens, dim, dtype=data.draw(draw.dtypes), seed=seed)
    valid = None
    if data.draw(st.booleans()):
        share = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
        valid = draw.uniform(batch, tokens, seed=seed) < share
        query = query.masked_fill(~valid[:, None, :, None], math.nan)
        valid = draw.strided(valid.to(torch.int32), "contiguous").bool()
    query = draw.strided(query, data.draw(draw.layouts))
    check_moments(query, valid, data.draw(st.sampled_from([0, 1, 2, tokens, tokens + 1])))


def test_moments_by_explicit_loops() -> None:
    query = draw.normal(1, 1, 7, 3, dtype=torch.float64)
    mean, cov = reference.query_moments(query)
    rows = query[0, 0].tolist()
    for i in range(3):
        center = sum(row[i] for row in rows) / 7
        assert math.isclose(mean[0, 0, i].item(), center, abs_tol=1e-14)
        for j in range(3):
            other = sum(row[j] for row in rows) / 7
            product = sum((row[i] - center) * (row[j] - other) for row in rows) / 7
            assert math.isclose(cov[0, 0, i, j].item(), product, abs_tol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_moments_of_shifted_queries_take_two_passes(dtype: torch.dtype) -> None:
    query = (draw.normal(1, 2, 500, 8) + 300.0).to(dtype)
    _, cov = check_moments(query)
    _, exact = reference.query_moments(query.double())
    wide = query.float()
    one_pass = wide.mT @ wide / 500 - wide.mean(2)[..., None] * wide.mean(2)[..., None, :]
    error = (cov - exact).abs().max()
    assert error < 1e-4 < 1e-3 < (one_pass - exact).abs().max(), f"error {error:.1e}"


@pytest.mark.cpu_only
def test_moments_do_not_depend_on_the_size_of_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    query = draw.normal(2, 6, 40, 16, dtype=torch.bfloat16)
    valid = torch.arange(40) >= torch.tensor([[0], [13]])
    whole = ops.query_moments(query, valid)
    for piece in (1, 2 * 40 * 16, 4 * 40 * 16):
        monkeypatch.setattr(cpu_scores, "_PIECE", piece)
        pieces = check_moments(query, valid)
        for a, b in zip(whole, pieces, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_moments_of_no_query_and_of_one() -> None:
    query = draw.normal(2, 3, 5, 8)
    valid = torch.tensor([[False] * 5, [False, False, True, False, False]])
    mean, cov = check_moments(query, valid)
    assert torch.equal(mean[0], torch.zeros(3, 8))
    assert torch.equal(mean[1], query[1, :, 2])
    assert torch.equal(cov, torch.zeros(2, 3, 8, 8))
    empty = ops.query_moments(draw.normal(1, 2, 0, 4))
    assert torch.equal(empty[0], torch.zeros(1, 2, 4))
    assert torch.equal(empty[1], torch.zeros(1, 2, 4, 4))


# -- registration and checks -----------------------------------------------------------------------------------------
