"""What torch.compile hands to Inductor for each operator on a GPU: which kernels, and no copy of a cache."""

from __future__ import annotations

import pytest
import torch

from fastattn import ops
from tests._helpers.triton_graph import capture

pytestmark = pytest.mark.compile

BATCH, HEADS, KV_HEADS, SLOTS, DIM = 2, 4, 2, 4096, 64


def _query(tokens=1, dim=DIM):
    return torch.zeros(BATCH, HEADS, tokens, dim)


def _cache(slots=SLOTS, dim=DIM):
    return torch.zeros(BATCH, KV_HEADS, slots, dim)


def _lengths():
    return torch.full((BATCH, KV_HEADS), 40, dtype=torch.int32)


def _positions():
    return torch.zeros(BATCH, KV_HEADS, SLOTS, dtype=torch.int32)


def _state():
    return _cache(), _cache(), _positions(), _lengths()


def _codes(storage, slots=SLOTS, dim=DIM, heads=KV_HEADS):
    codes, scale = ops.quantize(torch.zeros(BATCH, heads, 1, dim), storage)
    return codes.repeat(1, 1, slots, 1), scale.repeat(1, 1, slots, *[1] * (scale.dim() - 3))


def _decode_codes(q, k, ks, n):
    return ops.decode_attention(q, k, k, n, key_scale=ks, value_scale=ks)


INFERENCE = {
    **{
        f"decode_attention, {storage}": (
            _decode_codes,
            lambda storage=storage: (_query(), *_codes(storage), _lengths()),
            ["codes_kernel", "combine_kernel"],
        )
        for storage in ("int8", "fp8", "int4")
    },
    "latent_decode, fp8": (
        lambda q, r, c, s, n: ops.latent_decode(q, r, c[:, 0], n, scale=0.1, cache_scale=s[:, 0]),
        lambda: (_query(), _query(dim=16), *_codes("fp8", dim=DIM + 16, heads=1), torch.full((BATCH,), 40).int()),
        ["codes_kernel", "combine_kernel"],
    ),
    "attention": (
        lambda q, k, v, n: ops.attention(q, k, v, causal=True, key_start=n, lengths=n),
        lambda: (_query(30), _cache(30), _cache(30), torch.zeros(BATCH, dtype=torch.int32)),
        ["attention_kernel"],
    ),
    "decode_attention, split": (
        lambda q, k, v, n: ops.decode_attention(q, k, v, n),
        lambda: (_query(), _cache(), _cache(), _lengths()),
        ["decode_kernel", "combine_kernel"],
    ),
    "decode_attention, one split": (
        lambda q, k, v, n: ops.decode_attention(q, k, v, n),
        lambda: (_query(), _cache(32), _cache(32), _lengths()),
        ["decode_kernel"],
    ),
    "latent_decode": (
        lambda q, r, c, n: ops.latent_decode(q, r, c, n, scale=0.1),
        lambda: (_query(), _query(dim=16), torch.zeros(BATCH, SLOTS, DIM + 16), torch.full((BATCH,), 40).int()),
        ["latent_kernel", "combine_kernel"],
    ),
    "merge_attention": (
        lambda a, b, m, n: ops.merge_attention([a, b], [m, n]),
        lambda: (_query(), _query(), torch.zeros(BATCH, HEADS, 1), torch.zeros(BATCH, HEADS, 1)),
        ["merge_kernel"],
    ),
    "qk_scores": (lambda q, k: ops.qk_scores(q, k), lambda: (_query(3), _cache()), ["qk_kernel"]),
    "score_knorm": (lambda k, n: ops.score_knorm(k, n), lambda: (_cache(), _lengths()), ["knorm_kernel"]),
    "score_key_diff": (
        lambda k, n: ops.score_key_diff(k, n),
        lambda: (_cache(), _lengths()),
        ["key_diff_anchor_kernel", "key_diff_kernel"],
    ),
    "score_expected_attention, mean": (
        lambda k, v, n, p, m: ops.score_expected_attention(k, v, n, p, m, scale=0.1),
        lambda: (_cache(), _cache(), _lengths(), _positions(), torch.zeros(BATCH, HEADS, DIM)),
        ["logits_kernel", "softmax_kernel", "score_kernel"],
    ),
    "score_expected_attention, moments": (
        lambda k, v, n, p, m, c: ops.score_expected_attention(k, v, n, p, m, c, scale=0.1, epsilon=0.02),
        lambda: (
            *(_cache(), _cache(), _lengths(), _positions()),
            *(torch.zeros(BATCH, HEADS, DIM), torch.zeros(BATCH, HEADS, DIM, DIM)),
        ),
        ["logits_kernel", "softmax_kernel", "score_kernel"],
    ),
    "score_expected_attention, samples": (
        lambda k, v, n, p, s: ops.score_expected_attention(k, v, n, p, query_samples=s, scale=0.1, min_length=30),
        lambda: (_cache(), _cache(), _lengths(), _positions(), torch.zeros(BATCH, HEADS, 16, DIM)),
        ["logits_kernel", "softmax_kernel", "score_kernel"],
    ),
    "attention_mass, one query": (
        lambda k, n, p, q, at: ops.attention_mass(k, n, p, q, at, scale=0.1, min_length=30),
        lambda: (_cache(), _lengths(), _positions(), _query(), torch.zeros(BATCH, 1, dtype=torch.int32)),
        ["logits_kernel", "softmax_kernel", "score_kernel"],
    ),
    "query_moments": (lambda q: ops.query_moments(q), lambda: (_query(30),), ["sum_kernel", "covariance_kernel"]),
}
IN_PLACE = {
    "cache_append_": (
        lambda k, v, p, n, new, at: ops.cache_append_(k, v, p, n, new, new, at),
        lambda: (*_state(), _cache(1), torch.zeros(BATCH, 1, dtype=torch.int32)),
        ["append_kernel"],
    ),
    **{
        f"cache_append_, {storage}": (
            lambda k, s, v, t, p, n, new, at: ops.cache_append_(k, v, p, n, new, new, at, key_scale=s, value_scale=t),
            lambda storage=storage: (
                *_codes(storage),
                *_codes(storage),
                _positions(),
                _lengths(),
                _cache(1),
                torch.zeros(BATCH, 1).int(),
            ),
            ["append_codes_kernel"],
        )
        for storage in ("int8", "int4")
    },
    "cache_compact_, int4": (
        lambda k, s, v, t, p, n, score: ops.cache_compact_(
            k, v, p, n, score, 20, min_length=30, key_scale=s, value_scale=t
        ),
        lambda: (*_codes("int4"), *_codes("int4"), _positions(), _lengths(), torch.zeros(BATCH, KV_HEADS, SLOTS)),
        ["select_kernel", "move_kernel", "move_kernel"],
    ),
    "cache_compact_": (
        lambda k, v, p, n, s: ops.cache_compact_(k, v, p, n, s, 20, min_length=30),
        lambda: (*_state(), torch.zeros(BATCH, KV_HEADS, SLOTS)),
        ["select_kernel", "move_kernel"],
    ),
}


