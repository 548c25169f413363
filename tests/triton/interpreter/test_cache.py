"""Append kernels, and what append and compaction share, interpreted, bit for bit against the definitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastattn import ops
from fastattn.ops import reference
from fastattn.ops.triton import cache as launchers
from tests._helpers import draw
from tests._helpers.triton_run import DTYPES, examples, interpreted


def make_cache(lengths: Tensor, slots: int, key_dim: int, value_dim: int, dtype=torch.float32, layout="contiguous"):
    """Key buffer, value buffer and positions with NaN and -1 beyond the valid slots, and the lengths."""
    shape = (*lengths.shape, slots)
    key = draw.poison_slots_(draw.normal(*shape, key_dim, dtype=dtype, seed=1), lengths)
    value = draw.poison_slots_(draw.normal(*shape, value_dim, dtype=dtype, seed=2), lengths)
    positions = (3 + 2 * torch.arange(slots, dtype=torch.int32)).expand(shape)
    positions = positions.masked_fill(torch.arange(slots) >= lengths[..., None], -1)
    strided = [draw.strided(buffer, layout) for buffer in (key, value, positions)]
    return [*strided, draw.strided(lengths, "every_other" if layout == "every_other" else "contiguous")]


def same(actual: list[Tensor], expected: list[Tensor]) -> None:
    for name, one, other in zip(("key_cache", "value_cache", "positions", "lengths"), actual, expected, strict=True):
        if one.is_floating_point():
            one, other = (x.contiguous().view(torch.int16 if x.itemsize == 2 else torch.int32) for x in (one, other))
        assert torch.equal(one, other), f"{name} differs"


def check_append(cache: list[Tensor], key: Tensor, value: Tensor, position: Tensor) -> None:
    expected = [buffer.clone() for buffer in cache]
    reference.cache_append_(*expected, key, value, position)
    with interpreted():  # the launcher itself: the public function refuses tokens beyond the capacity on a CPU
        launchers.cache_append_(*cache, key, value, position)
    same(cache, expected)


@examples(25)
@given(data=st.data())
def test_append_any_shape_layout_and_padding(data: st.DataObject) -> None:
    batch, heads, slots = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3)), data.draw(draw.sizes(40))
    tokens, key_dim = data.draw(draw.sizes(50)), data.draw(st.sampled_from([8, 16, 33, 64]))
    value_dim = data.draw(st.sampled_from([0, 8, 40]))
    dtype, layout = data.draw(st.sampled_from(DTYPES)), data.draw(draw.layouts)
    cache = make_cache(data.draw(draw.lengths((batch, heads), slots)), slots, key_dim, value_dim, dtype, layout)
    key = draw.normal(batch, heads, tokens, key_dim, dtype=dtype, seed=3)
    value = draw.normal(batch, heads, tokens, value_dim, dtype=dtype, seed=4)
    seed = data.draw(draw.seeds)
    keep = draw.normal(batch, tokens, seed=seed) < data.draw(st.sampled_from([-9.0, 0.0, 9.0]))
    position = torch.where(keep, 100 + torch.arange(tokens), -1).to(torch.int32)
    layout = data.draw(draw.layouts)
    check_append(cache, draw.strided(key, layout), draw.strided(value, layout), draw.strided(position, layout))


@pytest.mark.parametrize("tokens", [255, 256, 257, 2100])
def test_append_over_several_tiles(tokens: int) -> None:
    """2,100 tokens cross the block in which earlier tokens are counted."""
    cache = make_cache(torch.tensor([[0], [7]], dtype=torch.int32), 1500, 64, 32, torch.float16)
    key, value = draw.normal(2, 1, tokens, 64, dtype=torch.float16), draw.normal(2, 1, tokens, 32, dtype=torch.float16)
    position = torch.arange(tokens, dtype=torch.int32).repeat(2, 1)
    position[1, ::3] = -1
    check_append(cache, key, value, position)


def test_append_to_a_latent_cache_token_by_token() -> None:
    cache = make_cache(torch.tensor([[3], [0]], dtype=torch.int32), 6, 576, 0, torch.float16)
    for step, active in enumerate([(1, 1), (1, 0), (0, 1), (1, 1), (1, 1)]):  # the last overflows row 0: dropped
        key, value = draw.normal(2, 1, 1, 576, dtype=torch.float16, seed=step), torch.empty(2, 1, 1, 0).half()
        position = torch.tensor([[9 + step if on else -1] for on in active], dtype=torch.int32)
        check_append(cache, key, value, position)
    assert cache[3].tolist() == [[6], [4]]


def test_append_through_the_public_operator_takes_expanded_tokens() -> None:
    cache = make_cache(torch.tensor([[2, 4]], dtype=torch.int32), 8, 16, 16)
    expected = [buffer.clone() for buffer in cache]
    key = draw.normal(1, 1, 3, 16).expand(1, 2, 3, 16)
    position = torch.tensor([[5, -1, 6]], dtype=torch.int32)
    reference.cache_append_(*expected, key, key, position)
    with interpreted():
        ops.cache_append_(*cache, key, key, position)
    same(cache, expected)


@pytest.mark.parametrize("shape", [(0, 2, 5), (2, 0, 5), (1, 2, 0)])
def test_empty_caches(shape: tuple[int, int, int]) -> None:
    cache = make_cache(torch.zeros(shape[:2], dtype=torch.int32), shape[2], 8, 8)
    no_tokens = torch.zeros(*shape[:2], 0, 8)
    with interpreted():
        ops.cache_append_(*cache, no_tokens, no_tokens, torch.zeros(shape[0], 0, dtype=torch.int32))
        ops.cache_compact_(*cache, torch.zeros(shape), 3)
    assert not cache[3].any()


def test_float64_raises_before_anything_is_written() -> None:
    cache = make_cache(torch.tensor([[5]], dtype=torch.int32), 8, 8, 8, torch.float64)
    token, position = torch.zeros(1, 1, 1, 8, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.int32)
    with interpreted():
        with pytest.raises(TypeError, match=r"cache_append_ on a GPU .*key_cache of torch.float64"):
            ops.cache_append_(*cache, token, token, position)
        with pytest.raises(TypeError, match=r"cache_compact_ on a GPU .*key_cache of torch.float64"):
            ops.cache_compact_(*cache, torch.zeros(1, 1, 8), 4)
        cache[:2] = [buffer.float() for buffer in cache[:2]]
        with pytest.raises(TypeError, match=r"scores of torch.float64"):
            ops.cache_compact_(*cache, torch.zeros(1, 1, 8, dtype=torch.float64), 4)
    assert cache[3].tolist() == [[5]]
