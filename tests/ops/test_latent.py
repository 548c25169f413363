"""``latent_decode``: values and log-sum-exp against the definition in float64."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastattn import ops
from fastattn.ops import reference
from fastattn.ops.cpu import _latent_bf16, native
from tests._helpers import draw, plain
from tests._helpers.budget import assert_lse, assert_within_budget
from tests._helpers.native import without_native


def check(
    latent: Tensor, rope: Tensor, cache: Tensor, lengths: Tensor, scale: float, causal: bool, *, products: bool = False
) -> None:
    """Within the budget; where ``products`` rounds scores, the log-sum-exp may err as documented."""
    options = {"scale": scale, "causal": causal}
    out, lse = ops.latent_decode(latent, rope, cache, lengths, return_lse=True, **options)
    exact, exact_lse = reference.latent_decode(
        latent.double(), rope.double(), cache.double(), lengths, return_lse=True, **options
    )
    query, key = torch.cat([latent, rope], dim=-1), cache[:, None]
    visible = plain.visible_in_cache(latent.shape[2], cache.shape[1], lengths[:, None], causal, latent.shape[1])
    ways = plain.attention_in_three_ways(query, key, key[..., : latent.shape[3]], visible, scale)
    assert_within_budget(out, exact, [way for way, _ in ways], "out")
    norms = [t.double().nan_to_num().norm(dim=-1).flatten() for t in (query, key)]
    largest = abs(scale) * norms[0].max().item() * norms[1].max().item() if norms[0].numel() * norms[1].numel() else 0.0
    assert_lse(lse, exact_lse, latent.dtype, largest, rounding=1e-2 if products else 0.0)
    assert out.is_contiguous()
    assert lse.is_contiguous()


@st.composite
def calls(draw_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, float, bool]:
    batch, heads, queries = draw_(st.integers(0, 3)), draw_(st.integers(1, 6)), draw_(st.sampled_from([0, 1, 1, 2, 9]))
    capacity, (rank, rope_dim) = draw_(draw.sizes(80, 0)), draw_(st.sampled_from([(8, 4), (12, 6), (5, 3), (48, 16)]))
    dtype, seed = draw_(draw.dtypes), draw_(draw.seeds)
    latent = draw.normal(batch, heads, queries, rank, dtype=dtype, seed=seed)
    rope = draw.normal(batch, heads, queries, rope_dim, dtype=dtype, seed=seed + 1)
    cache = draw.normal(batch, capacity, rank + rope_dim, dtype=dtype, seed=seed + 2)
    lengths = draw_(draw.lengths((batch,), capacity))
    latent, rope, cache = (draw.strided(t, draw_(draw.layouts)) for t in (latent, rope, cache))
    draw.poison_slots_(cache, lengths)
    return latent, rope, cache, lengths, draw_(st.sampled_from([0.2, -0.5, 0.0])), draw_(st.booleans())


@draw.cases(60)
@given(calls())
def test_latent_decode_equals_the_definition(call: tuple[Tensor, Tensor, Tensor, Tensor, float, bool]) -> None:
    check(*call)


@pytest.mark.parametrize("dtype", draw.FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize(("batch", "heads", "queries"), [(1, 16, 1), (2, 4, 3), (1, 8, 70), (2, 64, 1), (1, 16, 4)])
@pytest.mark.parametrize("length", [1025, 2500])
def test_long_caches(dtype: torch.dtype, batch: int, heads: int, queries: int, length: int) -> None:
    """Several blocks of keys, whose scores grow along the cache; the rank is not a power of two."""
    latent = draw.normal(batch, heads, queries, 48, dtype=dtype, seed=1)
    rope = draw.normal(batch, heads, queries, 16, dtype=dtype, seed=2)
    cache = draw.normal(batch, 2500, 64, dtype=dtype, seed=3) * torch.linspace(0.2, 2.0, 2500).to(dtype)[:, None]
    lengths = torch.full((batch,), length, dtype=torch.int32)
    draw.poison_slots_(cache, lengths)
    check(latent, rope, cache, lengths, 64**-0.5, True)


@st.composite
def wide_calls(draw_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, float, bool]:
    """Several blocks of keys, some of whose scores tower over the others'."""
    batch, heads, queries = draw_(st.integers(1, 2)), draw_(st.integers(1, 5)), draw_(st.sampled_from([1, 1, 2, 4]))
    capacity, (rank, rope_dim) = draw_(draw.sizes(150, 1)), draw_(st.sampled_from([(48, 16), (128, 32), (20, 6)]))
    seed, largest = draw_(draw.seeds), draw_(st.sampled_from([1.0, 6.0, 40.0]))
    latent = draw.normal(batch, heads, queries, rank, dtype=torch.bfloat16, seed=seed)
    rope = draw.normal(batch, heads, queries, rope_dim, dtype=torch.bfloat16, seed=seed + 1)
    cache = draw.normal(batch, capacity, rank + rope_dim, dtype=torch.bfloat16, seed=seed + 2)
    cache[:, 7::23] *= largest
    lengths = draw_(draw.lengths((batch,), capacity))
    latent, rope, cache = (draw.strided(t, draw_(draw.layouts)) for t in (latent, rope, cache))
    draw.poison_slots_(cache, lengths)
    return latent, rope, cache, lengths, (rank + rope_dim) ** -0.5, draw_(st.booleans())


