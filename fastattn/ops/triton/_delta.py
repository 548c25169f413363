"""What attention's backward kernels need of every query: ``delta``, its output times that one's gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.ops.triton import _launch
from fastattn.ops.triton._tile import LOG2E, load_row, load_tile


@triton.jit
def delta_kernel(
    grad_out,
    out,
    delta,
    heads,
    queries,
    rows,
    sgb,
    sgh,
    sgt,
    sgd,
    DV: tl.constexpr,
    DV1: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """delta_i = sum_d do_id o_id for a tile of (batch, head, query) rows."""
    o_row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_row = o_row < rows
    o_head = o_row // queries
    p_grad = grad_out + o_head // heads * sgb + o_head % heads * sgh + o_row % queries * sgt
    o_d = tl.arange(0, DV1)
    # [M, DV1]
    b_grad = load_row(p_grad, o_d, sgd, m_row, DV, DV1).to(tl.float32)
    b_out = load_tile(out, o_row, o_d, DV, 1, m_row, DV, DV1).to(tl.float32)
    tl.store(delta + o_row, tl.sum(b_grad * b_out, 1), mask=m_row)


@triton.jit
def load_statistics(lse, delta, o_out, m_row):
    """lse in base 2, +inf for rows that see no key (their p becomes 0), and delta."""
    b_lse = tl.load(lse + o_out, mask=m_row, other=float("inf"))
    b_lse = tl.where(b_lse == float("-inf"), float("inf"), b_lse) * LOG2E
    return b_lse, tl.load(delta + o_out, mask=m_row, other=0.0)


def delta_of(grad_out: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """``sum(grad_out * out)`` over the columns ``[B, H, Sq, Dv]``, of ``lse``'s shape and dtype."""
    _, heads, queries, value_dim = out.shape
    delta, rows, columns = torch.empty_like(lse), lse.numel(), _launch.next_power_of_two(value_dim, 16)
    if rows != 0:
        block = max(1, 4096 // columns)  # 4,096 numbers per program: 32 per thread
        _launch.kernel(delta_kernel)[(triton.cdiv(rows, block),)](
            grad_out, out, delta, heads, queries, rows, *grad_out.stride(), DV=int(value_dim), DV1=columns,
            BLOCK_M=block, num_warps=4,
        )  # fmt: skip
    return delta
