"""latent_decode's kernels against the definition in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastattn import ops
from fastattn.ops import reference
from tests._helpers import draw
from tests._helpers.triton_run import DTYPES, MOST_TOKENS, assert_attention, examples, interpreted


def _check(query_latent, query_rope, cache, lengths, *, causal=True, scale=0.1, processors=4, family="sm_90"):
    parts = query_latent, query_rope, cache
    exact = reference.latent_decode(*(x.double() for x in parts), lengths, scale=scale, causal=causal, return_lse=True)
    plain = reference.latent_decode(*parts, lengths, scale=scale, causal=causal, return_lse=True)
    with interpreted(family, processors):
        actual = ops.latent_decode(*parts, lengths, scale=scale, causal=causal, return_lse=True)
    assert_attention(actual, exact, plain)


def _tensors(batch, heads, tokens, capacity, rank, rope, lengths, dtype, seed=0):
    query_latent = draw.normal(batch, heads, tokens, rank, dtype=dtype, seed=seed)
    query_rope = draw.normal(batch, heads, tokens, rope, dtype=dtype, seed=seed + 1)
    cache = draw.normal(batch, capacity, rank + rope, dtype=dtype, seed=seed + 2)
    return query_latent, query_rope, draw.poison_slots_(cache, lengths)


@st.composite
def _calls(drawer):
    batch = drawer(st.integers(1, 2))
    heads = drawer(st.sampled_from([1, 3, 8, 16, 20]))
    tokens = drawer(st.integers(1, 4))
    capacity = drawer(draw.sizes(MOST_TOKENS))
    rank, rope = drawer(st.sampled_from([(64, 16), (48, 8), (32, 0), (96, 24)]))
    lengths = drawer(draw.lengths((batch,), capacity))
    dtype = drawer(st.sampled_from(DTYPES))
    tensors = _tensors(batch, heads, tokens, capacity, rank, rope, lengths, dtype, drawer(draw.seeds))
    query_latent, query_rope, cache = (draw.strided(x, drawer(draw.layouts)) for x in tensors)
    return {
        "query_latent": query_latent,
        "query_rope": query_rope,
        "cache": cache,
        "lengths": lengths,
        "causal": drawer(st.booleans()),
        "processors": drawer(st.sampled_from([1, 8, 32])),
    }


@examples(20)
@given(_calls())
def test_any_shape_layout_and_length(call):
    _check(**call)


@pytest.mark.parametrize(("rank", "rope"), [(512, 64), (448, 128), (256, 64)])
@pytest.mark.parametrize("family", ["sm_86", "sm_90"])
def test_usual_ranks(rank, rope, family):
    lengths = torch.tensor([65, 0], dtype=torch.int32)
    _check(*_tensors(2, 16, 1, 80, rank, rope, lengths, torch.float16), lengths, family=family)


@pytest.mark.parametrize("length", [0, 1, 2, 31, 32, 33, 63, 64, 65])
def test_block_edges_and_more_queries_than_slots(length):
    lengths = torch.tensor([length], dtype=torch.int32)
    _check(*_tensors(1, 4, 4, 96, 64, 16, lengths, torch.float32), lengths, processors=8)


def test_many_heads_take_several_row_tiles():
    lengths = torch.tensor([70], dtype=torch.int32)
    _check(*_tensors(1, 128, 2, 70, 64, 16, lengths, torch.float32), lengths)


def test_unsupported_rank_is_named():
    lengths = torch.zeros(1, dtype=torch.int32)
    with interpreted():
        tensors = _tensors(1, 1, 1, 4, 513, 8, lengths, torch.float32)
        with pytest.raises(ValueError, match="rank of 1 to 512, got 513"):
            ops.latent_decode(*tensors, lengths, scale=1.0)
        tensors = _tensors(1, 1, 1, 4, 16, 129, lengths, torch.float32)
        with pytest.raises(ValueError, match="rope dims of 0 to 128, got 129"):
            ops.latent_decode(*tensors, lengths, scale=1.0)
