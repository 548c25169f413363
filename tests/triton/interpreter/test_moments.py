"""query_moments' kernels, interpreted, against the definition in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastattn import ops
from fastattn.ops import reference
from fastattn.ops.triton import moments
from tests._helpers import draw
from tests._helpers.budget import assert_within_budget
from tests._helpers.triton_run import DTYPES, examples, interpreted


def check(query: Tensor, valid: Tensor | None = None, min_length: int = 0, processors: int = 132) -> None:
    """Compare the rows that are not skipped."""
    with interpreted(processors=processors):
        actual = ops.query_moments(query, valid, min_length=min_length)
    plain, exact = reference.query_moments(query, valid), reference.query_moments(query.double(), valid)
    count = torch.full(query.shape[:1], query.shape[2]) if valid is None else valid.sum(1)
    done = count >= min_length
    for name, one, two, three in zip(("mean", "cov"), actual, exact, plain, strict=True):
        assert one.dtype == torch.float32
        assert one.is_contiguous()
        # float32 sums in another order: centring leaves an error of the mean's size, squared it is nothing
        size = query.nan_to_num(nan=0.0).abs().max().item() if query.numel() else 0.0
        assert_within_budget(one[done], two[done], three[done], name, cancelling=size / 8 if name == "mean" else 0.0)
    cov = actual[1][done]  # a tile on the diagonal is one product, which NumPy's library may sum in two orders
    rounding = 8 * torch.finfo(torch.float32).eps * cov.abs().amax().item() if cov.numel() else 0.0
    torch.testing.assert_close(cov, cov.mT, rtol=0, atol=rounding, equal_nan=True)


def some_valid(batch: int, tokens: int, seed: int, threshold: float) -> Tensor:
    return draw.normal(batch, tokens, seed=seed) > threshold


@examples(25)
@given(data=st.data())
def test_any_shape_layout_and_mask(data: st.DataObject) -> None:
    batch, heads, tokens = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3)), data.draw(draw.sizes(200))
    dim, seed = data.draw(st.sampled_from([1, 8, 33, 64, 80])), data.draw(draw.seeds)
    query = 1.0 + draw.normal(batch, heads, tokens, dim, seed=seed)
    query = query.to(data.draw(st.sampled_from(DTYPES)))
    valid = None
    if data.draw(st.booleans()):
        valid = some_valid(batch, tokens, seed + 1, data.draw(st.sampled_from([-9.0, 0.0, 1.5, 9.0])))
        query = query.masked_fill(~valid[:, None, :, None], float("nan"))
        valid = draw.strided(valid, data.draw(st.sampled_from(["contiguous", "last_dim_first"])))
    check(draw.strided(query, data.draw(draw.layouts)), valid, data.draw(st.sampled_from([0, 1, tokens])))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masked", [False, True])
def test_tokens_shared_by_several_programs(dtype: torch.dtype, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "SPLIT_TOKENS", 40)
    query = draw.normal(2, 1, 300, 40, dtype=dtype)
    valid = some_valid(2, 300, 3, 0.0) if masked else None
    check(query, valid)
    check(query, valid, min_length=150)


@pytest.mark.parametrize("dim", [96, 128, 192])
@pytest.mark.parametrize("dtype", DTYPES)
def test_usual_head_dims(dim: int, dtype: torch.dtype) -> None:
    check(draw.normal(1, 2, 65, dim, dtype=dtype))


def test_long_masks_are_counted_in_several_blocks() -> None:
    check(draw.normal(1, 1, 2100, 16), some_valid(1, 2100, 5, 0.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_shifted_queries_keep_their_covariance(dtype: torch.dtype) -> None:
    """``E[x^2] - E[x]^2`` in float32 would lose it: the mean is 500 times the deviation."""
    check(draw.normal(1, 2, 128, 16, dtype=dtype, scale=0.2) + 100.0)


@pytest.mark.parametrize("count", [0, 1])
def test_no_query_gives_zeros_and_one_has_no_covariance(count: int) -> None:
    query = torch.full((1, 2, 5, 16), float("nan"))
    query[:, :, :count] = 3.0
    with interpreted():
        mean, cov = ops.query_moments(query, torch.arange(5)[None] < count)
    assert torch.equal(mean, torch.full((1, 2, 16), 3.0 * count))
    assert not cov.any()


@pytest.mark.parametrize("shape", [(1, 2, 0, 8), (0, 2, 4, 8), (1, 0, 4, 8)])
def test_empty_queries(shape: tuple[int, ...]) -> None:
    with interpreted():
        mean, cov = ops.query_moments(torch.zeros(shape))
    assert mean.shape == (*shape[:2], 8)
    assert not mean.any()
    assert not cov.any()


def test_float64_raises() -> None:
    with interpreted(), pytest.raises(TypeError, match="float64"):
        ops.query_moments(torch.zeros(1, 1, 4, 8, dtype=torch.float64))