@pytest.mark.parametrize("name", [*INFERENCE, *IN_PLACE])
def test_kernels_of_one_call_and_no_copy(name):
    function, arguments, kernels = {**INFERENCE, **IN_PLACE}[name]
    with torch.no_grad():
        captured = capture(function, *arguments())
    assert len(captured.graphs) == 1
    assert captured.kernels() == kernels
    assert captured.clones() == []


@pytest.mark.parametrize("name", [*INFERENCE, *IN_PLACE])
def test_symbolic_sizes_trace_into_one_graph(name):
    function, arguments, kernels = {**INFERENCE, **IN_PLACE}[name]
    with torch.no_grad():
        captured = capture(function, *arguments(), dynamic=True)
    assert len(captured.graphs) == 1
    assert captured.kernels() == kernels
    assert captured.clones() == []


def test_a_decoding_step_attends_appends_and_compacts_without_copying_the_cache():
    def step(query, new, at, key, value, positions, lengths):
        out, lse = ops.decode_attention(query, key, value, lengths, return_lse=True, causal=False)
        own, own_lse = ops.attention(query, new, new, causal=True, return_lse=True)
        out, _ = ops.merge_attention([out, own], [lse, own_lse])
        ops.cache_append_(key, value, positions, lengths, new, new, at)
        scores = ops.score_knorm(key, lengths, min_length=100)
        ops.cache_compact_(key, value, positions, lengths, scores, 64, min_length=100)
        return out

    at = torch.zeros(BATCH, 1, dtype=torch.int32)
    with torch.no_grad():
        captured = capture(step, _query(), _cache(1), at, *_state())
    assert captured.kernels() == [
        "decode_kernel",
        "combine_kernel",
        "attention_kernel",
        "merge_kernel",
        "append_kernel",
        "knorm_kernel",
        "select_kernel",
        "move_kernel",
    ]
    assert captured.clones() == []


@pytest.mark.parametrize("bounded", [False, True])
def test_attention_backward(bounded):
    bounds = torch.full((BATCH,), 20, dtype=torch.int32) if bounded else None
    tensors = [x.requires_grad_() for x in (_query(30), _cache(30), _cache(30))]
    captured = capture(lambda q, k, v: ops.attention(q, k, v, causal=True, lengths=bounds), *tensors, backward=True)
    assert captured.kernels(0) == ["attention_kernel"]
    assert captured.kernels(1) == ["delta_kernel", "grad_key_value_kernel", "grad_query_kernel"]
    assert captured.clones(0) == []
    assert captured.clones(1) == []


def test_a_copy_is_noticed():
    def wasteful(key, value, positions, lengths, new, at):
        key = key.clone()
        ops.cache_append_(key, value, positions, lengths, new, new, at)
        return key

    _, arguments, _ = IN_PLACE["cache_append_"]
    with torch.no_grad():
        captured = capture(wasteful, *arguments())
    assert captured.clones() == ["aten.clone"]
