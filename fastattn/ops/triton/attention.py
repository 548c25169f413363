"""Attention over full keys and values, forward: kernel and launcher."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.ops._outputs import empty_out_and_lse
from fastattn.ops.triton import _features, _launch
from fastattn.ops.triton._features import add_sink, packed_row, to_logits
from fastattn.ops.triton._tile import load_row, load_tile, softmax_end, softmax_step
from fastattn.ops.triton.configs import OfflineCase, attention_config

LARGEST_DIM = 256


@triton.jit
def key_range(key_start, lengths, i_b, keys, HAS_START: tl.constexpr, HAS_LENGTHS: tl.constexpr):
    """``[first, end)`` of a row's valid keys, within the tensor."""
    first = 0
    end = keys
    if HAS_START:
        first = tl.maximum(tl.load(key_start + i_b), 0)
    if HAS_LENGTHS:
        end = tl.minimum(tl.load(lengths + i_b), keys)
    return first, end


@triton.jit
def attend_tiles(
    b_q1,
    b_q2,
    p_key,
    p_value,
    b_max,
    b_sum,
    b_out,
    o_limit,
    o_position,
    b_slope,
    window,
    first,
    last,
    skt,
    skd,
    svt,
    svd,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    SCALE: tl.constexpr,
    DK: tl.constexpr,
    DK1: tl.constexpr,
    DK2: tl.constexpr,
    DV: tl.constexpr,
    DV1: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Online softmax over the key tiles of ``[first, last)``; unmasked tiles are whole and seen by every row."""
    o_d1 = tl.arange(0, DK1)
    o_dv = tl.arange(0, DV1)
    for start in tl.range(first, last, BLOCK_N):
        o_key = start + tl.arange(0, BLOCK_N)
        m_key = o_key < last if MASKED else None
        # [N, DK1], [N, DK2]
        b_k1 = load_tile(p_key, o_key, o_d1, skt, skd, m_key, DK if DK < DK1 else DK1, DK1)
        b_score = tl.dot(b_q1, tl.trans(b_k1), input_precision="ieee")
        if DK2 > 0:
            b_k2 = load_tile(p_key + DK1 * skd, o_key, tl.arange(0, DK2), skt, skd, m_key, DK - DK1, DK2)
            b_score = tl.dot(b_q2, tl.trans(b_k2), b_score, input_precision="ieee")
        b_distance = o_position[:, None] - o_key[None, :] if HAS_SLOPES else 0
        b_score, _ = to_logits(b_score, b_slope[:, None], b_distance, SCALE, SOFTCAP, HAS_SLOPES)
        if MASKED:
            b_score = tl.where(o_key[None, :] < o_limit[:, None], b_score, float("-inf"))
        if WINDOW:
            b_score = tl.where(o_key[None, :] > (o_position - window)[:, None], b_score, float("-inf"))
        b_weight, b_max, b_sum, b_factor = softmax_step(b_score, b_max, b_sum)
        # [N, DV1]
        b_v = load_tile(p_value, o_key, o_dv, svt, svd, m_key, DV, DV1)
        b_out = tl.dot(b_weight.to(b_v.dtype), b_v, b_out * b_factor[:, None], input_precision="ieee")
    return b_max, b_sum, b_out


@triton.jit
def attention_kernel(
    query,
    key,
    value,
    key_start,
    lengths,
    sinks,
    slopes,
    cu_seqlens_q,
    cu_seqlens_k,
    tiles,
    out,
    lse,
    kv_heads,
    queries,
    keys,
    row_tiles,
    window,
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
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_START: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    PACKED: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DK1: tl.constexpr,
    DK2: tl.constexpr,
    DV: tl.constexpr,
    DV1: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: one tile of (query, head of the group) rows. The last tile, causally the longest, starts first."""
    i_tile = row_tiles - 1 - tl.program_id(0) % row_tiles
    i_bh = tl.program_id(0) // row_tiles
    i_b = (i_bh // kv_heads).to(tl.int64)
    i_h = (i_bh % kv_heads).to(tl.int64)
    tokens = queries
    if PACKED:
        i_tile, q_first, queries, k_first, keys = packed_row(tiles, cu_seqlens_q, cu_seqlens_k, i_tile)
        query += q_first * sqt
        key += k_first * skt
        value += k_first * svt
    o_row = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    m_row = o_row < queries * GROUP
    o_query = o_row // GROUP
    o_head = i_h * GROUP + o_row % GROUP

    # keys [first, full) are seen by every row of the tile, [full, end) by some
    first, end = key_range(key_start, lengths, i_b, keys, HAS_START, HAS_LENGTHS)
    full = end
    o_limit = tl.zeros((BLOCK_M,), tl.int32) + end
    if CAUSAL:
        i_last = (tl.minimum(i_tile * BLOCK_M + BLOCK_M, queries * GROUP) - 1) // GROUP
        end = tl.minimum(end, i_last + keys - queries + 1)
        full = tl.minimum(end, i_tile * BLOCK_M // GROUP + keys - queries + 1)
        o_limit = tl.minimum(o_limit, o_query + keys - queries + 1)
    if PACKED:
        end = tl.where(i_tile * BLOCK_M < queries * GROUP, end, 0)
    if WINDOW:  # the tiles at both ends of a window are masked, and a window has few between them
        first = tl.maximum(first, i_tile * BLOCK_M // GROUP + keys - queries - window + 1)
        full = first
    else:
        full = first + tl.maximum(full - first, 0) // BLOCK_N * BLOCK_N
    o_position = o_query + keys - queries
    b_slope = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_SLOPES:
        b_slope = tl.load(slopes + o_head, mask=m_row, other=0.0)

    # [M, DK1], [M, DK2]
    p_query = query + i_b * sqb + o_head * sqh + o_query.to(tl.int64) * sqt
    b_q1 = load_row(p_query, tl.arange(0, DK1), sqd, m_row, DK if DK < DK1 else DK1, DK1)
    b_q2 = b_q1
    if DK2 > 0:
        b_q2 = load_row(p_query + DK1 * sqd, tl.arange(0, DK2), sqd, m_row, DK - DK1, DK2)
    p_key = key + i_b * skb + i_h * skh
    p_value = value + i_b * svb + i_h * svh
    b_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    b_sum = tl.zeros((BLOCK_M,), tl.float32)
    b_out = tl.zeros((BLOCK_M, DV1), tl.float32)
    if not WINDOW:
        b_max, b_sum, b_out = attend_tiles(
            b_q1, b_q2, p_key, p_value, b_max, b_sum, b_out, o_limit, o_position, b_slope, window, first, full,
            skt, skd, svt, svd, MASKED=False, WINDOW=False, SOFTCAP=SOFTCAP, HAS_SLOPES=HAS_SLOPES,
            SCALE=SCALE, DK=DK, DK1=DK1, DK2=DK2, DV=DV, DV1=DV1, BLOCK_N=BLOCK_N,
        )  # fmt: skip
    b_max, b_sum, b_out = attend_tiles(
        b_q1, b_q2, p_key, p_value, b_max, b_sum, b_out, o_limit, o_position, b_slope, window, full, end,
        skt, skd, svt, svd, MASKED=True, WINDOW=WINDOW, SOFTCAP=SOFTCAP, HAS_SLOPES=HAS_SLOPES,
        SCALE=SCALE, DK=DK, DK1=DK1, DK2=DK2, DV=DV, DV1=DV1, BLOCK_N=BLOCK_N,
    )  # fmt: skip

    if HAS_SINKS:
        b_sink = tl.load(sinks + o_head, mask=m_row, other=0.0)
        b_max, b_sum, b_out = add_sink(b_max, b_sum, b_out, b_sink)
    b_divisor, b_lse = softmax_end(b_max, b_sum)
    # rows of the output are (batch, head, query) triples
    o_out = (i_b * kv_heads * GROUP + o_head) * tokens + o_query
    if PACKED:
        o_out += q_first
    o_dv = tl.arange(0, DV1)
    m_out = m_row[:, None] & (o_dv < DV)[None, :]
    tl.store(lse + o_out, b_lse, mask=m_row)
    tl.store(
        out + o_out[:, None] * DV + o_dv[None, :], (b_out / b_divisor[:, None]).to(out.dtype.element_ty), mask=m_out
    )


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    scale: float,
    key_start: Tensor | None,
    lengths: Tensor | None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Launcher of ``fastattn::attention``."""
    _launch.check_dtype("attention", "query", query)
    batch, heads, queries, key_dim = query.shape
    kv_heads, keys, value_dim = key.shape[1], key.shape[2], value.shape[3]
    _launch.check_dim("attention", "query's head dim", key_dim, LARGEST_DIM)
    _launch.check_dim("attention", "value's head dim", value_dim, LARGEST_DIM)
    out, lse = empty_out_and_lse(query, value_dim)
    if batch * heads * queries == 0:
        return out, lse
    group, family = heads // kv_heads, _launch.target_of(query).family
    (dk1, dk2), dv1 = _launch.split_columns(key_dim), _launch.next_power_of_two(value_dim, 16)
    by_score = bool(window) or softcap > 0 or alibi_slopes is not None or cu_seqlens_q is not None
    config = attention_config(family, group * queries, max(dk1 + dk2, dv1), query.itemsize, by_score)
    tiles, row_tiles = _features.map_tiles(cu_seqlens_q, queries, group, config.rows, query)
    _launch.kernel(attention_kernel)[(batch * kv_heads * row_tiles,)](
        query,
        key,
        value,
        query if key_start is None else key_start.contiguous(),
        query if lengths is None else lengths.contiguous(),
        *_features.tensors(query, sinks, alibi_slopes, cu_seqlens_q, cu_seqlens_k),
        tiles,
        out,
        lse,
        kv_heads,
        queries,
        keys,
        row_tiles,
        window,
        *(stride for tensor in (query, key, value) for stride in tensor.stride()),
        SCALE=float(scale),
        CAUSAL=causal,
        HAS_START=key_start is not None,
        HAS_LENGTHS=lengths is not None,
        **_features.switches(window, softcap, sinks, alibi_slopes, cu_seqlens_q),
        GROUP=int(group),
        DK=int(key_dim),
        DK1=dk1,
        DK2=dk2,
        DV=int(value_dim),
        DV1=dv1,
        BLOCK_M=config.rows,
        BLOCK_N=config.keys,
        **config.options(),
    )
    return out, lse


def offline_cases() -> list[OfflineCase]:
    """Every shape class of the table."""

    def case(name: str, key_dim: int, value_dim: int, tokens: int = 4096, causal: bool = True, dtype=torch.bfloat16,
             window: int = 0, softcap: float = 0.0, per_head: bool = False, packed: bool = False):  # fmt: skip
        def launch() -> object:
            def empty(heads: int, dim: int) -> Tensor:
                return torch.empty(2, heads, tokens, dim, dtype=dtype, device="meta")

            bounds = torch.empty(2, dtype=torch.int32, device="meta")
            heads = torch.empty(32, device="meta") if per_head else None
            rows = torch.empty(5, dtype=torch.int32, device="meta") if packed else None
            start, end = (None, None) if packed else (bounds, bounds)
            query, key, value = empty(32, key_dim), empty(8, key_dim), empty(8, value_dim)
            if packed:
                query, key, value = query[:1], key[:1], value[:1]
            return attention(query, key, value, causal, 0.1, start, end, window, softcap, heads, heads, rows, rows)

        return OfflineCase(f"attention {name}", launch)

    dims = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
    return [
        *(case(f"{dk}/{dv}", dk, dv) for dk, dv in dims),
        case("128/128 not causal", 128, 128, causal=False),
        *(case(f"{dk}/{dv} few rows", dk, dv, tokens=16) for dk, dv in dims[2:]),
        *(
            case(f"{dim}/{dim} window, cap, sinks, slopes", dim, dim, window=1024, softcap=50.0, per_head=True)
            for dim in (64, 128, 256)
        ),
        case("128/128 packed", 128, 128, packed=True),
        case("128/128 float32", 128, 128, dtype=torch.float32),
        case("256/256 float32", 256, 256, dtype=torch.float32),
    ]
