"""Knorm and KeyDiff on a device; Expected Attention has a file of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.ops import _formats
from fastattn.ops.triton import _launch
from fastattn.ops.triton._slots import block_shape, slot_chunks
from fastattn.ops.triton._tile import load_tile
from fastattn.ops.triton.configs import OfflineCase
from fastattn.ops.triton.expected_attention import score_expected_attention

__all__ = ["score_expected_attention", "score_key_diff", "score_knorm"]

# Every program of KeyDiff's second pass adds up the first pass's partial sums: more of them fill a chip better, but
# cost more to read than the keys themselves.
MOST_PARTIAL_ANCHORS = 64


@triton.jit
def knorm_kernel(
    key,
    lengths,
    score,
    heads,
    slots,
    chunk,
    min_length,
    skb,
    skh,
    skc,
    skd,
    D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: a chunk of a row's slots."""
    i_row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + i_row)
    if length < min_length:
        return
    p_key = key + (i_row // heads) * skb + (i_row % heads) * skh
    first = tl.program_id(1) * chunk
    last = tl.minimum(first + chunk, slots)
    o_d = tl.arange(0, BLOCK_D)
    for start in tl.range(first, last, BLOCK_C):
        o_c = start + tl.arange(0, BLOCK_C)
        m_valid = (o_c < length) & (o_c < last)
        b_key = load_tile(p_key, o_c, o_d, skc, skd, m_valid, D, BLOCK_D).to(tl.float32)
        b_norm = tl.sqrt_rn(tl.sum(b_key * b_key, 1))
        tl.store(score + i_row * slots + o_c, tl.where(m_valid, -b_norm, float("-inf")), mask=o_c < last)


@triton.jit
def key_diff_anchor_kernel(
    key,
    lengths,
    partial,
    heads,
    slots,
    chunk,
    chunks,
    min_length,
    skb,
    skh,
    skc,
    skd,
    D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: the sum of the unit vectors of a chunk, ``partial [row, chunk, D]``."""
    i_row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + i_row)
    if length < min_length:
        return
    p_key = key + (i_row // heads) * skb + (i_row % heads) * skh
    first = tl.program_id(1) * chunk
    last = tl.minimum(tl.minimum(first + chunk, slots), length)
    o_d = tl.arange(0, BLOCK_D)
    b_sum = tl.zeros((BLOCK_D,), tl.float32)
    for start in tl.range(first, last, BLOCK_C):
        o_c = start + tl.arange(0, BLOCK_C)
        b_key = load_tile(p_key, o_c, o_d, skc, skd, o_c < last, D, BLOCK_D).to(tl.float32)
        b_norm = tl.sqrt_rn(tl.sum(b_key * b_key, 1))
        b_sum += tl.sum(b_key / tl.where(b_norm == 0.0, 1.0, b_norm)[:, None], 0)
    tl.store(partial + (i_row * chunks + tl.program_id(1)) * D + o_d, b_sum, mask=o_d < D)


@triton.jit
def key_diff_kernel(
    key,
    lengths,
    partial,
    score,
    heads,
    slots,
    chunk,
    chunks,
    min_length,
    skb,
    skh,
    skc,
    skd,
    D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """One program: a chunk of a row's slots. Only the anchor's direction matters: its sum does as well as its mean."""
    i_row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + i_row)
    if length < min_length:
        return
    o_d = tl.arange(0, BLOCK_D)
    b_anchor = tl.zeros((BLOCK_D,), tl.float32)
    for start in tl.range(0, chunks, BLOCK_S):
        o_s = start + tl.arange(0, BLOCK_S)
        # [S, D]
        b_partial = tl.load(
            partial + (i_row * chunks + o_s)[:, None] * D + o_d[None, :],
            mask=(o_s < chunks)[:, None] & (o_d < D)[None, :],
            other=0.0,
        )
        b_anchor += tl.sum(b_partial, 0)
    anchor_norm = tl.sqrt_rn(tl.sum(b_anchor * b_anchor, 0))
    b_anchor = b_anchor / tl.where(anchor_norm == 0.0, 1.0, anchor_norm)

    p_key = key + (i_row // heads) * skb + (i_row % heads) * skh
    first = tl.program_id(1) * chunk
    last = tl.minimum(first + chunk, slots)
    for start in tl.range(first, last, BLOCK_C):
        o_c = start + tl.arange(0, BLOCK_C)
        m_valid = (o_c < length) & (o_c < last)
        b_key = load_tile(p_key, o_c, o_d, skc, skd, m_valid, D, BLOCK_D).to(tl.float32)
        b_norm = tl.sqrt_rn(tl.sum(b_key * b_key, 1))
        b_cosine = tl.sum(b_key * b_anchor[None, :], 1) / tl.where(b_norm == 0.0, 1.0, b_norm)
        tl.store(score + i_row * slots + o_c, tl.where(m_valid, -b_cosine, float("-inf")), mask=o_c < last)


def score_knorm(key: Tensor, lengths: Tensor, min_length: int, key_scale: Tensor | None = None) -> Tensor:
    """See :func:`fastattn.ops.score_knorm`."""
    key = _formats.numbers(key, key_scale)
    _launch.check_dtype("score_knorm", "key", key)
    batch, heads, slots, _ = key.shape
    dim = int(key.shape[3])
    block_c, block_d = block_shape("score_knorm", "a head dim", dim)
    score = key.new_empty(batch, heads, slots, dtype=torch.float32)
    if score.numel() == 0:
        return score
    chunks, chunk = slot_chunks(key, batch * heads, slots, block_c)
    _launch.kernel(knorm_kernel)[(batch * heads, chunks)](
        key,
        lengths.contiguous(),
        score,
        heads,
        slots,
        chunk,
        min_length,
        *key.stride(),
        D=dim,
        BLOCK_C=block_c,
        BLOCK_D=block_d,
        num_warps=4,
        num_stages=2,
    )
    return score


def score_key_diff(key: Tensor, lengths: Tensor, min_length: int, key_scale: Tensor | None = None) -> Tensor:
    """See :func:`fastattn.ops.score_key_diff`."""
    key = _formats.numbers(key, key_scale)
    _launch.check_dtype("score_key_diff", "key", key)
    batch, heads, slots, _ = key.shape
    dim = int(key.shape[3])
    block_c, block_d = block_shape("score_key_diff", "a head dim", dim)
    score = key.new_empty(batch, heads, slots, dtype=torch.float32)
    if score.numel() == 0:
        return score
    lengths = lengths.contiguous()
    chunks, chunk = slot_chunks(key, batch * heads, slots, block_c, most=MOST_PARTIAL_ANCHORS)
    partial = key.new_empty(batch * heads, chunks, dim, dtype=torch.float32)
    grid = (batch * heads, chunks)
    sizes = (heads, slots, chunk, chunks, min_length, *key.stride())
    tile = {"D": dim, "BLOCK_C": block_c, "BLOCK_D": block_d, "num_warps": 4, "num_stages": 2}
    _launch.kernel(key_diff_anchor_kernel)[grid](key, lengths, partial, *sizes, **tile)
    _launch.kernel(key_diff_kernel)[grid](key, lengths, partial, score, *sizes, BLOCK_S=max(1, 2048 // block_d), **tile)
    return score


def offline_cases() -> list[OfflineCase]:
    """Head dims of the usual models, one that is no power of two, and a latent cache's."""
    return [
        score_case(f"{operator.__name__} {dim}", operator, heads, dim)
        for operator in (score_knorm, score_key_diff)
        for heads, dim in ((8, 64), (8, 96), (8, 128), (8, 256), (1, 576))
    ]


def score_case(name: str, operator: Callable[..., Tensor], heads: int, dim: int) -> OfflineCase:
    """``operator`` over a cache of 4,352 slots."""

    def launch() -> object:
        key = torch.empty(4, heads, 4352, dim, dtype=torch.bfloat16, device="meta")
        return operator(key, torch.empty(4, heads, dtype=torch.int32, device="meta"), 0)

    return OfflineCase(name, launch)
