"""Expected Attention's kernels, interpreted, against the definition in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastattn import ops
from fastattn.ops import reference
from fastattn.ops.triton import expected_attention
from tests._helpers import draw
from tests._helpers.budget import assert_within_budget
from tests._helpers.triton_run import DTYPES, examples, interpreted, wide

FORMS = ["mean", "moments", "samples"]


def statistics(form: str, batch: int, heads: int, dim: int, count: int = 20, seed: int = 9) -> dict[str, Tensor]:
    """What ``form`` needs of ``count`` random queries, shifted from zero."""
    samples = 1.0 + draw.normal(batch, heads, count, dim, seed=seed)
    if form == "samples":
        return {"query_samples": samples}
    mean, cov = reference.query_moments(samples)
    return {"query_mean": mean, "query_cov": cov} if form == "moments" else {"query_mean": mean}


def make_cache(lengths: Tensor, slots: int, dim: int, value_dim: int, dtype: torch.dtype, seed: int = 0):
    """Keys, values and positions, NaN and garbage beyond the valid slots."""
    shape = (*lengths.shape, slots)
    key = draw.poison_slots_(draw.normal(*shape, dim, dtype=dtype, seed=seed), lengths)
    value = draw.poison_slots_(draw.normal(*shape, value_dim, dtype=dtype, seed=seed + 1), lengths)
    positions = (2 * torch.arange(slots, dtype=torch.int32)).expand(shape)
    return key, value, positions.masked_fill(torch.arange(slots) >= lengths[..., None], 2**31 - 1)


def check(key, value, lengths, positions, stats, processors=132, min_length=0, **options) -> Tensor:
    """Compare the rows that are not skipped."""
    options = {"scale": key.shape[3] ** -0.5, **options}
    with interpreted(processors=processors):
        actual = ops.score_expected_attention(key, value, lengths, positions, **stats, **options, min_length=min_length)
    assert actual.dtype == torch.float32
    plain = reference.score_expected_attention(key, value, lengths, positions, **stats, **options)
    exact = reference.score_expected_attention(
        wide(key), wide(value), lengths, positions, **{name: wide(x) for name, x in stats.items()}, **options
    )
    scored = lengths >= min_length
    # the softmax takes differences of logits: one rounding unit of the largest is an error of that share of the score
    finite = exact[scored & (lengths > 0)].nan_to_num(posinf=0.0, neginf=0.0)
    size = largest_logit(key, lengths, stats, options["scale"]) * (finite.abs().max().item() if finite.numel() else 0.0)
    assert_within_budget(actual[scored], exact[scored], plain[scored], "score", cancelling=size / 8)
    return actual


def largest_logit(key: Tensor, lengths: Tensor, stats: dict[str, Tensor], scale: float) -> float:
    """The largest absolute logit of a valid slot, and of its terms."""
    mean, cov = stats.get("query_mean"), stats.get("query_cov")
    if mean is None:
        mean, cov = reference.query_moments(stats["query_samples"])
    group = mean.shape[1] // key.shape[1]
    key = key.double().masked_fill((torch.arange(key.shape[2]) >= lengths[..., None])[..., None], 0.0)
    key = key.repeat_interleave(group, dim=1)
    size = (scale * key @ mean.double()[..., None])[..., 0].abs()
    if cov is not None:
        size = size + scale**2 / 2 * ((key @ cov.double()) * key).sum(-1)
    return size.max().item() if size.numel() else 0.0


@pytest.mark.parametrize("form", FORMS)
@examples(12)
@given(data=st.data())
def test_any_shape_layout_and_lengths(form: str, data: st.DataObject) -> None:
    batch, heads, group = (data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3)))
    slots, dim = data.draw(draw.sizes(140)), data.draw(st.sampled_from([8, 16, 33, 64]))
    lengths = data.draw(draw.lengths((batch, heads), slots))
    dtype, seed = data.draw(st.sampled_from(DTYPES)), data.draw(draw.seeds)
    cache = make_cache(lengths, slots, dim, data.draw(st.sampled_from([8, 40])), dtype, seed)
    key, value, positions = (draw.strided(x, data.draw(draw.layouts)) for x in cache)
    stats = statistics(form, batch, heads * group, dim, data.draw(st.sampled_from([1, 2, 63, 65])), seed + 2)
    stats = {name: draw.strided(x, data.draw(draw.layouts)) for name, x in stats.items()}
    check(
        key,
        value,
        lengths,
        positions,
        stats,
        processors=data.draw(st.sampled_from([1, 132])),
        min_length=data.draw(st.sampled_from([0, 1, slots])),
        n_sink=data.draw(st.sampled_from([0, 1, 4, 2 * slots])),
        epsilon=data.draw(st.sampled_from([0.0, 0.02])),
        use_value_norm=data.draw(st.booleans()),
        scale=data.draw(st.sampled_from([0.1, 0.4])),
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 128, 200])
def test_lengths_at_tile_edges(form: str, length: int) -> None:
    lengths = torch.tensor([[length]], dtype=torch.int32)
    check(*reordered(make_cache(lengths, 200, 32, 16, torch.float16), lengths), statistics(form, 1, 2, 32))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dims", [(80, 80), (128, 128), (192, 128)])
def test_usual_head_dims(form: str, dims: tuple[int, int]) -> None:
    lengths = torch.tensor([[70]], dtype=torch.int32)
    check(*reordered(make_cache(lengths, 72, *dims, torch.float16), lengths), statistics(form, 1, 2, dims[0], 130))


@pytest.mark.parametrize("dtype", DTYPES)
def test_latent_cache_whose_value_is_a_view_of_the_key(dtype: torch.dtype) -> None:
    lengths = torch.tensor([[61], [7]], dtype=torch.int32)
    key, _, positions = make_cache(lengths, 66, 576, 8, dtype)
    check(key, key[..., :512], lengths, positions, statistics("samples", 2, 2, 576, 9))


@pytest.mark.parametrize("form", FORMS)
def test_value_of_width_zero_without_value_norm(form: str) -> None:
    lengths = torch.tensor([[20]], dtype=torch.int32)
    cache = make_cache(lengths, 24, 16, 0, torch.float32)
    check(*reordered(cache, lengths), statistics(form, 1, 2, 16), use_value_norm=False)


@pytest.mark.parametrize("form", FORMS)
def test_only_sinks_are_infinite_and_nothing_else(form: str) -> None:
    lengths = torch.tensor([[3]], dtype=torch.int32)
    cache = make_cache(lengths, 5, 16, 16, torch.float32)
    score = check(*reordered(cache, lengths), statistics(form, 1, 2, 16), n_sink=100)
    assert score.tolist() == [[[float("inf")] * 3 + [-float("inf")] * 2]]


@pytest.mark.parametrize("form", FORMS)
def test_large_logits_do_not_overflow(form: str) -> None:
    lengths = torch.tensor([[90]], dtype=torch.int32)
    key, value, positions = make_cache(lengths, 90, 32, 16, torch.float32)
    check(30.0 * key, value, lengths, positions, statistics(form, 1, 2, 32), scale=1.0)


@pytest.mark.parametrize("form", FORMS)
def test_skipped_rows_are_not_read(form: str) -> None:
    lengths = torch.tensor([[5, 9]], dtype=torch.int32)
    key, value, positions = make_cache(lengths, 9, 16, 16, torch.float32)
    key[0, 0] = value[0, 0] = float("nan")
    check(key, value, lengths, positions, statistics(form, 1, 4, 16), min_length=6)


def test_more_tiles_than_are_combined_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected_attention, "SOFTMAX_BLOCK", 4)
    lengths = torch.tensor([[700]], dtype=torch.int32)
    check(*reordered(make_cache(lengths, 710, 16, 16, torch.float32), lengths), statistics("mean", 1, 1, 16))


@pytest.mark.parametrize("shape", [(0, 2, 5), (1, 2, 0)])
def test_empty_caches(shape: tuple[int, int, int]) -> None:
    lengths = torch.zeros(shape[:2], dtype=torch.int32)
    cache = make_cache(lengths, shape[2], 16, 16, torch.float32)
    with interpreted():
        score = ops.score_expected_attention(
            *reordered(cache, lengths), query_mean=torch.zeros(shape[0], 4, 16), scale=1.0
        )
    assert score.shape == shape


def test_float64_raises() -> None:
    lengths = torch.tensor([[4]], dtype=torch.int32)
    cache = make_cache(lengths, 4, 16, 16, torch.float64)
    with interpreted(), pytest.raises(TypeError, match="float64"):
        ops.score_expected_attention(
            *reordered(cache, lengths), query_mean=torch.zeros(1, 2, 16, dtype=torch.float64), scale=1.0
        )


def reordered(cache, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``key, value, lengths, positions``: the operator's order."""
    key, value, positions = cache
    return key, value, lengths, positions
