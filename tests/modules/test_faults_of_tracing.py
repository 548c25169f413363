"""Faults under fake tensors, on the meta device, and where a derivative is asked for that is not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad

from fastattn import CompressedKVCache, LowRankAttention, Rotary, ops
from tests._helpers import draw

CALLS = (5, 1, 40, 1, 3)


def small(**options: Any) -> LowRankAttention:
    sizes = {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
    return LowRankAttention(32, 4, **{**sizes, **options}).eval()


@pytest.mark.parametrize("policy", ["knorm", "expected_attention", "h2o", "tova"])
@pytest.mark.parametrize("storage", [None, "int8"])
def test_a_cache_of_fake_tensors_tells_shapes(policy: str, storage: str | None) -> None:
    with FakeTensorMode():
        rotary = Rotary(torch.ones(8))
        sizes = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 16, "num_heads": 4, "interval": 4}
        cache = CompressedKVCache(policy, 16, rotary=rotary, storage=storage, **sizes)
        for tokens in CALLS:
            mask = torch.ones(1, tokens, dtype=torch.bool)
            positions = cache.tokens_seen[:, None] + torch.arange(tokens)
            query, key = torch.randn(1, 4, tokens, 16), torch.randn(1, 2, tokens, 16)
            out = cache.attend(0, query, key, key, position_ids=positions, attention_mask=mask)
            assert isinstance(out, FakeTensor)
            assert out.shape == query.shape
    real = draw.normal(1, 2, 6, 16)  # nothing that was made there is left for others
    for kept in ("int8", "int4") if storage else ():
        assert type(ops.quantize(draw.normal(1, 2, 6, 32), kept)[0]) is Tensor
    assert type(ops.attention(real, real, real)) is Tensor


@pytest.mark.parametrize("absorb", [None, True, False])
def test_low_rank_attention_of_fake_tensors_tells_shapes(absorb: bool | None) -> None:
    with FakeTensorMode(), torch.no_grad():
        module = small()
        cache = module.make_cache("knorm", 16)
        for tokens in CALLS:
            assert module(torch.randn(1, tokens, 32), cache=cache, absorb=absorb).shape == (1, tokens, 32)
        assert module(torch.randn(2, 9, 32), attention_mask=torch.ones(2, 9, dtype=torch.bool)).shape == (2, 9, 32)


def test_low_rank_attention_on_the_meta_device_tells_shapes() -> None:
    with torch.device("meta"), torch.no_grad():
        module = small()
        cache = module.make_cache("key_diff", 16, device="meta")
        for tokens in CALLS:
            out = module(torch.randn(1, tokens, 32), cache=cache)
            assert (out.shape, out.device.type) == ((1, tokens, 32), "meta")
    module.to_empty(device="cpu").reset_parameters()
    assert torch.equal(module.inv_freq, small().inv_freq)


def cases() -> dict[str, tuple[Any, Tensor]]:
    """Operator -> a function of one tensor of it, and the tensor."""
    query, key, lengths = draw.normal(1, 4, 5, 16), draw.normal(1, 2, 9, 16), torch.full((1, 2), 9, dtype=torch.int32)
    positions = torch.arange(9, dtype=torch.int32).expand(1, 2, -1).contiguous()
    out, lse = ops.attention(query, key[:, :, :5], key[:, :, :5], return_lse=True)
    step, latent = query[:, :, :1], draw.normal(1, 9, 20)
    at = torch.tensor([[7, 8]], dtype=torch.int32)
    query_at = torch.arange(5, dtype=torch.int32)[None]

    def cache() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return key.clone(), key.clone(), positions.clone(), lengths - 2

    return {
        "attention": (lambda x: ops.attention(x, key, key), query),
        "decode_attention": (lambda x: ops.decode_attention(step, key, x, lengths), key),
        "latent_decode": (lambda x: ops.latent_decode(step, x, latent, lengths[:, 0], scale=1.0), step[..., :4]),
        "merge_attention": (lambda x: ops.merge_attention([out, out], [x, lse])[0], lse),
        "qk_scores": (lambda x: ops.qk_scores(query, x), key),
        "score_knorm": (lambda x: ops.score_knorm(x, lengths), key),
        "score_key_diff": (lambda x: ops.score_key_diff(x, lengths), key),
        "score_expected_attention": (
            lambda x: ops.score_expected_attention(key, x, lengths, positions, query[:, :, 0], scale=1.0),
            key,
        ),
        "query_moments": (lambda x: ops.query_moments(x)[0], query),
        "attention_mass": (lambda x: ops.attention_mass(x, lengths, positions, query, query_at, scale=1.0), key),
        "quantize": (lambda x: ops.quantize(x, "int8")[1], key),
        "cache_append_": (lambda x: ops.cache_append_(*cache(), x, x, at), key[:, :, :2]),
        "cache_compact_": (lambda x: ops.cache_compact_(x, *cache()[1:], key[..., 0].contiguous(), 4), key),
    }


@pytest.mark.parametrize("name", cases())
def test_forward_mode_derivatives_are_refused_by_name(name: str) -> None:
    function, x = cases()[name]
    function(x.clone())
    with pytest.raises(RuntimeError, match=f"{name} has no forward-mode derivative"):
        torch.func.jvp(function, (x,), (torch.ones_like(x),))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=f"{name} has no forward-mode derivative"):
        function(forward_ad.make_dual(x, torch.ones_like(x)))


def test_every_operator_is_asked_for_a_forward_mode_derivative() -> None:
    differentiable = {"dequantize"}  # it is made of PyTorch's own operators
    assert set(cases()) | differentiable == {name for name in ops.__all__ if callable(getattr(ops, name, None))} - {
        "reference"
    }


@pytest.mark.parametrize("kind", ["cache", "module"])
def test_forward_mode_through_a_cache_is_refused_and_nothing_is_written(kind: str) -> None:
    module = small()
    own = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 16}
    cache = CompressedKVCache("knorm", 16, **own) if kind == "cache" else module.make_cache("knorm", 16)
    hidden, key = draw.normal(1, 3, 32), draw.normal(1, 2, 3, 16)

    def call(x: Tensor) -> None:
        if kind == "cache":
            cache.attend(0, key, x, key)
        else:
            module(x, cache=cache)

    x = key if kind == "cache" else hidden
    with torch.no_grad(), forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward-mode derivative"):
        call(forward_ad.make_dual(x, x))
    assert cache.tokens_seen.tolist() == [0]
    with torch.no_grad():
        call(x)
    assert cache.tokens_seen.tolist() == [3]
