"""Splitting the slots of a cache over programs: one launcher for both decode operators, and combining the parts."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.ops.triton import _launch
from fastattn.ops.triton.configs import SplitConfig

MOST_SPLITS = 128
SPLIT_TILES = 2  # a split of fewer tiles spends more on its start and on combining than it saves


@triton.jit
def split_range(length, capacity, tokens, i_query, i_split, splits, CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr):
    """The slots of one split, in whole tiles, of those that queries up to ``i_query`` see; ``length`` cut to capacity.

    The share follows the length on the device, so that every split works whatever the capacity.
    """
    length = tl.minimum(length, capacity)
    seen = length
    if CAUSAL:
        seen = tl.maximum(length - tokens + 1 + i_query, 0)
    share = tl.cdiv(tl.cdiv(seen, BLOCK_N), splits) * BLOCK_N
    first = i_split * share
    return length, first, tl.minimum(first + share, seen)


@triton.jit
def window_range(length, tokens, i_first, i_last, window, i_split, splits, CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr):
    """As :func:`split_range` for queries ``i_first`` to ``i_last``, without the slots before every query's window.

    Positions ascend, so that a window of ``window`` positions lies within as many slots.
    """
    begin = tl.maximum(length - window + 1, 0)
    seen = length
    if CAUSAL:
        begin = tl.maximum(length - tokens + i_first - window + 1, 0)
        seen = tl.maximum(length - tokens + 1 + i_last, 0)
    share = tl.cdiv(tl.cdiv(tl.maximum(seen - begin, 0), BLOCK_N), splits) * BLOCK_N
    first = begin + i_split * share
    return first, tl.minimum(first + share, seen)


@triton.jit
def combine_kernel(
    part_out,
    part_lse,
    out,
    lse,
    splits,
    sos,
    sls,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """One program: one (batch, head, query) row. out = sum_s exp(lse_s - lse) out_s."""
    i_row = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    b_max = float("-inf")
    b_sum = 0.0
    b_out = tl.zeros((BLOCK_D,), tl.float32)
    for start in tl.range(0, splits, BLOCK_S):
        o_split = (start + tl.arange(0, BLOCK_S)).to(tl.int64)
        b_lse = tl.load(part_lse + o_split * sls + i_row, mask=o_split < splits, other=float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_lse, 0))
        b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_weight = tl.exp(b_lse - b_base)
        b_factor = tl.exp(b_max - b_base)
        # [S, D]: an empty split wrote no output
        m_part = (b_lse > float("-inf"))[:, None] & (o_d < DV)[None, :]
        b_part = tl.load(part_out + o_split[:, None] * sos + i_row * DV + o_d[None, :], mask=m_part, other=0.0)
        b_out = b_out * b_factor + tl.sum(b_part * b_weight[:, None], 0)
        b_sum = b_sum * b_factor + tl.sum(b_weight, 0)
        b_max = b_new
    b_divisor = tl.where(b_sum == 0.0, 1.0, b_sum)
    tl.store(out + i_row * DV + o_d, (b_out / b_divisor).to(out.dtype.element_ty), mask=o_d < DV)
    tl.store(lse + i_row, tl.where(b_sum == 0.0, float("-inf"), b_max + tl.log(b_divisor)))


def split_count(target: _launch.Target, programs: int, tiles: int, resident: int) -> int:
    """How many programs share one row tile's slots, such that the slowest of them ends soonest over a full buffer.

    A count is admissible where every split has whole tiles, at least ``SPLIT_TILES`` of them but for the last, and none
    is empty: ``ceil(tiles / share)`` for some share. It takes ``waves * share`` steps, with as many waves as the chip
    needs for all programs. Among the quickest counts the smallest is taken, for it combines least. A chip that is full
    without splitting isn't split: partial results cost memory and bandwidth, and the next program follows on anyway.

    Args:
        target: the chip.
        programs: programs without splitting.
        tiles: key tiles of a full buffer.
        resident: programs of this kernel that one processor holds at a time.
    """
    at_once = target.processors * resident
    if programs >= at_once or tiles <= SPLIT_TILES:
        return 1
    most = torch.sym_min(MOST_SPLITS, _ceil(tiles, SPLIT_TILES))
    if isinstance(programs, int) and isinstance(tiles, int):
        return _quickest_count(at_once, programs, tiles, int(most))
    # sizes that a graph leaves open are not searched over: as many splits as one wave holds, then none of them empty
    return _ceil(tiles, _ceil(tiles, torch.sym_min(most, at_once // programs)))


@functools.lru_cache(maxsize=4096)
def _quickest_count(at_once: int, programs: int, tiles: int, most: int) -> int:
    """The smallest of the counts up to ``most`` without an empty split that take fewest steps."""
    shares = {count: _ceil(tiles, count) for count in range(1, most + 1)}
    steps = {
        count: _ceil(programs * count, at_once) * share
        for count, share in shares.items()
        if _ceil(tiles, share) == count
    }
    return min(steps, key=lambda count: (steps[count], count))


def _ceil(value: int, divisor: int) -> int:
    """``value / divisor``, rounded up; works for symbolic sizes."""
    return (value + divisor - 1) // divisor


def launch_splits(
    kernel: Any,
    inputs: tuple[Tensor, ...],
    out: Tensor,
    lse: Tensor,
    *,
    config: SplitConfig,
    groups: int,
    rows: int,
    capacity: int,
    sizes: tuple[int | Tensor, ...],
    **constants: Any,
) -> None:
    """Run a split-KV kernel over as many splits of the slots as fill the chip, and combine their results.

    Args:
        kernel: takes ``inputs``, partial out and lse, ``sizes``, the capacity, the row tiles of a group, the splits,
            all strides of ``inputs``, the split strides of the partial results, then ``constants``.
        inputs: the tensors it reads, in its order.
        out: receives the result, ``[B, H, Sq, Dv]``, contiguous.
        lse: receives the log-sum-exp, ``[B, H, Sq]``, contiguous.
        config: tile and launch options.
        groups: sets of rows that read the same slots.
        rows: (query, head) rows of one group.
        capacity: slots of the buffer.
        sizes: what else the kernel is told at run time, tensors without their strides.
        constants: what it is compiled for, tile sizes aside.
    """
    row_tiles = triton.cdiv(rows, config.rows)
    programs = groups * row_tiles
    tiles = triton.cdiv(capacity, config.keys)
    splits = split_count(_launch.target_of(out), programs, tiles, config.resident)
    part_out, part_lse = split_buffers(out, lse, splits)
    _launch.kernel(kernel)[(programs, splits)](
        *inputs,
        part_out,
        part_lse,
        *sizes,
        capacity,
        row_tiles,
        splits,
        *(stride for tensor in inputs for stride in tensor.stride()),
        part_out.stride(0),
        part_lse.stride(0),
        **constants,
        BLOCK_M=config.rows,
        BLOCK_N=config.keys,
        **config.options(),
    )
    if splits != 1:
        combine(part_out, part_lse, out, lse)


def split_buffers(out: Tensor, lse: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """Where the split kernel writes: the results themselves with one split, else float32 partial results."""
    if splits == 1:
        return out[None], lse[None]
    return out.new_empty(splits, *out.shape, dtype=torch.float32), lse.new_empty(splits, *lse.shape)


def combine(part_out: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge ``part_out [splits, ..., Dv]`` and ``part_lse [splits, ...]`` into ``out`` and ``lse``, all contiguous."""
    value_dim = int(out.shape[-1])
    block = _launch.next_power_of_two(value_dim, 16)
    _launch.kernel(combine_kernel)[(lse.numel(),)](
        part_out,
        part_lse,
        out,
        lse,
        part_out.shape[0],
        part_out.stride(0),
        part_lse.stride(0),
        DV=value_dim,
        BLOCK_D=block,
        BLOCK_S=min(32, 4096 // block),  # at most 4,096 numbers per step: 32 per thread
        num_warps=4,
    )
