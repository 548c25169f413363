"""Logits of Expected Attention: the mean and variance of what future queries will multiply each key to."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastattn.ops.triton import _launch

# What describes the future queries: their mean alone, mean and covariance, or samples.
MEAN, MOMENTS, SAMPLES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def wide_dot(b_key, b_matrix, b_acc):
    """``b_acc + b_key @ b_matrix`` to float32 accuracy, on matrix units where ``b_key`` is of half precision.

    ``b_matrix`` is float32 and is split into pieces that the units take exactly: three of bfloat16's 8 bits, or two of
    the 11 bits of TF32, which holds a float16 exactly.
    """
    if b_key.dtype == tl.bfloat16:
        b_high = b_matrix.to(tl.bfloat16)
        b_rest = b_matrix - b_high.to(tl.float32)
        b_middle = b_rest.to(tl.bfloat16)
        b_low = (b_rest - b_middle.to(tl.float32)).to(tl.bfloat16)
        b_acc = tl.dot(b_key, b_low, b_acc)
        b_acc = tl.dot(b_key, b_middle, b_acc)
        b_acc = tl.dot(b_key, b_high, b_acc)
    elif b_key.dtype == tl.float16:
        b_wide = b_key.to(tl.float32)
        b_high = (b_matrix.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        b_acc = tl.dot(b_wide, b_matrix - b_high, b_acc, input_precision="tf32")
        b_acc = tl.dot(b_wide, b_high, b_acc, input_precision="tf32")
    else:
        b_acc = tl.dot(b_key, b_matrix, b_acc, input_precision="ieee")
    return b_acc


@triton.jit
def load_part(p_key, o_c, o_d, stride_c, stride_d, m_c, D: tl.constexpr, BLOCK: tl.constexpr):
    """Columns ``o_d`` of the slots ``o_c``, zeros where masked and beyond ``D``; offsets are 64-bit."""
    # [C, BLOCK]
    pointers = p_key + o_c.to(tl.int64)[:, None] * stride_c + o_d.to(tl.int64)[None, :] * stride_d
    if D % BLOCK == 0:
        return tl.load(pointers, mask=m_c[:, None], other=0.0)
    return tl.load(pointers, mask=m_c[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit
def logits_kernel(
    key,
    lengths,
    positions,
    mean,
    matrix,
    logits,
    partial,
    heads,
    slots,
    tiles,
    columns,
    n_sink,
    min_length,
    skb,
    skh,
    skc,
    skd,
    smb,
    smh,
    smk,
    smn,
    SCALE: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: a tile of slots for ``HEADS`` of the ``GROUP`` query heads of a row.

    ``partial [query head, tile, 2]`` gets the tile's largest logit and its sum of exponentials relative to it.
    """
    i_row = (tl.program_id(0) // (GROUP // HEADS)).to(tl.int64)
    i_first = i_row * GROUP + (tl.program_id(0) % (GROUP // HEADS)) * HEADS
    i_tile = tl.program_id(1)
    i_b = i_row // heads
    length = tl.load(lengths + i_row)
    if length < min_length:
        return
    o_c = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    m_valid = (o_c < length) & (o_c < slots)
    b_position = tl.load(positions + i_row * slots + o_c, mask=m_valid, other=0)
    m_scored = m_valid & (b_position >= n_sink)
    p_key = key + i_b * skb + (i_row % heads) * skh
    o_k = tl.arange(0, BLOCK_K)
    o_n = tl.arange(0, BLOCK_N)
    for i_head in tl.range(i_first, i_first + HEADS):
        p_partial = partial + (i_head * tiles + i_tile) * 2
        p_mean = mean + i_head * D
        p_matrix = matrix + i_b * smb + (i_head - i_b * heads * GROUP) * smh
        b_z = tl.zeros((BLOCK_M,), tl.float32)
        b_square = tl.zeros((BLOCK_M,), tl.float32)  # SAMPLES: sum of squared deviations so far, b_z their mean
        if i_tile * BLOCK_M < length:
            if FORM == MEAN:
                for k in tl.range(0, D, BLOCK_K):
                    # [M, K], [K]
                    b_key = load_part(p_key, o_c, k + o_k, skc, skd, m_valid, D, BLOCK_K).to(tl.float32)
                    b_mean = tl.load(p_mean + k + o_k, mask=k + o_k < D, other=0.0)
                    b_z += tl.sum(b_key * (SCALE * b_mean)[None, :], 1)
            else:
                for n in tl.range(0, columns, BLOCK_N):
                    m_n = n + o_n < columns
                    b_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                    for k in tl.range(0, D, BLOCK_K):
                        # [M, K], [K, N]
                        b_key = load_part(p_key, o_c, k + o_k, skc, skd, m_valid, D, BLOCK_K)
                        p_tile = (k + o_k).to(tl.int64)[:, None] * smk + (n + o_n).to(tl.int64)[None, :] * smn
                        m_tile = (k + o_k < D)[:, None] & m_n[None, :]
                        b_acc = wide_dot(b_key, tl.load(p_matrix + p_tile, mask=m_tile, other=0.0), b_acc)
                    if FORM == MOMENTS:
                        # [M, N], [N]
                        b_key = load_part(p_key, o_c, n + o_n, skc, skd, m_valid, D, BLOCK_N).to(tl.float32)
                        b_mean = tl.load(p_mean + n + o_n, mask=m_n, other=0.0)
                        b_z += tl.sum(b_key * ((SCALE * b_mean)[None, :] + (SCALE * SCALE / 2) * b_acc), 1)
                    else:
                        # merge mean and squared deviations of this block of samples with those of the ones before
                        count = tl.minimum(columns - n, BLOCK_N)
                        b_mean = tl.sum(b_acc, 1) / count
                        b_deviation = tl.where(m_n[None, :], b_acc - b_mean[:, None], 0.0)
                        b_shift = b_mean - b_z
                        b_z += b_shift * (count / (n + count))
                        b_square += tl.sum(b_deviation * b_deviation, 1) + b_shift * b_shift * (
                            n * (count / (n + count))
                        )
                if FORM == SAMPLES:
                    b_z = SCALE * b_z + (SCALE * SCALE / 2) * (b_square / columns)
        b_z = tl.where(m_scored, b_z, float("-inf"))
        peak = tl.max(b_z, 0)
        total = tl.sum(tl.exp(b_z - tl.where(peak == float("-inf"), 0.0, peak)), 0)
        tl.store(logits + i_head * slots + o_c, b_z, mask=o_c < slots)
        tl.store(p_partial, peak)
        tl.store(p_partial + 1, total)


def logits_tile(family: str, dtype: torch.dtype, form: int, dim: int, columns: int) -> dict[str, int]:
    """Slots, columns and depth of a tile, warps and stages of the first kernel."""
    if form == MEAN.value:
        depth = min(128, _launch.next_power_of_two(dim, 16))
        return {"BLOCK_M": 64, "BLOCK_N": 16, "BLOCK_K": depth, "num_warps": 4, "num_stages": 2}
    if dtype == torch.float32:  # no matrix units: small tiles, or the products spill
        rows, most_columns, depth, warps = 32, 32, 32, 8
    elif family in ("sm_80", "sm_86"):  # the pieces of a larger tile spill
        rows, most_columns, depth, warps = 64, 32, 16, 4
    elif family == "sm_100":  # likewise
        rows, most_columns, depth, warps = 64, 64, 16, 4
    else:  # small enough that two or three programs share a processor: one splits its tile while another multiplies
        rows, most_columns, depth, warps = 64, 64, 32, 4
    block_n = min(most_columns, _launch.next_power_of_two(columns, 16)) if isinstance(columns, int) else most_columns
    depth = min(depth, _launch.next_power_of_two(dim, 16))
    return {"BLOCK_M": rows, "BLOCK_N": block_n, "BLOCK_K": depth, "num_warps": warps, "num_stages": 2}
