"""What CompressedKVCache refuses, and that a refused call changes nothing."""

from __future__ import annotations

import pytest
import torch

from fastattn import ExpectedAttention, Knorm, Rotary, StreamingLLM
from tests.modules.test_kv_cache import HEADS, Failing, assert_same, feed, make, snapshot, tokens


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"budget": 0}, ValueError, "budget must be at least 1, got 0"),
        ({"budget": -3}, ValueError, "budget must be at least 1, got -3"),
        ({"budget": 2.0}, TypeError, "budget must be an integer, got float"),
        ({"budget": True}, TypeError, "budget must be an integer, got bool"),
        ({"budget": 3, "policy": "streaming_llm"}, ValueError, "budget must be at least the 4 tokens .* got 3"),
        ({"budget": 3, "policy": "expected_attention"}, ValueError, "budget must be at least the 4 tokens .* got 3"),
        ({"interval": 0}, ValueError, "interval must be at least 1, got 0"),
        ({"interval": "8"}, TypeError, "interval must be an integer, got str"),
        ({"max_step": 0}, ValueError, "max_step must be at least 1, got 0"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
        ({"num_layers": 0}, ValueError, "num_layers must be at least 1, got 0"),
        ({"policy": "h3o"}, ValueError, "one of .*expected_attention.*key_diff.*knorm.*streaming_llm.*got 'h3o'"),
        ({"policy": 3}, TypeError, "policy must be a Policy or one of .*, got int"),
        ({"policy": Knorm}, TypeError, "policy must be a Policy or one of .*, got the class Knorm"),
        ({"policy": "expected_attention", "rotary": None}, ValueError, "rotary must be given: ExpectedAttention"),
        ({"policy": StreamingLLM(rerotate=True), "rotary": None}, ValueError, "rotary must be given: StreamingLLM"),
        ({"rotary": torch.ones(4)}, TypeError, "rotary must be a Rotary, a list of them or None, got Tensor"),
        ({"rotary": [None]}, ValueError, "rotary must be one rotation, .* each of the 2 layers, got 1"),
        ({"rotary": [None, 3]}, TypeError, "rotary must be a Rotary, a list of them or None, got int"),
        ({"window": 0}, ValueError, "window must be at least 1, got 0"),
        ({"window": [4]}, ValueError, "window must be one number, .* each of the 2 layers, got 1"),
        ({"window": [4, 0]}, ValueError, r"window\[1\] must be at least 1, got 0"),
        ({"rotary": Rotary(torch.ones(5))}, ValueError, "within head_dim 8, got dims up to 10"),
        ({"latent_rank": 6}, ValueError, "num_kv_heads must be 1 for a latent cache, got 2"),
        ({"latent_rank": 9, "num_kv_heads": 1}, ValueError, "latent_rank must be at most head_dim 8, got 9"),
        ({"dtype": torch.int32}, TypeError, "dtype must be torch.float16, .* got torch.int32"),
        ({"dtype": "float16"}, TypeError, "dtype must be torch.float16, .* got 'float16'"),
        ({"dtype": torch.float8_e5m2}, TypeError, "dtype must be torch.float16, .* got torch.float8_e5m2"),
        ({"num_heads": 0}, ValueError, "num_heads must be at least 1, got 0"),
        ({"num_heads": "4"}, TypeError, "num_heads must be an integer, got str"),
        ({"num_heads": 3}, ValueError, "num_heads must be a multiple of num_kv_heads 2, got 3"),
    ],
)
def test_bad_construction(options, error, message):
    options = {"policy": "knorm", "budget": 16, **options}
    with pytest.raises(error, match=message):
        make(options.pop("policy"), options.pop("budget"), **options)


@pytest.mark.parametrize(("window", "error"), [(-1, ValueError), (2.5, TypeError)])
def test_the_query_window_of_a_policy_is_a_count(window, error):
    policy = Failing(at=0)
    policy.query_window = window
    with pytest.raises(error, match=r"policy\.query_window must be .* got"):
        make(policy)


