"""Codes of quantised vectors in a kernel: read as numbers in registers, and chosen for new vectors.

Integer arithmetic alone reads and writes e4m3fn, so that chips without instructions for it do too. A byte of int4 holds
numbers ``j`` and ``j + 16`` of a group of 32: a tile of bytes is two tiles of numbers, low and high halves, which meet
queries and outputs at the columns of :func:`low_columns` and 16 beyond.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastattn.ops.triton._tile import load_tile

# What the numbers of from_e4m3 lack, for whoever multiplies by the scale.
E4M3_FACTOR = tl.constexpr(256.0)
ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2**23: a small number added to it is rounded half to even


@triton.jit
def from_e4m3(b_bits):
    """float16 numbers, 1/256 of those whose e4m3fn bits the bytes are: exact, float16's exponents being biased by 8
    more."""
    b_bits = b_bits.to(tl.uint16)
    b_half = ((b_bits & 0x80) << 8) | ((b_bits & 0x7F) << 7)
    b_half = tl.where((b_bits & 0x7F) == 0x7F, 0x7E00, b_half).to(tl.uint16)
    return b_half.to(tl.float16, bitcast=True)


@triton.jit
def to_e4m3(b_x):
    """e4m3fn bits of float32 numbers up to 448 in magnitude, rounded half to even."""
    b_bits = b_x.to(tl.uint32, bitcast=True)
    b_most = b_bits & 0x7FFFFFFF
    # a carry out of the mantissa raises the exponent, as it should; below 2**-6 codes are multiples of 2**-9
    b_normal = ((b_most + 0x7FFFF + ((b_most >> 20) & 1)) >> 20) - (120 << 3)
    b_small = (tl.abs(b_x) * 512.0 + ROUNDING).to(tl.uint32, bitcast=True) & 0xF
    b_code = tl.where(tl.abs(b_x) < 0.015625, b_small, b_normal)
    return (b_code | ((b_bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def low_columns(o_byte):
    """The number in the low half of byte ``o_byte``; the one in its high half stands 16 further."""
    return (o_byte // 16) * 32 + o_byte % 16


@triton.jit
def load_numbers(
    p_codes,
    o_slot,
    o_col,
    stride_slot,
    stride_col,
    m_slot,
    DTYPE: tl.constexpr,
    FP8: tl.constexpr,
    columns: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Codes of a byte each as numbers, not yet multiplied by their scale (nor by E4M3_FACTOR)."""
    # [N, COLUMNS]
    b_codes = load_tile(p_codes, o_slot, o_col, stride_slot, stride_col, m_slot, columns, COLUMNS)
    if FP8:
        b_codes = from_e4m3(b_codes)
    return b_codes.to(DTYPE)


@triton.jit
def load_halves(
    p_codes,
    p_scale,
    o_slot,
    o_byte,
    stride_slot,
    stride_byte,
    stride_scale_slot,
    stride_group,
    m_slot,
    DTYPE: tl.constexpr,
    bytes: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Codes of int4 times their groups' scales: low and high halves ``[N, BYTES]``."""
    GROUPS: tl.constexpr = BYTES // 16
    b_codes = load_tile(p_codes, o_slot, o_byte, stride_slot, stride_byte, m_slot, bytes, BYTES)
    # [N, GROUPS], then as wide as the codes
    o_group = tl.arange(0, GROUPS)
    b_scale = load_tile(p_scale, o_slot, o_group, stride_scale_slot, stride_group, m_slot, bytes // 16, GROUPS)
    b_scale = tl.broadcast_to(b_scale.to(tl.float32)[:, :, None], (b_codes.shape[0], GROUPS, 16))
    b_scale = tl.reshape(b_scale, (b_codes.shape[0], BYTES))
    b_low = ((b_codes & 15).to(tl.int8) - 8).to(tl.float32) * b_scale
    b_high = ((b_codes >> 4).to(tl.int8) - 8).to(tl.float32) * b_scale
    return b_low.to(DTYPE), b_high.to(DTYPE)
