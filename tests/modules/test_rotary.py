"""Rotary against explicit rotation matrices in float64."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastattn import Rotary
from tests._helpers import draw
from tests._helpers.exact_policies import mean_rotation, rotations

UNIT = torch.finfo(torch.float32).eps


def make(pairs: int = 4, base: float = 10000.0, **options: Any) -> Rotary:
    return Rotary(base ** -(torch.arange(pairs) / pairs), **options)


def exact(rotary: Rotary, positions: Tensor, dim: int) -> Tensor:
    """``[P, dim, dim]``."""
    return rotations(positions, dim, rotary.inv_freq, rotary.interleave, rotary.start, rotary.attention_factor)


def apply(matrices: Tensor, x: Tensor) -> Tensor:
    """``matrices [..., T, D, D]`` on ``x [B, H, T, D]``, float64."""
    return torch.einsum("...tde,...te->...td", matrices, x.double())


rotaries = st.builds(
    lambda pairs, interleave, start, factor: make(pairs, interleave=interleave, start=start, attention_factor=factor),
    st.integers(1, 9),
    st.booleans(),
    st.sampled_from([0, 1, 6]),
    st.sampled_from([1.0, 1.25, 0.7]),
)


@given(data=st.data())
@settings(max_examples=50)
def test_rotate_unrotate_and_shift(data: st.DataObject) -> None:
    rotary = data.draw(rotaries)
    batch, heads, tokens = (data.draw(st.integers(1, 3)) for _ in range(3))
    dim = rotary.end + data.draw(st.sampled_from([0, 1, 5]))
    dtype, seed = data.draw(draw.dtypes), data.draw(draw.seeds)
    x = draw.normal(batch, heads, tokens, dim, dtype=dtype, seed=seed)
    x = draw.strided(x, data.draw(draw.layouts))
    per_head = data.draw(st.booleans())
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, tokens) if per_head else (batch, tokens)
    positions = torch.randint(0, 2000, shape, generator=generator, dtype=torch.int32)
    offsets = torch.randint(-2000, 2000, shape, generator=generator, dtype=torch.int32)

    def at(where: Tensor) -> Tensor:
        spread = where if per_head else where[:, None].expand(-1, heads, -1)
        return exact(rotary, spread.flatten(), dim).view(*spread.shape, dim, dim)

    # Half a rounding unit of the result, and the float32 angle's own rounding: positions up to 2000 radians.
    size = x.double().abs().amax() * 2 * max(rotary.attention_factor, 1 / rotary.attention_factor)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    tolerance = float(size * (torch.finfo(dtype).eps + 2000 * torch.finfo(wide).eps))
    expected = apply(at(positions), x)
    rotated = rotary.rotate(x, positions)
    assert rotated.dtype == dtype
    torch.testing.assert_close(rotated.double(), expected, rtol=0, atol=tolerance)
    inverse = apply(torch.linalg.inv(at(positions)), x)
    torch.testing.assert_close(rotary.unrotate(x, positions).double(), inverse, rtol=0, atol=tolerance)
    moved = apply(at(positions + offsets) @ torch.linalg.inv(at(positions)), x)
    torch.testing.assert_close(rotary.shift(x, offsets).double(), moved, rtol=0, atol=tolerance)
    outside = torch.cat([x[..., : rotary.start], x[..., rotary.end :]], -1)
    for y in (rotated, rotary.unrotate(x, positions), rotary.shift(x, offsets)):
        assert torch.equal(torch.cat([y[..., : rotary.start], y[..., rotary.end :]], -1), outside)


@given(data=st.data())
@settings(max_examples=50)
def test_average(data: st.DataObject) -> None:
    rotary = data.draw(rotaries)
    dim = rotary.end + data.draw(st.sampled_from([0, 3]))
    batch, count = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 2, 16, 511, 512]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    middle = data.draw(st.sampled_from([(), (3,), (2, 5)]))
    x = draw.normal(batch, *middle, dim, dtype=dtype, seed=data.draw(draw.seeds))
    first = torch.tensor(data.draw(st.lists(st.integers(0, 5000), min_size=batch, max_size=batch)))
    averaged = rotary.average(x, first, count)
    assert averaged.dtype == dtype
    wide = torch.finfo(dtype).eps
    for b in range(batch):
        turn = mean_rotation(
            int(first[b]),
            count,
            dim,
            rotary.inv_freq,
            interleave=rotary.interleave,
            start=rotary.start,
            attention_factor=rotary.attention_factor,
        )
        expected = x[b].double() @ turn.T
        torch.testing.assert_close(averaged[b].double(), expected, rtol=0, atol=6000 * wide * float(x.abs().max()))


def test_average_of_frequencies_near_zero() -> None:
    # The closed form divides by sin(f/2): the factor is 1 where that is tiny, not 0/0.
    rotary = Rotary(torch.tensor([0.0, 1e-9, 1e-6, 3e-6, math.pi, 1.0]))
    x = draw.normal(1, 12, dtype=torch.float64)
    for count in (1, 7, 512):
        turn = mean_rotation(100, count, 12, rotary.inv_freq)
        averaged = rotary.average(x, torch.tensor([100]), count)
        torch.testing.assert_close(averaged, x @ turn.T, rtol=0, atol=1e-6)
        in_float32 = rotary.average(x.float(), torch.tensor([100]), count)
        torch.testing.assert_close(in_float32.double(), x @ turn.T, rtol=0, atol=2e-4)


def test_average_of_one_position_is_a_rotation() -> None:
    rotary = make(attention_factor=1.5)
    x = draw.normal(2, 3, 1, 8)
    averaged = rotary.average(x, torch.tensor([5, 9]), 1)
    torch.testing.assert_close(averaged, rotary.rotate(x, torch.tensor([[5], [9]])), rtol=0, atol=4 * UNIT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_positions_beyond_a_hundred_thousand(dtype: torch.dtype) -> None:
    """In float32 the angle is p times a float32 frequency, as models compute it: an error of p rounding units."""
    rotary, x = make(32), draw.normal(1, 1, 4, 64, dtype=dtype)
    positions = torch.tensor([[131071, 131072, 262145, 1000001]])
    expected = apply(exact(rotary, positions[0], 64), x)
    error = (rotary.rotate(x, positions).double() - expected).abs().amax(-1).flatten()
    bound = positions[0] * torch.finfo(dtype).eps * float(x.abs().max()) * 2
    assert (error <= bound).all(), f"{error.tolist()} > {bound.tolist()}"
    back = rotary.unrotate(rotary.rotate(x, positions), positions)
    torch.testing.assert_close(back, x, rtol=0, atol=16 * torch.finfo(dtype).eps)


def test_as_transformers_computes_it() -> None:
    """Half-split pairs in float32: bit for bit what a Llama model's own rotary embedding gives."""
    rotary, x = make(8), draw.normal(1, 2, 30, 16)
    positions = torch.arange(30)[None]
    angle = torch.cat([positions[..., None].float() * rotary.inv_freq] * 2, -1)[:, None]
    half = torch.cat([-x[..., 8:], x[..., :8]], -1)
    torch.testing.assert_close(rotary.rotate(x, positions), x * angle.cos() + half * angle.sin(), rtol=0, atol=UNIT)


