"""merge_attention's kernel against the definition in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastattn import ops
from fastattn.ops import reference
from tests._helpers import draw
from tests._helpers.budget import assert_within_budget
from tests._helpers.triton_run import DTYPES, examples, interpreted


def _check(outs, lses):
    exact = reference.merge_attention([x.double() for x in outs], [x.double() for x in lses])
    plain = reference.merge_attention(outs, lses)
    with interpreted():
        out, lse = ops.merge_attention(outs, lses)
    assert out.is_contiguous()
    assert lse.is_contiguous()
    # a log-sum-exp of 16 is rounded to 16 times the unit of 1, and so is the weight that follows from it
    largest = max((x.abs().max().item() for x in outs if x.numel()), default=0.0)
    assert_within_budget(out, exact[0], plain[0], "out", cancelling=16.0 * largest)
    assert_within_budget(lse, exact[1], plain[1], "lse", cancelling=4.0)


@st.composite
def _calls(drawer):
    shape = [drawer(st.integers(1, 3)), drawer(st.integers(1, 4)), drawer(draw.sizes(20))]
    dim, dtype = drawer(st.sampled_from([1, 8, 40, 128])), drawer(st.sampled_from(DTYPES))
    outs, lses = [], []
    for part in range(drawer(st.integers(1, 4))):
        seed = drawer(draw.seeds)
        lse = draw.normal(*shape, seed=seed, scale=4.0)
        lse[draw.normal(*shape, seed=seed + 1) > 0.5] = float("-inf")
        outs.append(draw.strided(draw.normal(*shape, dim, dtype=dtype, seed=seed + part), drawer(draw.layouts)))
        lses.append(draw.strided(lse, drawer(draw.layouts)))
    return outs, lses


@examples(30)
@given(_calls())
def test_any_number_of_parts_shape_and_layout(call):
    _check(*call)


def test_a_part_without_keys_is_neutral_and_none_at_all_gives_zero():
    lses = [torch.full((1, 1, 3), float("-inf")), torch.tensor([[[0.5, float("-inf"), -80.0]]])]
    outs = [torch.zeros(1, 1, 3, 8), draw.normal(1, 1, 3, 8)]
    outs[1][0, 0, 1] = 0.0
    _check(outs, lses)
    _check(outs[::-1], lses[::-1])


def test_no_rows():
    _check([torch.zeros(1, 2, 0, 8)] * 2, [torch.zeros(1, 2, 0)] * 2)


def test_float64_is_refused():
    with interpreted(), pytest.raises(TypeError, match=r"float32, got outs of torch\.float64"):
        ops.merge_attention([torch.zeros(1, 1, 1, 8).double()], [torch.zeros(1, 1, 1).double()])
