"""``qk_scores`` against the definition in float64."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fastattn import ops
from fastattn.ops import reference
from tests._helpers import draw
from tests._helpers.budget import assert_within_budget, plain_dtype


@draw.cases(80)
@given(
    st.integers(0, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    draw.sizes(40, 0),
    draw.sizes(70, 0),
    st.sampled_from([1, 3, 8, 33]),
    draw.dtypes,
    st.lists(draw.layouts, min_size=2, max_size=2),
    st.sampled_from([1.0, 0.3, -2.0, 0.0]),
    draw.seeds,
)
def test_scores_equal_the_definition(
    batch: int,
    kv_heads: int,
    groups: int,
    queries: int,
    keys: int,
    dim: int,
    dtype: torch.dtype,
    layouts: list[str],
    scale: float,
    seed: int,
) -> None:
    query = draw.normal(batch, kv_heads * groups, queries, dim, dtype=dtype, seed=seed)
    key = draw.normal(batch, kv_heads, keys, dim, dtype=dtype, seed=seed + 1)
    query, key = draw.strided(query, layouts[0]), draw.strided(key, layouts[1])
    scores = ops.qk_scores(query, key, scale=scale)
    plain = plain_dtype(dtype)
    expected = reference.qk_scores(query.to(plain), key.to(plain), scale=scale)
    # Sums of products of either sign: what is left may be far smaller than the terms.
    assert_within_budget(
        scores, reference.qk_scores(query.double(), key.double(), scale=scale), expected, cancelling=abs(scale) * dim
    )
    assert scores.is_contiguous()


def test_products_are_accumulated_in_float32() -> None:
    """4,096 products of 1: a sum in float16 or bfloat16 would stick at 2,048 or 256."""
    for dtype in (torch.float16, torch.bfloat16):
        ones = torch.ones(1, 1, 1, 4096, dtype=dtype)
        assert ops.qk_scores(ones, ones).item() == 4096.0