@pytest.mark.parametrize("interleave", [False, True])
def test_quarter_turn_by_hand(interleave: bool) -> None:
    rotary = Rotary(torch.tensor([math.pi / 2, 0.0]), interleave=interleave, attention_factor=2.0, start=1)
    x = torch.tensor([9.0, 1.0, 2.0, 3.0, 4.0, 8.0]).view(1, 1, 1, 6)
    rotated = rotary.rotate(x, torch.tensor([[1]])).flatten()
    expected = [9.0, -4.0, 2.0, 6.0, 8.0, 8.0] if interleave else [9.0, -6.0, 4.0, 2.0, 8.0, 8.0]
    torch.testing.assert_close(rotated, torch.tensor(expected), rtol=0, atol=1e-6)


# -- as a module -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("move", ["bfloat16", "half", "double", "to_dtype", "parent", "cpu"])
def test_frequencies_stay_float32(move: str) -> None:
    rotary = make()
    before = rotary.inv_freq.clone()
    if move == "to_dtype":
        rotary.to(torch.bfloat16)
    elif move == "parent":
        torch.nn.Sequential(torch.nn.Linear(2, 2), rotary).to(torch.bfloat16)
    else:
        getattr(rotary, move)()
    assert rotary.inv_freq.dtype == torch.float32
    assert torch.equal(rotary.inv_freq, before)


