"""decode_attention's kernels against the definition in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastattn import ops
from fastattn.ops import reference
from tests._helpers import draw
from tests._helpers.triton_run import DTYPES, MOST_TOKENS, assert_attention, examples, interpreted


def _check(query, key, value, lengths, *, causal=True, scale=None, processors=4, family="sm_90"):
    exact = reference.decode_attention(
        query.double(), key.double(), value.double(), lengths, scale=scale, causal=causal, return_lse=True
    )
    plain = reference.decode_attention(query, key, value, lengths, scale=scale, causal=causal, return_lse=True)
    if query.dtype == torch.float32:  # the kernel scales scores for exp2, one rounding more: another way of PyTorch's
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        scaled = reference.decode_attention(
            query * factor, key, value, lengths, scale=1.0, causal=causal, return_lse=True
        )
        plain = tuple(zip(plain, scaled, strict=True))
    with interpreted(family, processors):
        actual = ops.decode_attention(query, key, value, lengths, scale=scale, causal=causal, return_lse=True)
    assert_attention(actual, exact, plain)


@st.composite
def _calls(drawer):
    batch = drawer(st.integers(1, 2))
    kv_heads = drawer(st.integers(1, 3))
    group = drawer(st.sampled_from([1, 2, 3, 4, 7]))
    tokens = drawer(st.sampled_from([1, 1, 2, 3, 8]))
    capacity = drawer(draw.sizes(MOST_TOKENS))
    key_dim = drawer(st.sampled_from([8, 16, 40, 64, 96]))
    value_dim = drawer(st.sampled_from([8, 24, 64]))
    dtype = drawer(st.sampled_from(DTYPES))
    seed = drawer(draw.seeds)
    lengths = drawer(draw.lengths((batch, kv_heads), capacity))
    query = draw.normal(batch, kv_heads * group, tokens, key_dim, dtype=dtype, seed=seed)
    key = draw.normal(batch, kv_heads, capacity, key_dim, dtype=dtype, seed=seed + 1)
    value = draw.normal(batch, kv_heads, capacity, value_dim, dtype=dtype, seed=seed + 2)
    draw.poison_slots_(key, lengths)
    draw.poison_slots_(value, lengths)
    query, key, value = (draw.strided(x, drawer(draw.layouts)) for x in (query, key, value))
    return {
        "query": query,
        "key": key,
        "value": value,
        "lengths": lengths,
        "causal": drawer(st.booleans()),
        "scale": drawer(st.sampled_from([None, 0.3])),
        "processors": drawer(st.sampled_from([1, 8, 64])),
    }


@examples(25)
@given(_calls())
def test_any_shape_layout_and_length(call):
    _check(**call)


@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("family", ["sm_86", "sm_90"])
def test_usual_head_dims(dims, family):
    lengths = torch.tensor([[65, 0], [1, 64]], dtype=torch.int32)
    key = draw.poison_slots_(draw.normal(2, 2, 80, dims[0], dtype=torch.float16), lengths)
    value = draw.poison_slots_(draw.normal(2, 2, 80, dims[1], dtype=torch.float16, seed=1), lengths)
    _check(draw.normal(2, 8, 1, dims[0], dtype=torch.float16, seed=2), key, value, lengths, family=family)


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 127, 128, 129])
def test_block_edges_in_every_split(length):
    lengths = torch.full((1, 1), length, dtype=torch.int32)
    key = draw.poison_slots_(draw.normal(1, 1, 192, 128), lengths)
    value = draw.poison_slots_(draw.normal(1, 1, 192, 128, seed=1), lengths)
    _check(draw.normal(1, 4, 2, 128, seed=2), key, value, lengths, processors=16)


def test_more_rows_than_a_tile():
    lengths = torch.tensor([[100, 37]], dtype=torch.int32)
    key, value = draw.normal(1, 2, 128, 32), draw.normal(1, 2, 128, 32, seed=1)
    _check(draw.normal(1, 6, 50, 32, seed=2), key, value, lengths)


def test_more_queries_than_slots_see_nothing():
    lengths = torch.tensor([[3]], dtype=torch.int32)
    key, value = draw.normal(1, 1, 16, 32), draw.normal(1, 1, 16, 32, seed=1)
    _check(draw.normal(1, 1, 5, 32, seed=2), key, value, lengths)


def test_lengths_beyond_the_buffer_read_nothing_outside():
    query, buffer = draw.normal(1, 2, 1, 16), draw.normal(1, 1, 64, 16, seed=1)
    buffer[:, :, 40:] = float("nan")
    view = buffer[:, :, :40]
    with interpreted():
        out = ops.decode_attention(query, view, view, torch.tensor([[60]], dtype=torch.int32), causal=False)
    full = torch.tensor([[40]], dtype=torch.int32)
    torch.testing.assert_close(out, reference.decode_attention(query, view, view, full, causal=False))


def test_large_logits_do_not_overflow():
    lengths = torch.tensor([[70]], dtype=torch.int32)
    key = draw.normal(1, 1, 80, 64, dtype=torch.float16, scale=40.0)
    query = draw.normal(1, 2, 1, 64, dtype=torch.float16, scale=40.0, seed=1)
    _check(query, key, draw.normal(1, 1, 80, 64, dtype=torch.float16, seed=2), lengths, scale=1.0)


def test_expanded_inputs():
    lengths = torch.tensor([[20, 20], [9, 9]], dtype=torch.int32)[:, :1].expand(2, 2)
    key = draw.normal(1, 1, 32, 16).expand(2, 2, 32, 16)
    _check(draw.normal(1, 1, 1, 16, seed=1).expand(2, 4, 3, 16), key, key, lengths)


def test_unsupported_dtype_and_dim_are_named():
    lengths = torch.zeros(1, 1, dtype=torch.int32)
    with interpreted():
        x = torch.zeros(1, 1, 4, 16, dtype=torch.float64)
        with pytest.raises(TypeError, match=r"float32, got query of torch\.float64"):
            ops.decode_attention(x, x, x, lengths)
        x = torch.zeros(1, 1, 4, 513)
        with pytest.raises(ValueError, match="head dim of 1 to 512, got 513"):
            ops.decode_attention(x, x, x, lengths)
