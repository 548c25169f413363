"""Knorm and KeyDiff kernels, interpreted, against the definitions in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastattn import ops
from fastattn.ops import reference
from tests._helpers import draw
from tests._helpers.budget import assert_within_budget
from tests._helpers.triton_run import DTYPES, examples, interpreted

OPERATORS = ["score_knorm", "score_key_diff"]


def check(name: str, key: Tensor, lengths: Tensor, min_length: int = 0, processors: int = 132) -> Tensor:
    """Compare rows that are not skipped. One processor: 8 programs in all, so that one of them walks several blocks."""
    with interpreted(processors=processors):
        actual = getattr(ops, name)(key, lengths, min_length=min_length)
    assert actual.dtype == torch.float32
    assert actual.is_contiguous()
    define = getattr(reference, name)
    scored = lengths >= min_length
    exact, plain = define(key.double(), lengths), define(key, lengths)
    assert_within_budget(actual[scored], exact[scored], plain[scored], name)
    return actual


@pytest.mark.parametrize("name", OPERATORS)
@given(data=st.data())
@examples(12)
def test_any_shape_layout_and_lengths(name: str, data: st.DataObject) -> None:
    batch, heads = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    slots, dim = data.draw(draw.sizes(140)), data.draw(st.sampled_from([1, 16, 33, 64, 96, 128]))
    lengths = data.draw(draw.lengths((batch, heads), slots))
    min_length = data.draw(st.sampled_from([0, 1, slots]))
    key = draw.normal(batch, heads, slots, dim, dtype=data.draw(st.sampled_from(DTYPES)), seed=data.draw(draw.seeds))
    key = draw.strided(draw.poison_slots_(key, lengths), data.draw(draw.layouts))
    check(name, key, lengths, min_length, processors=data.draw(st.sampled_from([1, 132])))


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 127, 128, 129, 300])
def test_lengths_at_block_edges(name: str, length: int) -> None:
    lengths = torch.tensor([[length, 300 - length]], dtype=torch.int32)
    key = draw.poison_slots_(draw.normal(1, 2, 300, 128, dtype=torch.float16), lengths)
    check(name, key, lengths, processors=1)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dim", [80, 192, 576])
def test_wide_and_odd_head_dims(name: str, dim: int) -> None:
    lengths = torch.tensor([[70]], dtype=torch.int32)
    check(name, draw.poison_slots_(draw.normal(1, 1, 75, dim, dtype=torch.float16), lengths), lengths)


@pytest.mark.parametrize("name", OPERATORS)
def test_many_slots_over_many_programs(name: str) -> None:
    lengths = torch.tensor([[2049]], dtype=torch.int32)
    check(name, draw.poison_slots_(draw.normal(1, 1, 2111, 16), lengths), lengths)


@pytest.mark.parametrize("name", OPERATORS)
def test_keys_of_every_magnitude(name: str) -> None:
    key = draw.normal(1, 1, 64, 32, dtype=torch.float16)
    key = key * torch.logspace(-6, 3, 64)[:, None].to(torch.float16)
    key[0, 0, 3] = 0.0
    key[0, 0, 4] = 60000.0  # its square overflows float16
    check(name, key, torch.tensor([[64]], dtype=torch.int32))


def test_key_diff_of_zero_keys_is_zero() -> None:
    key = torch.zeros(1, 1, 9, 16)
    score = check("score_key_diff", key, torch.tensor([[9]], dtype=torch.int32))
    assert torch.equal(score, torch.zeros(1, 1, 9))


def test_key_diff_of_opposite_keys_has_a_zero_anchor() -> None:
    key = torch.ones(1, 1, 8, 16)
    key[:, :, ::2] = -1.0
    score = check("score_key_diff", key, torch.tensor([[8]], dtype=torch.int32))
    assert torch.equal(score, torch.zeros(1, 1, 8))


@pytest.mark.parametrize("name", OPERATORS)
def test_skipped_rows_are_not_read(name: str) -> None:
    lengths = torch.tensor([[5, 9]], dtype=torch.int32)
    key = draw.normal(1, 2, 9, 16)
    key[0, 0] = float("nan")
    check(name, key, lengths, min_length=6)


@pytest.mark.parametrize("name", OPERATORS)
def test_expanded_keys(name: str) -> None:
    key = draw.normal(1, 1, 40, 32).expand(2, 3, 40, 32)
    check(name, key, torch.tensor([[40, 3, 0], [17, 39, 1]], dtype=torch.int32))


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("shape", [(0, 2, 5, 16), (1, 0, 5, 16), (1, 2, 0, 16)])
def test_empty_caches(name: str, shape: tuple[int, ...]) -> None:
    with interpreted():
        score = getattr(ops, name)(torch.zeros(shape), torch.zeros(shape[:2], dtype=torch.int32))
    assert score.shape == shape[:3]


@pytest.mark.parametrize("name", OPERATORS)
def test_unsupported_keys_raise(name: str) -> None:
    lengths = torch.zeros(1, 1, dtype=torch.int32)
    with interpreted():
        with pytest.raises(TypeError, match=r"float64"):
            getattr(ops, name)(torch.zeros(1, 1, 4, 16, dtype=torch.float64), lengths)
        with pytest.raises(ValueError, match=r"1 to 4096, got 4097"):
            getattr(ops, name)(torch.zeros(1, 1, 1, 4097), lengths)
