"""Scores over the codes of a quantised cache: what they are of the dequantised vectors, and no copy as numbers."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastattn import ops
from fastattn.ops import reference
from fastattn.ops.cpu import _pieces
from tests._helpers import draw
from tests._helpers.budget import assert_within_budget
from tests._helpers.native import without_native
from tests.ops.test_quantize import STORAGES, poisoned
from tests.ops.test_scores import plain_scores, rising_positions, statistics

INT = torch.int32


def stored(storage: str, lengths: Tensor, slots: int, dim: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales that are NaN beyond the lengths, and the float64 numbers."""
    codes, scale = ops.quantize(draw.normal(*lengths.shape, slots, dim, seed=seed), storage)
    return codes, poisoned(codes, scale, lengths), reference.dequantize(codes, scale, torch.float64)


def hold(actual: Tensor, name: str, numbers: tuple[Any, ...], **options: Any) -> None:
    """``actual`` errs no more than plain PyTorch, or the operator itself, does on the dequantised vectors."""
    define = getattr(reference, name)
    exact = define(*numbers, **options)
    cast = tuple(n.float() if isinstance(n, Tensor) and n.dtype == torch.float64 else n for n in numbers)
    assert actual.dtype == torch.float32
    ways = [plain_scores(define, cast, options, exact), getattr(ops, name)(*cast, **options)]
    assert_within_budget(actual, exact, ways, name)


@st.composite
def caches(draw_: Any) -> tuple[str, Tensor, int, int, int]:
    batch, heads, slots = draw_(st.integers(1, 2)), draw_(st.integers(1, 2)), draw_(draw.sizes(300, 1))
    lengths = draw_(draw.lengths((batch, heads), slots))
    return draw_(st.sampled_from(STORAGES)), lengths, slots, draw_(st.sampled_from([32, 64, 96])), draw_(draw.seeds)


def branch(native: bool) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if native else without_native()


@draw.cases(40)
@given(caches(), st.booleans(), st.sampled_from(["score_knorm", "score_key_diff"]))
def test_scores_of_keys(cache: tuple[str, Tensor, int, int, int], native: bool, name: str) -> None:
    storage, lengths, slots, dim, seed = cache
    codes, scale, exact = stored(storage, lengths, slots, dim, seed)
    with branch(native), pytest.MonkeyPatch.context() as patch:
        patch.setattr(_pieces, "_NUMBERS", 40 * dim)
        actual = getattr(ops, name)(codes, lengths, key_scale=scale)
    hold(actual, name, (exact, lengths))


@draw.cases(40)
@given(caches(), st.sampled_from(["mean", "moments", "samples"]), st.booleans(), st.booleans())
def test_expected_attention(
    cache: tuple[str, Tensor, int, int, int], form: str, latent: bool, use_value_norm: bool
) -> None:
    storage, lengths, slots, dim, seed = cache
    codes, scale, exact = stored(storage, lengths, slots, dim, seed)
    value_dim = dim - 13 if latent else None  # of a latent, whose value is part of the key
    value = (codes, scale, exact[..., :value_dim]) if latent else stored(storage, lengths, slots, 64, seed + 1)
    given_ = statistics(form, draw.normal(lengths.shape[0], 2 * lengths.shape[1], 9, dim, seed=seed + 2).float())
    statistic = [given_.get(name) for name in ("query_mean", "query_cov", "query_samples")]
    positions = rising_positions(lengths, slots, 2, seed)
    options: dict[str, Any] = {"scale": 0.2, "epsilon": 0.01, "use_value_norm": use_value_norm}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_pieces, "_NUMBERS", 40 * dim)
        actual = ops.score_expected_attention(
            codes, value[0], lengths, positions, *statistic, key_scale=scale, value_scale=value[1],
            value_dim=value_dim, **options,
        )  # fmt: skip
    wide = [None if s is None else s.double() for s in statistic]
    hold(actual, "score_expected_attention", (exact, value[2], lengths, positions, *wide), **options)


@draw.cases(30)
@given(caches(), st.sampled_from([1, 2, 9]), st.sampled_from([torch.float32, torch.bfloat16]))
def test_attention_mass(cache: tuple[str, Tensor, int, int, int], queries: int, dtype: torch.dtype) -> None:
    storage, lengths, slots, dim, seed = cache
    codes, scale, exact = stored(storage, lengths, slots, dim, seed)
    positions = rising_positions(lengths, slots, 0, seed)
    query = draw.normal(lengths.shape[0], 2 * lengths.shape[1], queries, dim, dtype=dtype, seed=seed + 1)
    at = draw.integers(0, 2 * slots, lengths.shape[0], queries, seed=seed + 2).sort(-1).values.to(INT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_pieces, "_NUMBERS", 40 * dim)
        actual = ops.attention_mass(codes, lengths, positions, query, at, scale=0.2, key_scale=scale)
    hold(actual, "attention_mass", (exact, lengths, positions, query.double(), at), scale=0.2)


