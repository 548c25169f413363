"""In-place cache operators on memory that overlaps: new tokens inside the cache, buffers that overlap themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastattn import ops


def buffers(slots: int = 8, filled: int = 5) -> list[Tensor]:
    key = torch.arange(2.0 * slots * 4).view(1, 2, slots, 4)
    positions = torch.arange(slots, dtype=torch.int32).repeat(1, 2, 1).masked_fill(torch.arange(slots) >= filled, -1)
    return [key, key + 0.5, positions, torch.full((1, 2), filled, dtype=torch.int32)]


@pytest.mark.parametrize("first", [0, 3, 4])
def test_appending_a_slice_of_the_cache_itself_appends_what_it_held(first: int) -> None:
    own, apart = buffers(), buffers()
    here = slice(first, first + 3)
    position = torch.tensor([[5, 6, 7]], dtype=torch.int32)
    ops.cache_append_(*own, own[0][:, :, here], own[1][:, :, here], position)
    ops.cache_append_(*apart, apart[0][:, :, here].clone(), apart[1][:, :, here].clone(), position)
    for one, other in zip(own, apart, strict=True):
        assert torch.equal(one, other)


def test_positions_of_the_cache_itself_are_read_before_they_are_written() -> None:
    own, apart = buffers(), buffers()
    new = torch.ones(1, 2, 3, 4)
    ops.cache_append_(*own, new, new, own[2][:, 0, 3:6])
    ops.cache_append_(*apart, new, new, apart[2][:, 0, 3:6].clone())
    assert torch.equal(own[2], apart[2])
    assert own[3].tolist() == [[7, 7]]


@pytest.mark.parametrize("index", range(4))
def test_a_written_buffer_that_overlaps_itself_is_refused(index: int) -> None:
    cache, new = buffers(), torch.ones(1, 2, 1, 4)
    before = [part.clone() for part in cache]
    strides = list(cache[index].stride())
    strides[1] = strides[1] // 2 or 0  # the second head begins inside the first
    cache[index] = cache[index].as_strided(cache[index].shape, strides)
    before[index] = cache[index].clone()
    name = ("key_cache", "value_cache", "positions", "lengths")[index]
    with pytest.raises(ValueError, match=f"{name} must have memory of its own for every element"):
        ops.cache_append_(*cache, new, new, torch.tensor([[5]], dtype=torch.int32))
    for part, old in zip(cache, before, strict=True):
        assert torch.equal(part, old)


def test_written_buffers_of_any_layout_without_overlap_are_taken() -> None:
    cache, new = buffers(), torch.ones(1, 2, 1, 4)
    cache[0] = cache[0].transpose(1, 2).contiguous().transpose(1, 2)
    cache[1] = torch.zeros(1, 2, 16, 4)[:, :, ::2].copy_(cache[1])
    ops.cache_append_(*cache, new, new, torch.tensor([[5]], dtype=torch.int32))
    assert torch.equal(cache[0][:, :, 5], new[:, :, 0])
    assert torch.equal(cache[1][:, :, 5], new[:, :, 0])


def test_functionalize_over_the_operators_in_place_is_refused_by_torch() -> None:
    """It functionalizes no custom operator that writes; torch.compile and torch.export do. Documented as a limit."""
    cache, new = buffers(), torch.ones(1, 2, 1, 4)

    def step(key: Tensor, value: Tensor, positions: Tensor, lengths: Tensor) -> Tensor:
        ops.cache_append_(key, value, positions, lengths, new, new, torch.tensor([[5]], dtype=torch.int32))
        return key

    before = [part.clone() for part in cache]
    with pytest.raises(RuntimeError, match="fastattn::cache_append_"):
        torch.func.functionalize(step)(*cache)
    for part, old in zip(cache, before, strict=True):
        assert torch.equal(part, old)
