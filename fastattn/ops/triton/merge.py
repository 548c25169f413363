"""Combining partial attention results over disjoint keys: kernel and launcher."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.ops.triton import _launch
from fastattn.ops.triton._tile import load_row
from fastattn.ops.triton.configs import OfflineCase

LARGEST_DIM = 1024


@triton.jit
def merge_kernel(
    out_one,
    out_two,
    lse_one,
    lse_two,
    out,
    lse,
    heads,
    tokens,
    rows,
    sab,
    sah,
    sat,
    sad,
    sbb,
    sbh,
    sbt,
    sbd,
    slb,
    slh,
    slt,
    smb,
    smh,
    smt,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: a tile of (batch, head, query) rows of two parts. A part with lse -inf is neutral in any case."""
    o_row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    m_row = o_row < rows
    o_token, o_bh = o_row % tokens, o_row // tokens
    o_head, o_b = o_bh % heads, o_bh // heads
    b_one = tl.load(lse_one + o_b * slb + o_head * slh + o_token * slt, mask=m_row, other=float("-inf"))
    b_two = tl.load(lse_two + o_b * smb + o_head * smh + o_token * smt, mask=m_row, other=float("-inf"))
    b_max = tl.maximum(b_one, b_two)
    b_base = tl.where(b_max == float("-inf"), 0.0, b_max)
    w_one, w_two = tl.exp(b_one - b_base), tl.exp(b_two - b_base)
    b_sum = w_one + w_two
    b_divisor = tl.where(b_sum == 0.0, 1.0, b_sum)
    # [R, D]
    o_d = tl.arange(0, BLOCK_D)
    p_one = out_one + o_b * sab + o_head * sah + o_token * sat
    p_two = out_two + o_b * sbb + o_head * sbh + o_token * sbt
    b_out = load_row(p_one, o_d, sad, m_row & (b_one > float("-inf")), D, BLOCK_D).to(tl.float32) * w_one[:, None]
    b_out += load_row(p_two, o_d, sbd, m_row & (b_two > float("-inf")), D, BLOCK_D).to(tl.float32) * w_two[:, None]
    m_out = m_row[:, None] & (o_d < D)[None, :]
    tl.store(out + o_row[:, None] * D + o_d[None, :], (b_out / b_divisor[:, None]).to(out.dtype.element_ty), mask=m_out)
    tl.store(lse + o_row, tl.where(b_sum == 0.0, float("-inf"), b_max + tl.log(b_divisor)), mask=m_row)


def merge_attention(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Launcher of ``fastattn::merge_attention``: two parts a launch, the rest folded in one by one.

    Two parts (cache and new tokens) are what the library merges; intermediate results of more stay in float32.
    """
    _launch.check_dtype("merge_attention", "outs", outs[0])
    _launch.check_dim("merge_attention", "outs' head dim", outs[0].shape[3], LARGEST_DIM)
    part_out, part_lse = outs[0], lses[0]
    if len(outs) == 1:
        seen = (part_lse > float("-inf"))[..., None]
        return torch.where(seen, part_out, 0.0).contiguous(), part_lse.clone(memory_format=torch.contiguous_format)
    for index in range(1, len(outs)):
        last = index == len(outs) - 1
        part_out, part_lse = _merge_two(part_out, part_lse, outs[index], lses[index], outs[0].dtype if last else None)
    return part_out, part_lse


def _merge_two(
    out_one: Tensor, lse_one: Tensor, out_two: Tensor, lse_two: Tensor, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """The merge of two parts in ``dtype`` (None: float32)."""
    batch, heads, tokens, dim = out_two.shape
    out = out_two.new_empty(out_two.shape, dtype=dtype or torch.float32)
    lse = lse_two.new_empty(lse_two.shape)
    rows = batch * heads * tokens
    if rows == 0:
        return out, lse
    block_d = _launch.next_power_of_two(int(dim), 16)
    block = max(1, 4096 // block_d)  # 4,096 numbers per program: 32 per thread
    _launch.kernel(merge_kernel)[(triton.cdiv(rows, block),)](
        out_one,
        out_two,
        lse_one,
        lse_two,
        out,
        lse,
        heads,
        tokens,
        rows,
        *out_one.stride(),
        *out_two.stride(),
        *lse_one.stride(),
        *lse_two.stride(),
        D=int(dim),
        BLOCK_R=block,
        BLOCK_D=block_d,
        num_warps=4,
    )
    return out, lse


def offline_cases() -> list[OfflineCase]:
    """Narrow and wide heads."""

    def case(dim: int) -> OfflineCase:
        def launch() -> object:
            outs = [torch.empty(2, 32, 4, dim, dtype=torch.bfloat16, device="meta") for _ in range(2)]
            return merge_attention(outs, [torch.empty(2, 32, 4, device="meta") for _ in range(2)])

        return OfflineCase(f"merge_attention {dim}", launch)

    return [case(128), case(512)]
