"""Pieces that the attention kernels share: masked tiles, one online-softmax step, the packing of rows.

Rows. The heads of a group attend to the same keys, so a tile's rows are (query, head of the group) pairs: row ``r`` is
query ``r // GROUP``, head ``r % GROUP``. Every key tile is then read once per group, and neighboring rows see nearly
the same keys.

Columns. A head dim is covered by two powers of two, ``D1 + D2`` (``_launch.split_columns``), ``D2 = 0`` where one does.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_row(p_row, o_col, stride_col, m_row, columns: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows at the 64-bit pointers ``p_row``, with zeros outside ``m_row`` (None: all rows) and beyond ``columns``."""
    # [ROWS, COLUMNS]
    pointers = p_row[:, None] + o_col.to(tl.int64)[None, :] * stride_col
    if m_row is None:
        if columns == COLUMNS:
            b_tile = tl.load(pointers)
        else:
            b_tile = tl.load(pointers, mask=(o_col < columns)[None, :], other=0.0)
    else:
        if columns == COLUMNS:
            b_tile = tl.load(pointers, mask=m_row[:, None], other=0.0)
        else:
            b_tile = tl.load(pointers, mask=m_row[:, None] & (o_col < columns)[None, :], other=0.0)
    return b_tile


@triton.jit
def load_tile(pointer, o_row, o_col, stride_row, stride_col, m_row, columns: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile with zeros outside ``m_row`` (None: all rows) and beyond ``columns``; offsets are 64-bit."""
    return load_row(pointer + o_row.to(tl.int64) * stride_row, o_col, stride_col, m_row, columns, COLUMNS)


@triton.jit
def softmax_step(b_score, b_max, b_sum):
    """One online-softmax step in base 2 over scores ``[M, N]``, -inf where masked.

    Returns the weights, the new maximum, the new sum and the factor for what was accumulated before. A row that has
    seen no key yet keeps a maximum of -inf; subtracting 0 instead keeps its weights at 0 rather than NaN.
    """
    b_new = tl.maximum(b_max, tl.max(b_score, 1))
    b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_weight = tl.exp2(b_score - b_base[:, None])
    b_factor = tl.exp2(b_max - b_base)
    return b_weight, b_new, b_sum * b_factor + tl.sum(b_weight, 1), b_factor


@triton.jit
def softmax_end(b_max, b_sum):
    """The divisor (1 for a row without keys) and the natural-log lse (-inf for it)."""
    b_divisor = tl.where(b_sum == 0.0, 1.0, b_sum)
    b_lse = tl.where(b_sum == 0.0, float("-inf"), (b_max + tl.log2(b_divisor)) * LN2)
    return b_divisor, b_lse
