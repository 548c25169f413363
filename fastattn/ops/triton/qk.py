"""The key-query product on its own: kernel and launcher."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.ops.triton import _launch
from fastattn.ops.triton._tile import load_row, load_tile
from fastattn.ops.triton.configs import OfflineCase, qk_config


@triton.jit
def qk_kernel(
    query,
    key,
    score,
    kv_heads,
    queries,
    keys,
    row_tiles,
    key_tiles,
    sqb,
    sqh,
    sqt,
    sqd,
    skb,
    skh,
    skt,
    skd,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BAND: tl.constexpr,
):
    """One program: a tile of (query, head of the group) rows times a tile of keys.

    Programs walk bands of ``BAND`` row tiles along the keys, so that neighbors in time share operands in the L2 cache.
    """
    i_pair = tl.program_id(0) % (row_tiles * key_tiles)
    i_bh = tl.program_id(0) // (row_tiles * key_tiles)
    i_b = (i_bh // kv_heads).to(tl.int64)
    i_h = (i_bh % kv_heads).to(tl.int64)
    i_band = i_pair // (BAND * key_tiles)
    height = tl.minimum(row_tiles - i_band * BAND, BAND)
    i_row = i_band * BAND + i_pair % (BAND * key_tiles) % height
    i_key = i_pair % (BAND * key_tiles) // height

    o_row = i_row * BLOCK_M + tl.arange(0, BLOCK_M)
    m_row = o_row < queries * GROUP
    o_query = o_row // GROUP
    o_head = i_h * GROUP + o_row % GROUP
    o_key = i_key * BLOCK_N + tl.arange(0, BLOCK_N)
    m_key = o_key < keys
    p_query = query + i_b * sqb + o_head * sqh + o_query.to(tl.int64) * sqt
    p_key = key + i_b * skb + i_h * skh
    b_score = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, D, BLOCK_D):
        o_d = tl.arange(0, BLOCK_D)
        if D % BLOCK_D == 0:
            # [M, D], [N, D]
            b_q = load_row(p_query + start * sqd, o_d, sqd, m_row, BLOCK_D, BLOCK_D)
            b_k = load_tile(p_key + start * skd, o_key, o_d, skt, skd, m_key, BLOCK_D, BLOCK_D)
        else:
            m_d = (start + o_d < D)[None, :]
            p_d = (start + o_d).to(tl.int64)[None, :]
            b_q = tl.load(p_query[:, None] + p_d * sqd, mask=m_row[:, None] & m_d, other=0.0)
            p_row = p_key + o_key.to(tl.int64) * skt
            b_k = tl.load(p_row[:, None] + p_d * skd, mask=m_key[:, None] & m_d, other=0.0)
        b_score = tl.dot(b_q, tl.trans(b_k), b_score, input_precision="ieee")
    p_score = score + ((i_b * kv_heads * GROUP + o_head) * queries + o_query)[:, None] * keys + o_key[None, :]
    tl.store(p_score, (b_score * SCALE).to(score.dtype.element_ty), mask=m_row[:, None] & m_key[None, :])


def qk_scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Launcher of ``fastattn::qk_scores``."""
    _launch.check_dtype("qk_scores", "query", query)
    batch, heads, queries, dim = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    score = query.new_empty(batch, heads, queries, keys)
    if batch * heads * queries * keys == 0:
        return score
    if dim == 0:
        return score.zero_()
    group = heads // kv_heads
    config = qk_config(_launch.target_of(query).family, group * queries, query.itemsize)
    row_tiles, key_tiles = triton.cdiv(group * queries, config.rows), triton.cdiv(keys, config.keys)
    _launch.kernel(qk_kernel)[(batch * kv_heads * row_tiles * key_tiles,)](
        query,
        key,
        score,
        kv_heads,
        queries,
        keys,
        row_tiles,
        key_tiles,
        *query.stride(),
        *key.stride(),
        SCALE=float(scale),
        GROUP=int(group),
        D=int(dim),
        BLOCK_M=config.rows,
        BLOCK_N=config.keys,
        BLOCK_D=min(64, _launch.next_power_of_two(int(dim), 16)),
        BAND=8,
        **config.options(),
    )
    return score


def offline_cases() -> list[OfflineCase]:
    """Many and few rows, even and odd head dims."""

    def case(name: str, queries: int, dim: int, dtype=torch.bfloat16) -> OfflineCase:
        def launch() -> object:
            query = torch.empty(2, 32, queries, dim, dtype=dtype, device="meta")
            return qk_scores(query, torch.empty(2, 8, 4096, dim, dtype=dtype, device="meta"), 1.0)

        return OfflineCase(f"qk_scores {name}", launch)

    return [
        case("128", 4096, 128),
        case("576", 4096, 576),
        case("96", 4096, 96),
        case("128 few rows", 4, 128),
        case("128 float32", 4096, 128, torch.float32),
    ]
