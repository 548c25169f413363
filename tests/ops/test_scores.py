"""Scores and query moments on a CPU against their definitions in float64, and those against explicit loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastattn import ops
from fastattn.ops import reference
from tests._helpers import draw, exact_policies
from tests._helpers.budget import assert_within_budget

KEY_OPERATORS = ["score_knorm", "score_key_diff"]
UNUSED_POSITIONS = (-1, 0, 2**31 - 1)


def cast(values: tuple[Any, ...], dtype: torch.dtype) -> list[Any]:
    return [v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for v in values]


def check(name: str, *args: Tensor | None, min_length: int = 0, **options: Any) -> Tensor:
    """Run a score operator, hold the rows and heads that are not skipped to the definition, return the scores."""
    key, lengths = args[0], args[1] if name in KEY_OPERATORS else args[2]
    assert key is not None
    assert lengths is not None
    double = key.dtype == torch.float64
    actual = getattr(ops, name)(*args, min_length=min_length, **options)
    assert actual.dtype == (torch.float64 if double else torch.float32)
    assert actual.is_contiguous()
    define = getattr(reference, name)
    exact = define(*cast(args, torch.float64), **options)
    plain = plain_scores(define, tuple(cast(args, torch.float32)) if double else args, options, exact)
    scored = lengths >= min_length
    assert_within_budget(actual[scored], exact[scored], plain[scored], name)
    return actual


def plain_scores(define: Any, args: tuple[Any, ...], options: dict[str, Any], exact: Tensor) -> Tensor:
    """The yardstick: of plain PyTorch with the head dims summed in several orders, the one furthest off at each slot.

    One order alone may be exact by chance where few numbers are compared.
    """
    dim = args[0].shape[3]
    plain = define(*args, **options)
    for seed in range(3):
        order = draw.permutation(dim, seed)
        shuffled = list(args)
        for i, value in enumerate(args):
            if isinstance(value, Tensor) and value.is_floating_point() and i != 1:  # the value has dims of its own
                shuffled[i] = value[..., order]
        if len(args) > 5 and args[5] is not None:
            shuffled[5] = args[5][..., order, :][..., order]
        other = define(*shuffled, **options)
        plain = torch.where((other - exact).abs() > (plain - exact).abs(), other, plain)
    return plain


# -- Knorm and KeyDiff -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KEY_OPERATORS)
@given(data=st.data())
@settings(max_examples=50)
def test_scores_of_keys(name: str, data: st.DataObject) -> None:
    batch, heads = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    slots, dim = data.draw(draw.sizes(130)), data.draw(st.sampled_from([1, 16, 33, 64, 128, 192]))
    lengths = data.draw(draw.lengths((batch, heads), slots))
    key = draw.normal(batch, heads, slots, dim, dtype=data.draw(draw.dtypes), seed=data.draw(draw.seeds))
    key = draw.strided(draw.poison_slots_(key, lengths), data.draw(draw.layouts))
    lengths = draw.strided(lengths, data.draw(st.sampled_from(["contiguous", "every_other", "last_dim_first"])))
    check(name, key, lengths, min_length=data.draw(st.sampled_from([0, 1, slots // 2, slots, slots + 1])))


@pytest.mark.parametrize("name", KEY_OPERATORS)
def test_no_row_no_slot_no_token(name: str) -> None:
    score = getattr(ops, name)
    assert score(torch.ones(0, 2, 5, 8), torch.zeros(0, 2, dtype=torch.int32)).shape == (0, 2, 5)
    assert score(torch.ones(2, 1, 0, 8), torch.zeros(2, 1, dtype=torch.int32)).shape == (2, 1, 0)
    empty = score(torch.full((1, 2, 3, 8), math.nan), torch.zeros(1, 2, dtype=torch.int32))
    assert torch.equal(empty, torch.full((1, 2, 3), -math.inf))


def test_knorm_by_hand() -> None:
    key = torch.tensor([[[[3.0, 4.0], [0.0, 0.0], [-5.0, 12.0], [math.nan, 1.0]]]])
    score = check("score_knorm", key, torch.tensor([[3]], dtype=torch.int32))
    assert score.flatten().tolist() == [-5.0, 0.0, -13.0, -math.inf]


def test_key_diff_by_hand() -> None:
    # Unit keys e1, e1, e2 (one of them not of length 1): the mean is (2/3, 1/3), of norm sqrt(5)/3.
    key = torch.tensor([[[[7.0, 0.0], [0.5, 0.0], [0.0, 3.0]]]], dtype=torch.float64)
    score = check("score_key_diff", key, torch.tensor([[3]], dtype=torch.int32))
    torch.testing.assert_close(score.flatten(), torch.tensor([-2.0, -2.0, -1.0]).double() / math.sqrt(5))


def test_key_diff_of_zero_keys_and_of_a_zero_anchor() -> None:
    zero_key = torch.tensor([[[[0.0, 0.0], [2.0, 0.0]]]])
    lengths = torch.tensor([[2]], dtype=torch.int32)
    assert check("score_key_diff", zero_key, lengths).flatten().tolist() == [0.0, -1.0]
    opposite = torch.tensor([[[[1.0, 0.0], [-1.0, 0.0]]]])
    assert check("score_key_diff", opposite, lengths).flatten().tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", KEY_OPERATORS)
@pytest.mark.parametrize("seed", [0, 1])
def test_definitions_agree_with_explicit_loops(name: str, seed: int) -> None:
    key = draw.normal(2, 2, 40, 24, dtype=torch.float64, seed=seed)
    lengths = torch.tensor([[40, 17], [1, 0]], dtype=torch.int32)
    scores = getattr(reference, name)(key, lengths)
    by_hand = exact_policies.knorm if name == "score_knorm" else exact_policies.key_diff
    for b, h in [(0, 0), (0, 1), (1, 0)]:
        count = int(lengths[b, h])
        torch.testing.assert_close(scores[b, h, :count], by_hand(key[b, h, :count]), rtol=1e-13, atol=1e-13)
        assert (scores[b, h, count:] == -math.inf).all()


@pytest.mark.parametrize("name", KEY_OPERATORS)
def test_float16_keys_whose_squares_overflow(name: str) -> None:
    key = draw.normal(1, 2, 64, 32, dtype=torch.float16)
    key[0, 0] = 60000.0
    key[0, 1, ::2] *= 1000.0
    check(name, key, torch.tensor([[64, 64]], dtype=torch.int32))


@pytest.mark.parametrize("name", KEY_OPERATORS)
def test_bfloat16_keys_keep_what_float32_scoring_keeps(name: str) -> None:
    key = draw.normal(1, 2, 2048, 64, dtype=torch.bfloat16)
    lengths = torch.full((1, 2), 2048, dtype=torch.int32)
    score = check(name, key, lengths)
    in_float32 = getattr(ops, name)(key.float(), lengths)
    for h in range(2):
        assert torch.equal(reference.select_slots(score[0, h], 512), reference.select_slots(in_float32[0, h], 512))
        distinct = score[0, h].unique().numel()
        assert distinct > 1900, f"only {distinct} different scores of 2048: they were rounded to bfloat16"


# -- Expected Attention ----------------------------------------------------------------------------------------------


def statistics(form: str, samples: Tensor) -> dict[str, Tensor]:
    """What the operator takes of ``samples [B, H, N, D]``, float32 or float64."""
    if form == "samples":
        return {"query_samples": samples}
    mean, cov = reference.query_moments(samples)
    return {"query_mean": mean, "query_cov": cov} if form == "moments" else {"query_mean": mean}


def rising_positions(lengths: Tensor, slots: int, first: int, seed: int) -> Tensor:
    """Rising with gaps from ``first`` on; any integer beyond ``lengths``."""
    gaps = draw.integers(1, 4, *lengths.shape, slots, seed=seed)
    gaps[..., 0] = first
    beyond = torch.tensor(UNUSED_POSITIONS)[draw.integers(0, 3, *gaps.shape, seed=seed + 1)]
    return torch.where(torch.arange(slots) < lengths[..., None], gaps.cumsum(-1), beyond).to(torch.int32)


@given(data=st.data())
@settings(max_examples=60)
def test_expected_attention(data: st.DataObject) -> None:
    batch, heads, groups = (data.draw(st.integers(1, most)) for most in (2, 2, 3))
    slots, dim = data.draw(draw.sizes(130)), data.draw(st.sampled_from([1, 16, 33, 64]))
    v_dim = data.draw(st.sampled_from([1, 16, 48]))
    dtype, seed = data.draw(draw.dtypes), data.draw(draw.seeds)
    lengths = data.draw(draw.lengths((batch, heads), slots))
    key = draw.poison_slots_(draw.normal(batch, heads, slots, dim, dtype=dtype, seed=seed), lengths)
    value = draw.poison_slots_(draw.normal(batch, heads, slots, v_dim, dtype=dtype, seed=seed + 1), lengths)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    samples = draw.normal(batch, heads * groups, data.draw(st.sampled_from([1, 9, 33])), dim, dtype=wide, seed=seed + 2)
    given_ = statistics(data.draw(st.sampled_from(["mean", "moments", "samples"])), samples)
    layouts = st.sampled_from(["contiguous", "sliced", "last_dim_first", "every_other"])
    # float64 statistics of the plain computation must be exact in float32.
    given_ = {n: draw.strided(v.float().to(v.dtype), data.draw(layouts)) for n, v in given_.items()}
    check(
        "score_expected_attention",
        draw.strided(key, data.draw(draw.layouts)),
        draw.strided(value, data.draw(draw.layouts)),
        lengths,
        draw.strided(rising_positions(lengths, slots, data.draw(st.sampled_from([0, 2, 9])), seed), "every_other"),
        *(given_.get(name) for name in ("query_mean", "query_cov", "query_samples")),
        min_length=data.draw(st.sampled_from([0, 1, slots // 2, slots, slots + 1])),
        scale=data.draw(st.sampled_from([dim**-0.5, 0.3, 1.0 / dim])),
        n_sink=data.draw(st.sampled_from([0, 1, 4, 1000])),
        epsilon=data.draw(st.sampled_from([0.0, 0.02])),
        use_value_norm=data.draw(st.booleans()),
    )


def test_expected_attention_by_hand() -> None:
    # Logits 1 and 3 with the first key (mean 2, variance 1), 2 and 6 with the second (mean 4, variance 4).
    key, value = torch.tensor([[[[1.0], [2.0]]]]).double(), torch.tensor([[[[0.0, 2.0], [3.0, 4.0]]]]).double()
    samples = torch.tensor([[[[1.0], [3.0]]]]).double()
    args = (key, value, torch.tensor([[2]], dtype=torch.int32), torch.tensor([[[0, 1]]], dtype=torch.int32))
    total = math.exp(2.5) + math.exp(6.0)
    expected = torch.tensor([2 * (math.exp(2.5) / total + 0.5), 5 * (math.exp(6.0) / total + 0.5)]).double()
    for form in ("samples", "moments"):
        score = check_expected(args, statistics(form, samples), scale=1.0, n_sink=0, epsilon=0.5)
        torch.testing.assert_close(score.flatten(), expected, rtol=1e-6, atol=0)
    total = math.exp(2.0) + math.exp(4.0)
    score = check_expected(args, statistics("mean", samples), scale=1.0, n_sink=0, use_value_norm=False)
    expected = torch.tensor([math.exp(2.0) / total, math.exp(4.0) / total]).double()
    torch.testing.assert_close(score.flatten(), expected, rtol=1e-6, atol=0)


def check_expected(args: tuple[Tensor, ...], given_: dict[str, Tensor], **options: Any) -> Tensor:
    names = ("query_mean", "query_cov", "query_samples")
    return check("score_expected_attention", *args, *(given_.get(name) for name in names), **options)


@pytest.mark.parametrize("form", ["mean", "moments", "samples"])
@pytest.mark.parametrize("interleave", [False, True])
def test_expected_attention_by_explicit_loops_over_rotations(form: str, interleave: bool) -> None:
    tokens, dim, groups, first, future = 30, 16, 2, 41, 24
    inv_freq = 100.0 ** -(torch.arange(0, dim, 2) / dim)
    key, value = draw.normal(1, 1, tokens, dim, dtype=torch.float64), draw.normal(1, 1, tokens, 5, dtype=torch.float64)
    queries = 2 * draw.normal(1, groups, 12, dim, dtype=torch.float64, seed=3) + 1
    turns = [
        exact_policies.rotations(torch.tensor([p]), dim, inv_freq, interleave)[0] for p in range(first, first + future)
    ]
    turn = torch.zeros(dim, dim, dtype=torch.float64)
    for each in turns:
        turn += each / future
    given_ = statistics(form, torch.einsum("de,bhne->bhnd", turn, queries))
    positions = torch.arange(tokens, dtype=torch.int32).view(1, 1, -1)
    lengths = torch.tensor([[tokens]], dtype=torch.int32)
    score = ops.score_expected_attention(key, value, lengths, positions, **given_, scale=0.25, epsilon=0.01)
    expected = exact_policies.expected_attention(
        key[0, 0],
        value[0, 0],
        positions[0, 0],
        queries[0],
        torch.full((12,), 7),
        first,
        inv_freq,
        interleave=interleave,
        scale=0.25,
        epsilon=0.01,
        use_covariance=form != "mean",
        n_future=future,
    )
    assert expected[:4].isinf().all()
    torch.testing.assert_close(score[0, 0], expected, rtol=1e-11, atol=0)


def test_sample_form_equals_moment_form() -> None:
    args = expected_attention_arguments(torch.float64)
    samples = draw.normal(2, 4, 21, 16, dtype=torch.float64, seed=4)
    by_samples = ops.score_expected_attention(*args, **statistics("samples", samples), scale=0.25)
    by_moments = ops.score_expected_attention(*args, **statistics("moments", samples), scale=0.25)
    torch.testing.assert_close(by_samples, by_moments, rtol=1e-12, atol=0)
    assert by_samples.isinf().sum() == 2 * 2 * 4


def test_one_sample_has_no_variance() -> None:
    args = expected_attention_arguments(torch.float32)
    sample = draw.normal(2, 4, 1, 16, seed=5)
    by_sample = ops.score_expected_attention(*args, query_samples=sample, scale=0.25)
    by_mean = ops.score_expected_attention(*args, query_mean=sample[:, :, 0], scale=0.25)
    assert not by_sample.isnan().any()
    torch.testing.assert_close(by_sample, by_mean)


def test_only_sinks() -> None:
    args = expected_attention_arguments(torch.float32)
    score = ops.score_expected_attention(*args, **statistics("moments", draw.normal(2, 4, 9, 16)), scale=1.0, n_sink=99)
    assert torch.equal(score, torch.full_like(score, math.inf))


def test_expected_attention_of_large_logits_in_float16() -> None:
    key = 100 * draw.normal(1, 1, 64, 32, dtype=torch.float16)
    value = torch.full((1, 1, 64, 32), 60000.0, dtype=torch.float16)
    lengths, positions = torch.tensor([[64]], dtype=torch.int32), torch.arange(64, dtype=torch.int32).view(1, 1, 64)
    samples = draw.normal(1, 2, 8, 32, seed=6)
    score = ops.score_expected_attention(
        key, value, lengths, positions, **statistics("moments", samples), scale=32**-0.5
    )
    assert not score.isnan().any()
    assert score[..., 4:].isfinite().all()


def test_bfloat16_expected_attention_keeps_what_float32_scoring_keeps() -> None:
    key = draw.normal(1, 2, 2048, 64, dtype=torch.bfloat16)
    value = draw.normal(1, 2, 2048, 64, dtype=torch.bfloat16, seed=1)
    lengths = torch.full((1, 2), 2048, dtype=torch.int32)
    positions = torch.arange(2048, dtype=torch.int32).expand(1, 2, -1)
    given_ = statistics("moments", draw.normal(1, 4, 300, 64, seed=2))
    score = ops.score_expected_attention(key, value, lengths, positions, **given_, scale=0.125)
    in_float32 = ops.score_expected_attention(key.float(), value.float(), lengths, positions, **given_, scale=0.125)
    for h in range(2):
        assert torch.equal(reference.select_slots(score[0, h], 512), reference.select_slots(in_float32[0, h], 512))


def test_value_is_a_view_of_the_key() -> None:
    cache = draw.normal(2, 1, 20, 24, dtype=torch.float32)
    lengths = torch.tensor([[20], [11]], dtype=torch.int32)
    draw.poison_slots_(cache, lengths)
    args = (cache, cache[..., :16], lengths, rising_positions(lengths, 20, 0, 0))
    check_expected(args, statistics("samples", draw.normal(2, 3, 6, 24)), scale=0.2)


# -- query moments ---------------------------------------------------------------------------------------------------


def expected_attention_arguments(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Key, value, lengths and positions of two rows, two heads, 12 slots, all valid."""
    return (
        draw.normal(2, 2, 12, 16, dtype=dtype),
        draw.normal(2, 2, 12, 8, dtype=dtype, seed=1),
        torch.full((2, 2), 12, dtype=torch.int32),
        torch.arange(12, dtype=torch.int32).repeat(2, 2, 1),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", [*KEY_OPERATORS, "score_expected_attention", "query_moments"])
def test_opcheck(name: str, dtype: torch.dtype) -> None:
    operator = getattr(torch.ops.fastattn, name).default
    key, value, lengths, positions = expected_attention_arguments(dtype)
    samples = draw.normal(2, 4, 5, 16, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    mean, cov = reference.query_moments(samples)
    options = (0.25, 4, 0.0, True, 0)
    cases: dict[str, list[tuple]] = {
        "score_knorm": [(key, lengths, 0), (draw.strided(key, "tokens_before_heads"), lengths, 13)],
        "score_key_diff": [(key, lengths, 0), (draw.strided(key, "every_other"), lengths, 13)],
        "score_expected_attention": [
            (key, value, lengths, positions, mean, cov, None, *options),
            (key, value, lengths, positions, None, None, samples, *options),
        ],
        "query_moments": [(key, None, 0), (key, torch.arange(12).expand(2, -1) > 5, 1)],
    }
    for args in cases[name]:
        torch.library.opcheck(operator, args)
