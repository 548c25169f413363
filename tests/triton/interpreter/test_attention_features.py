"""attention's kernels with windows, sinks, soft caps, ALiBi and packed rows against the definition in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastattn import ops
from fastattn.ops import reference
from tests._helpers import draw
from tests._helpers.budget import assert_lse, assert_within_budget
from tests._helpers.features import cast, features
from tests._helpers.triton_run import assert_attention, examples, interpreted
from tests.ops.test_attention import largest_score
from tests.ops.test_attention_packed import bounds, int32
from tests.triton.interpreter.test_attention import calls


def check(query, key, value, family="sm_90", **options):
    wide = [query.double(), key.nan_to_num().double(), value.nan_to_num().double()]
    exact = reference.attention(*wide, return_lse=True, **cast(options, torch.float64))
    plain = reference.attention(query, key, value, return_lse=True, **cast(options, torch.float32))
    with interpreted(family):
        actual = ops.attention(query, key, value, return_lse=True, **options)
    assert_within_budget(actual[0], exact[0], plain[0], "out")
    largest = largest_score(query, key, options.get("scale")) + 8 * (options.get("sinks") is not None)
    assert_lse(actual[1], exact[1], query.dtype, largest + 100 * (options.get("alibi_slopes") is not None))
    assert actual[0].is_contiguous()
    assert actual[1].is_contiguous()
    check_gradients(query, key, value, family, options)


def check_gradients(query, key, value, family, options):
    grad_out = draw.normal(*query.shape[:3], value.shape[3], dtype=query.dtype, seed=7)
    sinks = options.get("sinks")

    def gradients(function, tensors, grad, options):
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        if sinks is not None:
            leaves.append(options["sinks"].detach().clone().requires_grad_())
            options = options | {"sinks": leaves[3]}
        return torch.autograd.grad(function(*leaves[:3], **options), leaves, grad)

    clean = [query, key.nan_to_num(), value.nan_to_num()]
    exact = gradients(reference.attention, [x.double() for x in clean], grad_out.double(), cast(options, torch.float64))
    plain = gradients(reference.attention, clean, grad_out, cast(options, torch.float32))
    with interpreted(family):
        actual = gradients(ops.attention, (query, key, value), grad_out, options)
    terms = max(largest_score(grad_out, clean[2], 1.0), 1e-3)
    for name, one, two, three in zip(("query", "key", "value"), actual, exact, plain, strict=False):
        assert_within_budget(one, two, three, f"gradient of {name}", cancelling=terms)
    if sinks is not None:
        unit = torch.finfo(query.dtype).eps + torch.finfo(sinks.dtype).eps
        allowed = 8 * unit * max(terms, 1.0) * query.shape[0] * max(1, query.shape[2])
        assert (actual[3].double() - exact[3]).abs().max() <= allowed


def in_float32(options):
    """Features that the interpreter computes right: no bfloat16."""
    return cast(options, torch.float32)


@examples(12)
@given(calls(tokens=60, dtypes=(torch.float32,)), st.data())
def test_any_shape_layout_and_raggedness(call, data):
    extra = data.draw(features(call["query"].shape[1]))
    check(**call, **in_float32(extra))


@examples(8)
@given(st.data())
def test_packed_rows(data):
    rows = data.draw(st.integers(1, 4))
    lengths = st.lists(draw.sizes(40, 0), min_size=rows, max_size=rows)
    cu_q, cu_k = bounds(data.draw(lengths)), bounds(data.draw(lengths))
    kv_heads, group = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([1, 3]))
    dims = data.draw(st.sampled_from([(16, 16), (24, 8), (96, 32)]))
    layout = data.draw(draw.layouts)
    query = draw.strided(draw.normal(1, kv_heads * group, cu_q[-1], dims[0], seed=1), layout)
    key = draw.strided(draw.normal(1, kv_heads, cu_k[-1], dims[0], seed=2), layout)
    value = draw.normal(1, kv_heads, cu_k[-1], dims[1], seed=3)
    options = in_float32(data.draw(features(kv_heads * group))) | {"causal": data.draw(st.booleans())}
    check(query, key, value, cu_seqlens_q=int32(cu_q), cu_seqlens_k=int32(cu_k), **options)


@pytest.mark.parametrize(("window", "queries", "keys"), [(1, 70, 70), (32, 100, 100), (33, 1, 100), (65, 100, 33)])
def test_windows_at_the_edges_of_tiles(window, queries, keys):
    x = draw.normal(1, 2, 100, 16)
    for causal in (False, True):
        check(x[:, :, :queries], x[:, :1, :keys], x[:, 1:, :keys], causal=causal, window=window)


@pytest.mark.parametrize("softcap", [0.01, 1.0, 50.0])
def test_soft_caps_far_above_and_below_the_scores(softcap):
    query, key, value = (draw.normal(1, 2, 40, 64, seed=seed, scale=2.0) for seed in range(3))
    check(query, key, value, causal=True, softcap=softcap)


def test_half_precision_with_everything():
    query, key, value = (draw.normal(1, heads, 70, 128, dtype=torch.float16, seed=heads) for heads in (4, 2, 1))
    value = value.expand(-1, 2, -1, -1)
    options = {"sinks": torch.tensor([0.0, 3.0, -3.0, 1.0]), "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])}
    wide = [t.double() for t in (query, key, value)]
    options |= {"causal": True, "window": 40, "softcap": 5.0}
    exact = reference.attention(*wide, return_lse=True, **cast(options, torch.float64))
    with interpreted():
        actual = ops.attention(query, key, value, return_lse=True, **options)
    assert_attention(actual, exact, reference.attention(query, key, value, return_lse=True, **options))
