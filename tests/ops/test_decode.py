"""``decode_attention``: values and log-sum-exp against the definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastattn import ops
from fastattn.ops import reference
from fastattn.ops.cpu import _flash
from tests._helpers import draw, plain
from tests._helpers.budget import assert_lse, assert_within_budget
from tests._helpers.native import without_native


@st.composite
def calls(draw_: Any, slots: int = 80) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
    """Caches in any layout with equal or ragged lengths, unused slots NaN."""
    batch, kv_heads, groups = draw_(st.integers(0, 3)), draw_(st.integers(1, 3)), draw_(st.integers(1, 4))
    queries, capacity = draw_(st.sampled_from([0, 1, 1, 2, 5, 17, 40])), draw_(draw.sizes(slots, 0))
    dim, value_dim = draw_(st.sampled_from([(8, 8), (16, 16), (7, 5), (4, 12), (24, 16)]))
    dtype, seed = draw_(draw.dtypes), draw_(draw.seeds)
    query = draw.normal(batch, kv_heads * groups, queries, dim, dtype=dtype, seed=seed)
    key = draw.normal(batch, kv_heads, capacity, dim, dtype=dtype, seed=seed + 1)
    value = draw.normal(batch, kv_heads, capacity, value_dim, dtype=dtype, seed=seed + 2)
    lengths = draw_(draw.lengths((batch, kv_heads), capacity))
    options = {"causal": draw_(st.booleans()), "scale": draw_(st.sampled_from([None, 0.3, -1.0, 0.0]))}
    query, key, value = (draw.strided(t, draw_(draw.layouts)) for t in (query, key, value))
    for buffer in (key, value):
        draw.poison_slots_(buffer, lengths)
    return query, key, value, lengths, options


def check(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, options: dict[str, Any]) -> None:
    out, lse = ops.decode_attention(query, key, value, lengths, return_lse=True, **options)
    exact, exact_lse = reference.decode_attention(
        query.double(), key.double(), value.double(), lengths, return_lse=True, **options
    )
    scale = query.shape[3] ** -0.5 if options["scale"] is None else options["scale"]
    groups = query.shape[1] // key.shape[1]
    visible = plain.visible_in_cache(query.shape[2], key.shape[2], lengths, options["causal"], groups)
    ways = plain.attention_in_three_ways(query, key, value, visible, scale)
    assert_within_budget(out, exact, [way for way, _ in ways], "out")
    norms = [t.double().nan_to_num().norm(dim=-1).flatten() for t in (query, key)]
    largest = abs(scale) * norms[0].max().item() * norms[1].max().item() if norms[0].numel() * norms[1].numel() else 0.0
    assert_lse(lse, exact_lse, query.dtype, largest)
    assert out.is_contiguous()
    assert lse.is_contiguous()


@draw.cases(80)
@given(calls())
def test_decode_equals_the_definition(call: tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]) -> None:
    check(*call)


def example(
    dtype: torch.dtype, batch: int, kv_heads: int, groups: int, queries: int, capacity: int, dims: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    query = draw.normal(batch, kv_heads * groups, queries, dims[0], dtype=dtype, seed=1)
    key = draw.normal(batch, kv_heads, capacity, dims[0], dtype=dtype, seed=2)
    return query, key, draw.normal(batch, kv_heads, capacity, dims[1], dtype=dtype, seed=3)


@pytest.mark.parametrize("dtype", draw.FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("batch", "kv_heads", "groups", "queries"), [(1, 1, 4, 1), (1, 2, 4, 3), (1, 3, 8, 1), (5, 1, 2, 2), (1, 2, 4, 40)]
)
@pytest.mark.parametrize("length", [1023, 2049, 3000])
def test_long_caches(dtype: torch.dtype, batch: int, kv_heads: int, groups: int, queries: int, length: int) -> None:
    """Long enough for splits over keys; lengths next to the block sizes; keys with different norms."""
    query, key, value = example(dtype, batch, kv_heads, groups, queries, 3000, (32, 32))
    key *= torch.linspace(0.2, 2.0, 3000).to(dtype)[:, None]
    lengths = torch.full((batch, kv_heads), length, dtype=torch.int32)
    for buffer in (key, value):
        draw.poison_slots_(buffer, lengths)
    check(query, key, value, lengths, {"causal": True, "scale": None})


@pytest.mark.cpu_only
@pytest.mark.parametrize("dtype", draw.FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("length", [1023, 1538, 3000])
def test_more_cores_than_heads(dtype: torch.dtype, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are split so that each of 3 cores has work, here whether or not that pays. The tests own one core."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(_flash, "_MIN_SAVED", 1)
    for batch, kv_heads in ((1, 1), (2, 1), (1, 2)):
        query, key, value = example(dtype, batch, kv_heads, 4, 1, length, (32, 32))
        key *= torch.linspace(0.2, 2.0, length).to(dtype)[:, None]
        folded = query.unflatten(1, (kv_heads, -1))[:, :, :, 0]
        assert _flash._count_splits(folded, key, value) == (3 if length >= 3 * 512 else 1)
        lengths = torch.full((batch, kv_heads), length, dtype=torch.int32)
        with without_native():
            check(query, key, value, lengths, {"causal": True, "scale": None})


def test_large_scores_do_not_overflow() -> None:
    """Fault class: fp16 overflow in a score. Scores reach thousands, beyond what exp of half precision holds.

    Rounding such a score in float32 moves its exponential by parts in ten thousand: how far one order of summation is
    off is chance, and differs between machines.
    """
    lengths = torch.tensor([[1200]], dtype=torch.int32)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        query, key, value = example(dtype, 1, 1, 4, 2, 1200, (16, 16))
        check(query * 30, key * 30, value, lengths, {"causal": True, "scale": None})


def test_ragged_heads_and_an_empty_row() -> None:
    query, key, value = example(torch.float32, 3, 2, 2, 4, 30, (8, 8))
    lengths = torch.tensor([[0, 30], [2, 4], [0, 0]], dtype=torch.int32)
    for buffer in (key, value):
        draw.poison_slots_(buffer, lengths)
    for causal in (True, False):
        check(query, key, value, lengths, {"causal": causal, "scale": None})
    out, lse = ops.decode_attention(query, key, value, lengths, return_lse=True)
    assert not out[2].any()
    assert (lse[2] == float("-inf")).all()
    assert (lse[1, :2, :2] == float("-inf")).all()  # two slots belong to the two newest of four queries
    assert lse[1, :2, 2:].isfinite().all()


def test_a_cache_view_is_read_in_place() -> None:
    """The value may be a view of the key buffer, as in a latent cache."""
    buffer = draw.normal(1, 1, 20, 12, seed=4)
    query = draw.normal(1, 4, 1, 12, seed=5)
    check(query, buffer, buffer[..., :8], torch.tensor([[17]], dtype=torch.int32), {"causal": True, "scale": 0.2})