def test_frequencies_given_in_another_dtype_are_taken_once() -> None:
    given_ = torch.tensor([1.0, 0.1], dtype=torch.float64)
    rotary = Rotary(given_)
    assert rotary.inv_freq.dtype == torch.float32
    shared = torch.tensor([1.0, 0.1])
    rotary = Rotary(shared)
    shared.zero_()
    assert rotary.inv_freq.tolist() == pytest.approx([1.0, 0.1]), "the caller's tensor is copied"


def test_it_is_no_part_of_a_state_dict() -> None:
    assert make().state_dict() == {}


def test_deepcopy_is_independent() -> None:
    rotary = make(interleave=True, start=2, attention_factor=1.5)
    copied = copy.deepcopy(rotary)
    x, positions = draw.normal(1, 1, 3, 12), torch.tensor([[1, 2, 3]])
    assert torch.equal(copied.rotate(x, positions), rotary.rotate(x, positions))
    rotary.inv_freq.zero_()
    assert copied.inv_freq[0] == 1.0


def test_made_and_used_under_inference_mode() -> None:
    x, positions = draw.normal(1, 1, 3, 8), torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        inside = make()
        moved = copy.deepcopy(inside).to(torch.bfloat16)
        expected = inside.rotate(x, positions)
    assert not inside.inv_freq.is_inference()
    for rotary in (inside, moved):
        assert torch.equal(rotary.rotate(x, positions), expected)
    outside = make()
    with torch.inference_mode():
        assert torch.equal(outside.rotate(x, positions), expected)


def test_to_meta_and_to_empty() -> None:
    rotary = make().to("meta")
    assert rotary.inv_freq.is_meta
    assert rotary.to_empty(device="cpu").inv_freq.shape == (4,)
    with torch.device("meta"):
        on_meta = Rotary(torch.ones(3))
    assert on_meta.bfloat16().inv_freq.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"inv_freq": [1.0]}, TypeError, ["inv_freq", "tensor", "list"]),
        ({"inv_freq": torch.ones(2, 2)}, ValueError, ["inv_freq", "[m]", "[2, 2]"]),
        ({"inv_freq": torch.ones(2).int()}, ValueError, ["inv_freq", "float", "int32"]),
        ({"attention_factor": 0.0}, ValueError, ["attention_factor", "positive", "0.0"]),
        ({"attention_factor": math.nan}, ValueError, ["attention_factor", "positive", "nan"]),
        ({"attention_factor": math.inf}, ValueError, ["attention_factor", "finite", "inf"]),
        ({"attention_factor": "1"}, TypeError, ["attention_factor", "str"]),
        ({"start": -1}, ValueError, ["start", "at least 0", "-1"]),
        ({"start": 1.5}, TypeError, ["start", "integer", "float"]),
    ],
)
def test_bad_input(options: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as raised:
        Rotary(**{"inv_freq": torch.ones(2), **options})
    for word in words:
        assert word in str(raised.value), f"{word!r} is not in {raised.value}"


def test_too_few_dims_to_rotate() -> None:
    with pytest.raises(ValueError, match="x must have at least 8 dims to rotate, got 7"):
        make().rotate(torch.ones(1, 1, 1, 7), torch.tensor([[0]]))
    with pytest.raises(ValueError, match=r"positions must have one entry for each of x's 3 tokens.* got \[1, 2\]"):
        make().rotate(torch.ones(1, 1, 3, 8), torch.tensor([[0, 1]]))
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        make().average(torch.ones(1, 10), torch.tensor([0]), 0)
    with pytest.raises(ValueError, match="at least 10 dims"):
        make(start=2).average(torch.ones(1, 9), torch.tensor([0]), 4)
