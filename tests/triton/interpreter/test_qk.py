"""qk_scores' kernel against the definition in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastattn import ops
from fastattn.ops import reference
from tests._helpers import draw
from tests._helpers.budget import assert_within_budget
from tests._helpers.triton_run import DTYPES, examples, interpreted


def _check(query, key, scale=1.0, family="sm_90"):
    exact = reference.qk_scores(query.double(), key.double(), scale=scale)
    plain = reference.qk_scores(query, key, scale=scale)
    with interpreted(family):
        score = ops.qk_scores(query, key, scale=scale)
    assert score.is_contiguous()
    # a product of vectors may cancel: some units of the largest sum of magnitudes
    terms = abs(scale) * query.double().norm(dim=-1).max() * key.double().norm(dim=-1).max() if score.numel() else 0.0
    assert_within_budget(score, exact, plain, "score", cancelling=float(terms))


@st.composite
def _calls(drawer):
    batch, kv_heads = drawer(st.integers(1, 2)), drawer(st.integers(1, 2))
    group = drawer(st.sampled_from([1, 2, 3]))
    queries, keys = drawer(draw.sizes(150)), drawer(draw.sizes(256))
    dim = drawer(st.sampled_from([1, 7, 16, 64, 96, 130]))
    dtype, seed = drawer(st.sampled_from(DTYPES)), drawer(draw.seeds)
    query = draw.normal(batch, kv_heads * group, queries, dim, dtype=dtype, seed=seed)
    key = draw.normal(batch, kv_heads, keys, dim, dtype=dtype, seed=seed + 1)
    query, key = (draw.strided(x, drawer(draw.layouts)) for x in (query, key))
    return query, key, drawer(st.sampled_from([1.0, 0.125, -3.0])), drawer(st.sampled_from(["sm_86", "sm_90"]))


@examples(25)
@given(_calls())
def test_any_shape_and_layout(call):
    _check(*call)


@pytest.mark.parametrize("keys", [127, 128, 129])
@pytest.mark.parametrize("queries", [1, 127, 129])
def test_block_edges(queries, keys):
    _check(draw.normal(1, 2, queries, 32), draw.normal(1, 1, keys, 32, seed=1))


def test_many_row_tiles_walk_in_bands():
    _check(draw.normal(1, 10, 130, 16), draw.normal(1, 1, 130, 16, seed=1))


def test_empty_sizes():
    x = draw.normal(1, 1, 4, 8)
    _check(x[:, :, :0], x)
    _check(x, x[:, :, :0])
    with interpreted():
        assert torch.equal(ops.qk_scores(x[..., :0], x[..., :0]), torch.zeros(1, 1, 4, 4))