def _bad_calls():
    q, k, v = tokens(3, batch=2)
    mask = torch.ones(2, 3, dtype=torch.bool)
    ids = torch.arange(3).expand(2, -1)
    return [
        ({"layer": 2}, ValueError, r"layer must be in 0..1, got 2"),
        ({"layer": -1}, ValueError, r"layer must be in 0..1, got -1"),
        ({"layer": 0.0}, TypeError, "layer must be an integer, got float"),
        ({"query": None}, TypeError, "query must be a tensor"),
        ({"query": q[0]}, ValueError, r"query must have shape \[B H T Dk\], got \[4, 3, 8\]"),
        ({"query": q[:1]}, ValueError, "query must have the cache's batch size 2, got 1"),
        ({"query": q[:, :3]}, ValueError, "query must have a multiple of key's 2 heads, got 3"),
        ({"query": q[..., :6]}, ValueError, "query must have the cache's head dim 8, got 6"),
        ({"query": q[:, :, :2]}, ValueError, "query must have size 3 in dim 2"),
        ({"query": q.double()}, TypeError, "query must have the cache's dtype torch.float32, got torch.float64"),
        ({"query": q.to("meta")}, ValueError, "query must be on the cache's device cpu, got meta"),
        ({"query": q.clone().requires_grad_()}, ValueError, "has no gradient, but query requires one"),
        ({"key": k.bfloat16()}, TypeError, "key must have the cache's dtype torch.float32, got torch.bfloat16"),
        ({"key": q}, ValueError, "key must have the cache's 2 key/value heads, got 4"),
        ({"key": torch.cat([k, k])}, ValueError, "key must have the cache's batch size 2, got 4"),
        ({"value": None}, TypeError, "value must be a tensor"),
        ({"value": v[..., :5]}, ValueError, "value must have the cache's head dim 8, got 5"),
        ({"value": v[:, :, :2]}, ValueError, "value must have size 3 in dim 2"),
        ({"attention_mask": mask.float()}, TypeError, "attention_mask must be bool or integers, .* got torch.float32"),
        ({"attention_mask": mask[:, :2]}, ValueError, r"attention_mask must have shape .* \[2, 3\], got \[2, 2\]"),
        ({"sinks": torch.zeros(3)}, ValueError, "sinks must have"),
        ({"softcap": 0.0}, ValueError, "softcap must be positive and finite, got 0.0"),
        ({"alibi_slopes": [1.0]}, TypeError, "alibi_slopes must be a tensor"),
        ({"position_ids": ids[:, :2]}, ValueError, r"position_ids must have shape .* \[2, 3\], got \[2, 2\]"),
        ({"position_ids": ids.float()}, TypeError, "position_ids must be integers, got torch.float32"),
        ({"position_ids": ids.flip(1)}, ValueError, "position_ids must rise .* got 2 then 1 in row 0"),
        (
            {"position_ids": ids.flip(1), "attention_mask": mask & (ids != 1)},
            ValueError,
            "rise .* got 2 then 0 in row 0",
        ),
        ({"position_ids": ids - 1}, ValueError, "position_ids must not be negative"),
        ({"position_ids": ids + 2**31 - 2}, ValueError, "position_ids must be at most 2147483647, got 2147483648"),
        ({"position_ids": ids}, ValueError, "position_ids must go on after the cached tokens, got 0 in row 0 after 1"),
        ({"scale": "1"}, TypeError, "scale must be a float or None, got str"),
        ({"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
    ]


@pytest.mark.parametrize(("changed", "error", "message"), _bad_calls())
@pytest.mark.parametrize("policy", ["knorm", "expected_attention"])
def test_bad_calls_change_nothing(policy, changed, error, message):
    cache = make(policy, batch_size=2)
    feed(cache, 20)
    state = snapshot(cache)
    q, k, v = tokens(3, batch=2)
    with pytest.raises(error, match=message):
        cache.attend(**{"layer": 0, "query": q, "key": k, "value": v, **changed})
    assert_same(cache, state)
    feed(cache, 3)


def test_one_row_of_positions_for_all_rows_is_compared_with_what_each_has():
    cache = make(batch_size=2)
    feed(cache, 5, attention_mask=torch.tensor([[False] * 3 + [True] * 2, [True] * 5]))
    with pytest.raises(ValueError, match="position_ids must go on after the cached tokens, got 3 in row 1 after 4"):
        feed(cache, 2, position_ids=torch.tensor([[3, 4]]))
    feed(cache, 2, position_ids=torch.tensor([[5, 6]]))
    assert cache.positions(0)[:, 0, :7].tolist() == [[0, 1, 5, 6, -1, -1, -1], [0, 1, 2, 3, 4, 5, 6]]


def test_query_heads_are_fixed_with_the_window():
    cache, (q, k, v) = make("expected_attention", num_heads=HEADS), tokens(3)
    with pytest.raises(ValueError, match="query must have the cache's 4 heads, got 2"):
        cache.attend(0, q[:, :2], k, v)


def test_a_latent_cache_refuses_a_value_and_wants_a_scale():
    cache, (q, k, v) = make(num_kv_heads=1, latent_rank=6), tokens(3)
    with pytest.raises(ValueError, match="value must be None for a latent cache"):
        cache.attend(0, q, k[:, :1], v[:, :1], scale=1.0)
    with pytest.raises(TypeError, match="scale must be given to a latent cache"):
        cache.attend(0, q, k[:, :1])


@pytest.mark.parametrize(
    ("tokens_back", "error", "message"),
    [(-1, ValueError, "at least 0"), (1.0, TypeError, "integer"), (3, ValueError, "at most 2")],
)
def test_crop_refuses_and_changes_nothing(tokens_back, error, message):
    cache = make()
    feed(cache, 30)  # compressed
    feed(cache, 1)
    feed(cache, 1)
    state = snapshot(cache)
    with pytest.raises(error, match=f"tokens must be .*{message}"):
        cache.crop(tokens_back)
    assert_same(cache, state)
    cache.crop(0)
    assert_same(cache, state)
    cache.crop(2)
    with pytest.raises(ValueError, match="at most 0"):
        cache.crop(1)


@pytest.mark.parametrize("method", ["reorder", "select"])
@pytest.mark.parametrize(
    ("index", "error"),
    [([0, 1], TypeError), (torch.tensor([0, 2]), ValueError), (torch.tensor([0.0, 1.0]), ValueError)],
)
def test_row_indices_are_checked(method, index, error):
    cache = make(batch_size=2)
    with pytest.raises(error, match="index must"):
        getattr(cache, method)(index)


def test_reorder_needs_a_row_for_every_row():
    with pytest.raises(ValueError, match=r"index must have shape \[2\], got \[1\]"):
        make(batch_size=2).reorder(torch.tensor([0]))


def test_repr_names_what_matters():
    text = repr(make(ExpectedAttention(query_window=7)))
    assert "query_window=7" in text
    assert "budget=16" in text
