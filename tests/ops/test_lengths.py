"""Lengths and offsets outside of a buffer are refused where values may be looked at, before anything is written."""

from __future__ import annotations

import pytest
import torch

from fastattn import CompressedKVCache, ops

pytestmark = pytest.mark.cpu_only
B, H, HKV, C, D = 2, 4, 2, 8, 16


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    return draw(B, H, 1, D), draw(B, HKV, C, D), torch.arange(C, dtype=torch.int32).expand(B, HKV, C).contiguous()


def lengths_with(value, where):
    lengths = torch.full((B, HKV), 5, dtype=torch.int32)
    lengths[where] = value
    return lengths


def codes(tensor, storage="int8"):
    return ops.quantize(tensor, storage)


def decode_codes(query, key, positions, lengths):
    (code, scale) = codes(key)
    return ops.decode_attention(query, code, code, lengths, key_scale=scale, value_scale=scale)


def append_codes(query, key, positions, lengths):
    (code, scale) = codes(key)
    one = torch.ones(B, 1, dtype=torch.int32)
    ops.cache_append_(
        code, code.clone(), positions, lengths, key[:, :, :1], key[:, :, :1], one, key_scale=scale,
        value_scale=scale.clone(),
    )  # fmt: skip


def compact_codes(query, key, positions, lengths):
    (code, scale) = codes(key)
    rated = torch.randn(B, HKV, C)
    ops.cache_compact_(
        code, code.clone(), positions, lengths, rated, 3, key_scale=scale, value_scale=scale.clone()
    )  # fmt: skip


OPERATORS = {
    "decode_attention": lambda q, k, p, n: ops.decode_attention(q, k, k, n),
    "decode_attention, many queries": lambda q, k, p, n: ops.decode_attention(q.expand(-1, -1, 20, -1), k, k, n),
    "decode_attention with a window": lambda q, k, p, n: ops.decode_attention(q, k, k, n, window=3),
    "decode_attention over codes": decode_codes,
    "latent_decode": lambda q, k, p, n: ops.latent_decode(q[..., :12], q[..., 12:], k[:, 0], n[:, 0], scale=1.0),
    "attention": lambda q, k, p, n: ops.attention(q, k, k, lengths=n[:, 0].contiguous()),
    "score_knorm": lambda q, k, p, n: ops.score_knorm(k, n),
    "score_key_diff": lambda q, k, p, n: ops.score_key_diff(k, n),
    "score_expected_attention": lambda q, k, p, n: ops.score_expected_attention(
        k, k, n, p, query_mean=q[:, :, 0], scale=1.0
    ),
    "attention_mass": lambda q, k, p, n: ops.attention_mass(
        k, n, p, q, torch.full((B, 1), 7, dtype=torch.int32), scale=1.0
    ),
    "cache_append_": lambda q, k, p, n: ops.cache_append_(
        k, k.clone(), p, n, k[:, :, :1], k[:, :, :1], torch.ones(B, 1, dtype=torch.int32)
    ),
    "cache_append_ of codes": append_codes,
    "cache_compact_": lambda q, k, p, n: ops.cache_compact_(k, k.clone(), p, n, torch.randn(B, HKV, C), 3),
    "cache_compact_ of codes": compact_codes,
}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("value", [-1, C + 1, -(2**31), 2**31 - 1])
@pytest.mark.parametrize("where", [(0, 0), (1, 0)], ids=["first row", "last row"])
def test_lengths_outside_of_the_buffer_are_refused(name, value, where):
    query, key, positions = tensors()
    before = (key.clone(), positions.clone())
    lengths = lengths_with(value, where)
    with pytest.raises(
        ValueError, match=r"lengths must lie within the buffer's 8 slots, got|key must fit the cache's 8"
    ):
        OPERATORS[name](query, key, positions, lengths)
    assert torch.equal(key, before[0])
    assert torch.equal(positions, before[1])
    assert torch.equal(lengths, lengths_with(value, where))


@pytest.mark.parametrize("name", OPERATORS)
def test_the_same_calls_pass_with_lengths_within(name):
    """So that the test above fails for no other reason."""
    for value in (0, 5, C - 1):
        query, key, positions = tensors()
        OPERATORS[name](query, key, positions, lengths_with(value, (1, 0)))


@pytest.mark.parametrize("value", [-1, C + 1])
def test_a_start_outside_of_the_keys_is_refused(value):
    query, key, _ = tensors()
    start = torch.tensor([0, value], dtype=torch.int32)
    with pytest.raises(ValueError, match=f"key_start must lie within the buffer's 8 slots, got {value}"):
        ops.attention(query, key, key, key_start=start)


@pytest.mark.parametrize("value", [-1, 21])
def test_a_state_with_lengths_outside_of_the_buffers_is_not_loaded(value):
    cache = CompressedKVCache("knorm", 16, num_layers=2, num_kv_heads=2, head_dim=8, interval=4)
    state = {name: tensor.clone() for name, tensor in cache.state_dict().items()}
    state["layers.1.lengths"][0, 1] = value
    with pytest.raises(ValueError, match=rf"state_dict must hold layers\.1\.lengths within the 20 slots.*got {value}"):
        cache.load_state_dict(state)
    assert cache.lengths(1).tolist() == [[0, 0]]
