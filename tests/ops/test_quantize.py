"""Quantised storage: formats, and attention over codes, against their definitions in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastattn import ops
from fastattn.ops import reference
from tests._helpers import draw, plain
from tests._helpers.budget import assert_lse, assert_within_budget
from tests._helpers.native import without_native

STORAGES = ("int8", "fp8", "int4")


@draw.cases(30)
@given(st.sampled_from(STORAGES), draw.dtypes, st.sampled_from([32, 64, 96, 576]), draw.layouts, draw.seeds)
def test_codes_and_scales_equal_the_definition(
    storage: str, dtype: torch.dtype, dim: int, layout: str, seed: int
) -> None:
    vectors = draw.strided(draw.normal(2, 3, 5, dim, dtype=dtype, seed=seed), layout)
    vectors[0, 0, 1] = 0.0
    codes, scale = ops.quantize(vectors, storage)
    expected, expected_scale = reference.quantize(vectors, storage)
    assert codes.shape == expected.shape
    assert scale.shape == expected_scale.shape
    torch.testing.assert_close(scale, expected_scale, rtol=2e-3 if storage == "int4" else 1e-6, atol=1e-7)
    # A number halfway between two codes may go either way where the transform rounds differently.
    if storage != "int4":
        assert torch.equal(codes, expected)
    found = ops.dequantize(codes, scale, torch.float64)
    torch.testing.assert_close(found, reference.dequantize(codes, scale, torch.float64), rtol=1e-12, atol=1e-12)
    assert not found[0, 0, 1].any()
    largest = vectors.double().abs().amax(-1)
    step = {"int8": largest / 254, "fp8": largest / 28, "int4": largest * 0}[storage]
    if storage == "int4":  # a code off is at most the scale, of groups that the transform has mixed
        step = scale.double().abs().amax(-1) * dim**0.5
    error = (found - vectors.double()).abs().amax(-1)
    assert (error <= 1.01 * step + 1e-12).all()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_poisons_its_vector_only(storage: str, bad: float) -> None:
    vectors = draw.normal(3, 64, seed=1)
    vectors[1, 5] = bad
    found = ops.dequantize(*ops.quantize(vectors, storage))
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_bit_pattern_of_e4m3_is_read_exactly(dtype: torch.dtype) -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    expected = bits.view(torch.float8_e4m3fn).to(dtype)
    for codes in (bits, bits.view(torch.float8_e4m3fn)):
        found = ops.dequantize(codes, torch.ones(()), dtype)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@st.composite
def calls(draw_: Any) -> dict[str, Any]:
    """Quantised caches with equal or ragged lengths, scales of unused slots NaN."""
    batch, kv_heads, groups = draw_(st.integers(1, 2)), draw_(st.integers(1, 3)), draw_(st.sampled_from([1, 3, 4, 12]))
    queries, capacity = draw_(st.sampled_from([1, 1, 2, 5, 17])), draw_(draw.sizes(200, 1))
    storage = draw_(st.sampled_from(STORAGES))
    dims = [(32, 64), (96, 32), (64, 64)] + ([] if storage == "int4" else [(7, 5), (24, 40)])
    dim, value_dim = draw_(st.sampled_from(dims))
    return {
        "storage": storage,
        "shape": (batch, kv_heads, groups, queries, capacity, dim, value_dim),
        "dtype": draw_(draw.dtypes),
        "seed": draw_(draw.seeds),
        "lengths": draw_(draw.lengths((batch, kv_heads), capacity)),
        "options": {"causal": draw_(st.booleans()), "scale": draw_(st.sampled_from([None, 0.3]))},
    }


def poisoned(codes: Tensor, scale: Tensor, lengths: Tensor) -> Tensor:
    """The scales, NaN beyond the lengths."""
    slot = torch.arange(codes.shape[2])
    beyond = slot >= lengths[..., None]
    return scale.masked_fill(beyond if scale.dim() == 3 else beyond[..., None], float("nan"))


def check(call: dict[str, Any]) -> None:
    batch, kv_heads, groups, queries, capacity, dim, value_dim = call["shape"]
    dtype, seed, lengths, options = call["dtype"], call["seed"], call["lengths"], call["options"]
    query = draw.normal(batch, kv_heads * groups, queries, dim, dtype=dtype, seed=seed)
    key, key_scale = ops.quantize(draw.normal(batch, kv_heads, capacity, dim, seed=seed + 1), call["storage"])
    value, value_scale = ops.quantize(draw.normal(batch, kv_heads, capacity, value_dim, seed=seed + 2), call["storage"])
    exact_key, exact_value = (
        reference.dequantize(codes, scale, torch.float64) for codes, scale in ((key, key_scale), (value, value_scale))
    )
    scales = {
        "key_scale": poisoned(key, key_scale, lengths),
        "value_scale": poisoned(value, value_scale, lengths),
    }
    exact, exact_lse = reference.decode_attention(
        query.double(), exact_key, exact_value, lengths, return_lse=True, **options
    )
    out, lse = ops.decode_attention(query, key, value, lengths, return_lse=True, **scales, **options)
    scale = dim**-0.5 if options["scale"] is None else options["scale"]
    visible = plain.visible_in_cache(queries, capacity, lengths, options["causal"], groups)
    ways = plain.attention_in_three_ways(query.to(dtype), exact_key.to(dtype), exact_value.to(dtype), visible, scale)
    assert_within_budget(out, exact, [way for way, _ in ways], "out")
    largest = scale * query.double().norm(dim=-1).max().item() * exact_key.norm(dim=-1).max().item()
    assert_lse(lse, exact_lse, dtype, largest, rounding=1e-5 if dtype != torch.float64 else 1e-12)


@draw.cases(60)
@given(calls())
def test_attention_over_codes_equals_the_definition(call: dict[str, Any]) -> None:
    check(call)


@draw.cases(20)
@given(calls())
def test_without_native_kernels(call: dict[str, Any]) -> None:
    with without_native():
        check(call)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(("rank", "rope"), [(64, 32), (96, 32), (128, 64)])
def test_latents(storage: str, rank: int, rope: int) -> None:
    """Blocks of the transform may cross from the latent into the rope key: 96 + 32 is one of 128."""
    query = draw.normal(2, 12, 3, rank + rope, seed=1)
    codes, scale = ops.quantize(draw.normal(2, 70, rank + rope, seed=2), storage)
    lengths = torch.tensor([70, 9], dtype=torch.int32)
    arguments = (query[..., :rank], query[..., rank:])
    cache = reference.dequantize(codes, scale, torch.float64)
    exact = reference.latent_decode(*(a.double() for a in arguments), cache, lengths, scale=0.1)
    out = ops.latent_decode(*arguments, codes, lengths, scale=0.1, cache_scale=scale)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("storage", STORAGES)
def test_windows_caps_sinks_slopes_and_positions(storage: str) -> None:
    query = draw.normal(1, 4, 2, 64, seed=1)
    key, key_scale = ops.quantize(draw.normal(1, 2, 150, 64, seed=2), storage)
    value, value_scale = ops.quantize(draw.normal(1, 2, 150, 64, seed=3), storage)
    lengths = torch.tensor([[150, 80]], dtype=torch.int32)
    positions = (2 * torch.arange(150, dtype=torch.int32)).expand(1, 2, 150)
    scales = {"key_scale": key_scale, "value_scale": value_scale}
    options: dict[str, Any] = {"window": 90, "softcap": 5.0, "sinks": draw.normal(4, seed=4)}
    options |= {"alibi_slopes": draw.normal(4, seed=5).abs() * 0.01, "positions": positions}
    for causal in (True, False):
        out = ops.decode_attention(query, key, value, lengths, causal=causal, **scales, **options)
        exact = reference.decode_attention(query.double(), key, value, lengths, causal=causal, **scales, **options)
        assert isinstance(exact, Tensor)
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("storage", STORAGES)
def test_registration(storage: str) -> None:
    query = draw.normal(1, 4, 1, 32, seed=1)
    codes, scale = ops.quantize(draw.normal(1, 2, 20, 32, seed=2), storage)
    lengths = torch.full((1, 2), 11, dtype=torch.int32)
    operators = torch.ops.fastattn
    torch.library.opcheck(operators.decode_codes.default, (query, codes, codes, scale, scale, lengths, 0.2, True, 32))
    held = (codes, codes.clone(), torch.arange(20).int().repeat(1, 2, 1), lengths, scale, scale.clone())
    new, position = draw.normal(1, 2, 2, 32, seed=3), torch.tensor([[90, -1]], dtype=torch.int32)
    torch.library.opcheck(operators.cache_append_codes_.default, (*held, new, new, position))
    torch.library.opcheck(operators.cache_compact_codes_.default, (*held, draw.normal(1, 2, 20, seed=4), 6, 3))


def test_wrong_arguments_are_named() -> None:
    query = draw.normal(1, 4, 1, 32, seed=1)
    vectors, lengths = draw.normal(1, 2, 20, 32, seed=2), torch.full((1, 2), 11, dtype=torch.int32)
    codes, scale = ops.quantize(vectors, "int8")
    half, group_scale = ops.quantize(vectors, "int4")
    with pytest.raises(ValueError, match="storage must be one of"):
        ops.quantize(vectors, "int3")
    with pytest.raises(ValueError, match=r"multiple of 32 for storage 'int4'.*'int8' and 'fp8' take any"):
        ops.quantize(vectors[..., :24], "int4")
    with pytest.raises(TypeError, match="value_scale must be given"):
        ops.decode_attention(query, codes, codes, lengths, key_scale=scale)
    with pytest.raises(TypeError, match="key and key_scale must be int8"):
        ops.decode_attention(query, vectors, codes, lengths, key_scale=scale, value_scale=scale)
    with pytest.raises(ValueError, match="value must be stored as key is, in 'int8', got 'int4'"):
        ops.decode_attention(query, codes, half, lengths, key_scale=scale, value_scale=group_scale)
    with pytest.raises(ValueError, match="key_scale must have shape"):
        ops.decode_attention(query, codes, codes, lengths, key_scale=scale[:, :, :5], value_scale=scale)
    with pytest.raises(ValueError, match="key must have size 32"):
        ops.decode_attention(query, half, half, lengths, key_scale=scale, value_scale=scale)
