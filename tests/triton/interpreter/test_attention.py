"""attention's forward kernel against the definition in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastattn import ops
from fastattn.ops import reference
from tests._helpers import draw
from tests._helpers.triton_run import DTYPES, assert_attention, examples, interpreted

MOST_TOKENS = 200


def check(query, key, value, family="sm_90", **options):
    exact = reference.attention(query.double(), key.double(), value.double(), return_lse=True, **options)
    plain = reference.attention(query, key, value, return_lse=True, **options)
    with interpreted(family):
        actual = ops.attention(query, key, value, return_lse=True, **options)
    assert_attention(actual, exact, plain)


@st.composite
def calls(drawer, tokens=MOST_TOKENS, dtypes=DTYPES):
    """Arguments of ``attention``: any shape and layout, ragged on both sides, NaN outside the valid keys."""
    batch, kv_heads = drawer(st.integers(1, 2)), drawer(st.integers(1, 2))
    group = drawer(st.sampled_from([1, 2, 3, 5]))
    queries, keys = drawer(draw.sizes(tokens)), drawer(draw.sizes(tokens))
    key_dim, value_dim = drawer(st.sampled_from([(16, 16), (64, 64), (24, 8), (96, 32), (20, 48)]))
    dtype, seed = drawer(st.sampled_from(dtypes)), drawer(draw.seeds)
    query = draw.normal(batch, kv_heads * group, queries, key_dim, dtype=dtype, seed=seed)
    key = draw.normal(batch, kv_heads, keys, key_dim, dtype=dtype, seed=seed + 1)
    value = draw.normal(batch, kv_heads, keys, value_dim, dtype=dtype, seed=seed + 2)
    start = drawer(st.none() | draw.lengths((batch,), keys))
    lengths = drawer(st.none() | draw.lengths((batch,), keys))
    end = torch.full((batch,), keys, dtype=torch.int32) if lengths is None else lengths
    for tensor in (key, value):
        draw.poison_slots_(tensor, end, start)
    query, key, value = (draw.strided(x, drawer(draw.layouts)) for x in (query, key, value))
    causal = drawer(st.booleans())
    return {"query": query, "key": key, "value": value, "key_start": start, "lengths": lengths, "causal": causal}


@examples(20)
@given(calls())
def test_any_shape_layout_and_raggedness(call):
    check(**call)


@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (256, 256), (96, 96)])
@pytest.mark.parametrize("family", ["sm_86", "sm_90"])
def test_usual_head_dims(dims, family):
    query = draw.normal(1, 4, 40, dims[0], dtype=torch.float16)
    key = draw.normal(1, 2, 70, dims[0], dtype=torch.float16, seed=1)
    value = draw.normal(1, 2, 70, dims[1], dtype=torch.float16, seed=2)
    check(query, key, value, family, causal=True)


@pytest.mark.parametrize("keys", [1, 31, 32, 33, 127, 128, 129])
@pytest.mark.parametrize("queries", [1, 64, 65, 129])
def test_block_edges_align_bottom_right(queries, keys):
    x = draw.normal(1, 1, 129, 16)
    check(x[:, :, :queries], x[:, :, :keys], x[:, :, :keys], causal=True)


def test_no_keys_and_no_queries():
    x = draw.normal(1, 2, 3, 16)
    check(x, x[:, :, :0], x[:, :, :0])
    check(x[:, :, :0], x, x, causal=True)


def test_rows_outside_the_keys_give_zero():
    x = draw.normal(2, 2, 40, 16)
    bounds = torch.tensor([30, 10], dtype=torch.int32)
    check(x, x, x, key_start=bounds, lengths=torch.tensor([20, 40], dtype=torch.int32), causal=True)


def test_large_logits_do_not_overflow():
    query, key = (draw.normal(1, 1, 70, 64, dtype=torch.float16, scale=40.0, seed=s) for s in (0, 1))
    check(query, key, draw.normal(1, 1, 70, 64, dtype=torch.float16, seed=2), causal=True, scale=1.0)


def test_unsupported_dtype_and_dim_are_named():
    with interpreted():
        x = torch.zeros(1, 1, 4, 16, dtype=torch.float64)
        with pytest.raises(TypeError, match=r"float32, got query of torch\.float64"):
            ops.attention(x, x, x)
        x = torch.zeros(1, 1, 4, 257)
        with pytest.raises(ValueError, match="head dim of 1 to 256, got 257"):
            ops.attention(x, x, x)