@pytest.mark.cpu_only
@draw.cases(60)
@given(wide_calls())
def test_products_equal_the_definition(call: tuple[Tensor, Tensor, Tensor, Tensor, float, bool]) -> None:
    """The formulation for much work, here for any, in blocks of a few keys."""
    latent, _, cache, lengths, _, causal = call
    small = {"_MIN_PRODUCTS": 1, "_MIN_WIDTH": 1, "_BLOCK": 32, "_SAMPLE": 8, "_has_fast_products": lambda: True}
    with (
        without_native(),
        mock.patch.multiple(_latent_bf16, **small),
        mock.patch.object(_latent_bf16, "forward", wraps=_latent_bf16.forward) as taken,
    ):
        check(*call, products=True)
    seen_by_all = lengths.clamp(0, cache.shape[1]) - (latent.shape[2] - 1 if causal else 0)
    assert taken.call_count == int((seen_by_all > 0).sum())


@pytest.mark.parametrize(
    ("heads", "queries", "capacity"), [(64, 1, 400), (20, 4, 300), (2, 4, 4096), (3, 1, 8200), (1, 4, 8193)]
)
@pytest.mark.parametrize("largest", [1.0, 6.0, 40.0])
def test_deepseek_widths(heads: int, queries: int, capacity: int, largest: float) -> None:
    """Enough work for the formulation by products where the processor has them; keys tower over others in any block."""
    latent = draw.normal(2, heads, queries, 512, dtype=torch.bfloat16, seed=1)
    rope = draw.normal(2, heads, queries, 64, dtype=torch.bfloat16, seed=2)
    cache = draw.normal(2, capacity, 576, dtype=torch.bfloat16, seed=3)
    cache[:, 77::100] *= largest
    lengths = torch.tensor([capacity, capacity - 1], dtype=torch.int32)
    draw.poison_slots_(cache, lengths)
    on_cpu = torch.get_default_device().type == "cpu"
    products = on_cpu and native.operators() is None and _latent_bf16._has_fast_products()
    for causal in (True, False):
        check(latent, rope, cache, lengths, 576**-0.5, causal, products=products)


def test_large_scores_do_not_overflow() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        latent, rope = (draw.normal(1, 4, 2, dim, dtype=dtype, seed=dim) * 30 for dim in (16, 8))
        cache = draw.normal(1, 1100, 24, dtype=dtype, seed=3) * 30
        check(latent, rope, cache, torch.tensor([1100], dtype=torch.int32), 0.2, True)


def test_more_queries_than_slots() -> None:
    latent, rope = draw.normal(2, 3, 5, 8, seed=1), draw.normal(2, 3, 5, 4, seed=2)
    cache = draw.normal(2, 6, 12, seed=3)
    lengths = torch.tensor([2, 0], dtype=torch.int32)
    draw.poison_slots_(cache, lengths)
    check(latent, rope, cache, lengths, 0.3, True)
    out, lse = ops.latent_decode(latent, rope, cache, lengths, scale=0.3, return_lse=True)
    assert not out[0, :, :3].any()
    assert not out[1].any()
    assert (lse[0, :, :3] == float("-inf")).all()