def peak(call: Any) -> int:
    """The most bytes that a call holds at once."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    live = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("native", [True, False])
def test_no_copy_as_numbers(storage: str, native: bool) -> None:
    """One head, of which a copy in float32 would be 20 MB. Scores of 4 heads for each slot are what is needed."""
    slots, dim = 80_000, 64
    codes, scale = ops.quantize(draw.normal(1, 1, slots, dim, seed=1), storage)
    lengths, positions = torch.tensor([[slots]], dtype=INT), torch.arange(slots, dtype=INT).view(1, 1, -1)
    query = draw.normal(1, 2, 2, dim, seed=2)
    given_ = statistics("moments", query)
    calls = {
        "knorm": lambda: ops.score_knorm(codes, lengths, key_scale=scale),
        "key_diff": lambda: ops.score_key_diff(codes, lengths, key_scale=scale),
        "expected_attention": lambda: ops.score_expected_attention(
            codes, codes, lengths, positions, **given_, scale=0.1, key_scale=scale, value_scale=scale, value_dim=32
        ),
        "mass": lambda: ops.attention_mass(
            codes, lengths, positions, query, torch.full((1, 2), slots, dtype=INT), scale=0.1, key_scale=scale
        ),
    }
    with branch(native):
        for name, call in calls.items():
            most = peak(call)
            assert 0 < most < 0.6 * slots * dim * 4, f"{name}: {most} bytes at once"


@pytest.mark.parametrize("storage", STORAGES)
def test_registration(storage: str) -> None:
    codes, scale = ops.quantize(draw.normal(1, 2, 20, 32, seed=2), storage)
    lengths, positions = torch.full((1, 2), 11, dtype=INT), torch.arange(20, dtype=INT).expand(1, 2, 20).contiguous()
    query, at = draw.normal(1, 4, 3, 32, seed=3), torch.tensor([[8, 9, 10]], dtype=INT)
    operators = torch.ops.fastattn
    mean, cov = reference.query_moments(query)
    for name in ("score_knorm", "score_key_diff"):
        torch.library.opcheck(getattr(operators, name).default, (codes, lengths, 0, scale))
    torch.library.opcheck(
        operators.score_expected_attention.default,
        (codes, codes, lengths, positions, mean, cov, None, 0.2, 2, 0.0, True, 0, scale, scale, 32),
    )
    torch.library.opcheck(operators.attention_mass.default, (codes, lengths, positions, query, at, 0.2, 0, scale))


def test_wrong_arguments_are_named() -> None:
    vectors, lengths = draw.normal(1, 2, 20, 32, seed=2), torch.full((1, 2), 11, dtype=INT)
    codes, scale = ops.quantize(vectors, "int8")
    half, group_scale = ops.quantize(vectors, "int4")
    positions, mean = torch.zeros(1, 2, 20, dtype=INT), torch.zeros(1, 4, 32)
    common: dict[str, Any] = {"scale": 0.2}
    for name in ("score_knorm", "score_key_diff"):
        with pytest.raises(ValueError, match="key_scale must have shape"):
            getattr(ops, name)(codes, lengths, key_scale=scale[:, :, :5])
        with pytest.raises(TypeError, match="key and key_scale must be int8"):
            getattr(ops, name)(vectors, lengths, key_scale=scale)
    expected = ops.score_expected_attention
    with pytest.raises(TypeError, match="value_scale must be given where key_scale is"):
        expected(codes, codes, lengths, positions, mean, key_scale=scale, **common)
    with pytest.raises(TypeError, match="value_scale and value_dim must be None where key_scale is"):
        expected(vectors, vectors, lengths, positions, mean, value_scale=scale, **common)
    with pytest.raises(ValueError, match="value must be stored as key is, in 'int8', got 'int4'"):
        expected(codes, half, lengths, positions, mean, key_scale=scale, value_scale=group_scale, **common)
    with pytest.raises(ValueError, match="value_dim must be at most value's head dim 32, got 33"):
        expected(codes, codes, lengths, positions, mean, key_scale=scale, value_scale=scale, value_dim=33, **common)
    with pytest.raises(ValueError, match="query_mean must have size 32"):
        expected(codes, codes, lengths, positions, mean[..., :16], key_scale=scale, value_scale=scale, **common)
    with pytest.raises(ValueError, match="query must have size 32"):
        ops.attention_mass(
            codes, lengths, positions, mean[:, :, None, :16], torch.zeros(1, 1, dtype=INT), scale=0.2, key_scale=scale
        )
