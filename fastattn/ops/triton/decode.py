"""Attention of a few new queries over a cache: split-KV kernel, combine kernel, launcher."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.ops._features import add_sinks
from fastattn.ops._outputs import empty_out_and_lse
from fastattn.ops.triton import _launch
from fastattn.ops.triton._features import to_logits
from fastattn.ops.triton._split import launch_splits, split_range, window_range
from fastattn.ops.triton._tile import load_row, load_tile, softmax_end, softmax_step
from fastattn.ops.triton.configs import OfflineCase, decode_config

LARGEST_DIM = 512


@triton.jit
def decode_kernel(
    query,
    key,
    value,
    lengths,
    out,
    lse,
    kv_heads,
    tokens,
    window,
    slopes,
    positions,
    capacity,
    row_tiles,
    splits,
    sqb,
    sqh,
    sqt,
    sqd,
    skb,
    skh,
    skt,
    skd,
    svb,
    svh,
    svt,
    svd,
    slb,
    slh,
    sos,
    sls,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DK1: tl.constexpr,
    DK2: tl.constexpr,
    DV: tl.constexpr,
    DV1: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: one split of the slots for one row tile of one group."""
    i_tile = tl.program_id(0) % row_tiles
    i_bh = tl.program_id(0) // row_tiles
    i_split = tl.program_id(1)
    i_b = (i_bh // kv_heads).to(tl.int64)
    i_h = (i_bh % kv_heads).to(tl.int64)

    o_row = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    m_row = o_row < tokens * GROUP
    o_query = o_row // GROUP
    o_head = i_h * GROUP + o_row % GROUP
    o_d1 = tl.arange(0, DK1)
    o_dv = tl.arange(0, DV1)

    i_last = tl.minimum(i_tile * BLOCK_M + BLOCK_M, tokens * GROUP) - 1
    length = tl.load(lengths + i_b * slb + i_h * slh)
    length, first, last = split_range(
        length, capacity, tokens, i_last // GROUP, i_split, splits, CAUSAL=CAUSAL, BLOCK_N=BLOCK_N
    )
    if WINDOW:
        first, last = window_range(
            length, tokens, i_tile * BLOCK_M // GROUP, i_last // GROUP, window, i_split, splits, CAUSAL, BLOCK_N
        )
    o_limit = tl.zeros((BLOCK_M,), tl.int32) + length
    if CAUSAL:
        o_limit = length - tokens + 1 + o_query

    # where queries stand: at their own slots, or one past the newest
    o_position = o_limit - 1
    p_position = positions + (i_b * kv_heads + i_h) * capacity
    if HAS_POSITIONS:
        o_position = tl.load(p_position + o_position, mask=o_position >= 0, other=0)
    if not CAUSAL:
        o_position += 1
    b_slope = 0.0
    if HAS_SLOPES:
        b_slope = tl.load(slopes + o_head, mask=m_row, other=0.0)[:, None]

    p_query = query + i_b * sqb + o_head * sqh + o_query.to(tl.int64) * sqt
    # [M, DK1], [M, DK2]
    b_q1 = load_row(p_query, o_d1, sqd, m_row, DK if DK < DK1 else DK1, DK1)
    if DK2 > 0:
        o_d2 = DK1 + tl.arange(0, DK2)
        b_q2 = load_row(p_query, o_d2, sqd, m_row, DK, DK1 + DK2)
    p_key = key + i_b * skb + i_h * skh
    p_value = value + i_b * svb + i_h * svh

    b_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    b_sum = tl.zeros((BLOCK_M,), tl.float32)
    b_out = tl.zeros((BLOCK_M, DV1), tl.float32)
    for start in tl.range(first, last, BLOCK_N):
        o_slot = start + tl.arange(0, BLOCK_N)
        m_slot = o_slot < last
        # [N, DK1], [N, DK2]
        b_k1 = load_tile(p_key, o_slot, o_d1, skt, skd, m_slot, DK if DK < DK1 else DK1, DK1)
        b_score = tl.dot(b_q1, tl.trans(b_k1), input_precision="ieee")
        if DK2 > 0:
            b_k2 = load_tile(p_key + DK1 * skd, o_slot, o_d2 - DK1, skt, skd, m_slot, DK - DK1, DK2)
            b_score = tl.dot(b_q2, tl.trans(b_k2), b_score, input_precision="ieee")
        m_seen = m_slot[None, :] & (o_slot[None, :] < o_limit[:, None])
        o_where = o_slot
        if HAS_POSITIONS:
            o_where = tl.load(p_position + o_slot, mask=m_slot, other=0)
        b_distance = o_position[:, None] - o_where[None, :]
        if WINDOW:
            m_seen = m_seen & (b_distance < window)
        b_logit, _ = to_logits(b_score, b_slope, b_distance, SCALE, SOFTCAP, HAS_SLOPES)
        b_score = tl.where(m_seen, b_logit, float("-inf"))
        b_weight, b_max, b_sum, b_factor = softmax_step(b_score, b_max, b_sum)
        # [N, DV1]
        b_v = load_tile(p_value, o_slot, o_dv, svt, svd, m_slot, DV, DV1)
        b_out = tl.dot(b_weight.to(b_v.dtype), b_v, b_out * b_factor[:, None], input_precision="ieee")

    b_divisor, b_lse = softmax_end(b_max, b_sum)
    # rows of the output are (batch, head, query) triples; combine reads nothing but the lse of an empty split
    o_out = (i_b * kv_heads * GROUP + o_head) * tokens + o_query
    m_out = m_row & ((first < last) | (splits == 1))
    tl.store(lse + i_split.to(tl.int64) * sls + o_out, b_lse, mask=m_row)
    tl.store(
        out + i_split.to(tl.int64) * sos + o_out[:, None] * DV + o_dv[None, :],
        (b_out / b_divisor[:, None]).to(out.dtype.element_ty),
        mask=m_out[:, None] & (o_dv < DV)[None, :],
    )


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    scale: float,
    causal: bool,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Launcher of ``fastattn::decode_attention``."""
    _launch.check_dtype("decode_attention", "query", query)
    batch, heads, tokens, key_dim = query.shape
    kv_heads, capacity, value_dim = key.shape[1], key.shape[2], value.shape[3]
    _launch.check_dim("decode_attention", "query's head dim", key_dim, LARGEST_DIM)
    _launch.check_dim("decode_attention", "value's head dim", value_dim, LARGEST_DIM)
    out, lse = empty_out_and_lse(query, value_dim)
    if batch * heads * tokens == 0:
        return out, lse
    group = heads // kv_heads
    dk1, dk2 = _launch.split_columns(key_dim)
    dv1 = _launch.next_power_of_two(value_dim, 16)
    family = _launch.target_of(query).family
    launch_splits(
        decode_kernel,
        (query, key, value, lengths),
        out,
        lse,
        config=decode_config(family, group * tokens, (dk1 + dk2 + dv1) * query.itemsize, query.itemsize),
        groups=batch * kv_heads,
        rows=group * tokens,
        capacity=capacity,
        sizes=(
            kv_heads,
            tokens,
            window,
            query if alibi_slopes is None else alibi_slopes.float().contiguous(),
            query if positions is None else positions.contiguous(),
        ),
        SCALE=float(scale),
        CAUSAL=causal,
        WINDOW=window != 0,
        SOFTCAP=float(softcap),
        HAS_SLOPES=alibi_slopes is not None,
        HAS_POSITIONS=positions is not None and (window != 0 or alibi_slopes is not None),
        GROUP=int(group),
        DK=int(key_dim),
        DK1=dk1,
        DK2=dk2,
        DV=int(value_dim),
        DV1=dv1,
    )
    if sinks is not None:
        add_sinks(out, lse, sinks)
    return out, lse


def offline_cases() -> list[OfflineCase]:
    """Every shape class of the table: head dims times rows of a group."""

    def case(
        name: str,
        group: int,
        key_dim: int,
        value_dim: int,
        tokens: int = 1,
        dtype=torch.bfloat16,
        features: bool = False,
    ) -> OfflineCase:
        def launch() -> object:
            def empty(*shape: int) -> Tensor:
                return torch.empty(shape, dtype=dtype, device="meta")

            lengths = torch.empty(2, 8, dtype=torch.int32, device="meta")
            query = empty(2, 8 * group, tokens, key_dim)
            key, value = empty(2, 8, 4096, key_dim), empty(2, 8, 4096, value_dim)
            if not features:
                return decode_attention(query, key, value, lengths, 0.1, True)
            heads = torch.empty(8 * group, device="meta")
            positions = torch.empty(2, 8, 4096, dtype=torch.int32, device="meta")
            return decode_attention(query, key, value, lengths, 0.1, True, 1024, 50.0, None, heads, positions)

        return OfflineCase(name, launch)

    cases = [
        case(f"decode_attention {dk}/{dv} rows {group * tokens}", group, dk, dv, tokens)
        for dk, dv in ((64, 64), (128, 128), (256, 256), (512, 512))
        for group, tokens in ((4, 1), (16, 2), (8, 8))
    ]
    cases += [case(f"decode_attention {dk}/{dv} rows 4", 4, dk, dv) for dk, dv in ((96, 96), (192, 128))]
    name = "decode_attention {0}/{0} rows 4 window, cap, slopes"
    cases += [case(name.format(dim), 4, dim, dim, features=True) for dim in (64, 128, 256)]
    for dim in (64, 128, 256, 512):
        cases.append(case(f"decode_attention {dim}/{dim} rows 4 float32", 4, dim, dim, dtype=torch.float32))
    return cases
