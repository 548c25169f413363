"""The gradient of attention: row sums, keys and values, queries; three kernels and a launcher.

With p_ij = exp(s_ij - lse_i), s = scale q k^T, and delta_i = sum_d do_id o_id:

    dv_j = sum_i p_ij do_i      ds_ij = p_ij (do_i . v_j - delta_i)
    dk_j = scale sum_i ds_ij q_i      dq_i = scale sum_j ds_ij k_j

A program owns a tile of keys (of queries) and loops over the other side, so nothing is added up atomically and results
repeat bit for bit. ``BLOCK_M`` is the tile a program owns, ``BLOCK_N`` what it loops over.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.ops.triton import _features, _launch
from fastattn.ops.triton._delta import delta_of, load_statistics
from fastattn.ops.triton._features import packed_row, to_logits
from fastattn.ops.triton._tile import load_row, load_tile
from fastattn.ops.triton.attention import LARGEST_DIM, key_range
from fastattn.ops.triton.configs import OfflineCase, backward_configs


@triton.jit
def grad_key_value_kernel(
    grad_out,
    query,
    key,
    value,
    lse,
    delta,
    key_start,
    lengths,
    slopes,
    cu_seqlens_q,
    cu_seqlens_k,
    tiles,
    grad_key,
    grad_value,
    kv_heads,
    queries,
    keys,
    key_tiles,
    window,
    sgb,
    sgh,
    sgt,
    sgd,
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
    """One program: dk and dv of one key tile, over all (query, head of the group) rows that see it."""
    i_tile = tl.program_id(0) % key_tiles
    i_bh = tl.program_id(0) // key_tiles
    i_b = (i_bh // kv_heads).to(tl.int64)
    i_h = (i_bh % kv_heads).to(tl.int64)
    tokens = queries
    o_grad = i_bh.to(tl.int64) * keys
    if PACKED:
        i_tile, q_first, queries, k_first, keys = packed_row(tiles, cu_seqlens_q, cu_seqlens_k, i_tile)
        grad_out += q_first * sgt
        query += q_first * sqt
        key += k_first * skt
        value += k_first * svt
        lse += q_first
        delta += q_first
        o_grad += k_first
    o_key = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    first, end = key_range(key_start, lengths, i_b, keys, HAS_START, HAS_LENGTHS)
    m_key = (o_key >= first) & (o_key < end)
    o_d1 = tl.arange(0, DK1)
    o_d2 = tl.arange(0, DK2 if DK2 > 0 else 1)
    o_dv = tl.arange(0, DV1)

    # [M, DK1], [M, DK2], [M, DV1]
    p_key = key + i_b * skb + i_h * skh
    b_k1 = load_tile(p_key, o_key, o_d1, skt, skd, m_key, DK if DK < DK1 else DK1, DK1)
    if DK2 > 0:
        b_k2 = load_tile(p_key + DK1 * skd, o_key, o_d2, skt, skd, m_key, DK - DK1, DK2)
        b_grad_k2 = tl.zeros((BLOCK_M, DK2), tl.float32)
    b_v = load_tile(value + i_b * svb + i_h * svh, o_key, o_dv, svt, svd, m_key, DV, DV1)
    b_grad_k1 = tl.zeros((BLOCK_M, DK1), tl.float32)
    b_grad_v = tl.zeros((BLOCK_M, DV1), tl.float32)

    # rows that see a key of the tile
    first_row = 0
    last_row = queries * GROUP
    if CAUSAL:
        first_row = tl.maximum(i_tile * BLOCK_M - (keys - queries), 0) * GROUP
    if WINDOW:
        o_last = i_tile * BLOCK_M + BLOCK_M - 1 + window - (keys - queries)
        last_row = tl.minimum(last_row, tl.maximum(o_last, 0) * GROUP)
    if (i_tile * BLOCK_M >= end) | (i_tile * BLOCK_M + BLOCK_M <= first):
        last_row = 0
    for start in tl.range(first_row, last_row, BLOCK_N):
        o_row = start + tl.arange(0, BLOCK_N)
        m_row = o_row < last_row
        o_query = o_row // GROUP
        o_head = i_h * GROUP + o_row % GROUP
        b_lse, b_delta = load_statistics(lse, delta, (i_b * kv_heads * GROUP + o_head) * tokens + o_query, m_row)
        # [N, DK1], [N, DK2], [N, DV1]
        p_query = query + i_b * sqb + o_head * sqh + o_query.to(tl.int64) * sqt
        b_q1 = load_row(p_query, o_d1, sqd, m_row, DK if DK < DK1 else DK1, DK1)
        b_score = tl.dot(b_k1, tl.trans(b_q1), input_precision="ieee")
        if DK2 > 0:
            b_q2 = load_row(p_query + DK1 * sqd, o_d2, sqd, m_row, DK - DK1, DK2)
            b_score = tl.dot(b_k2, tl.trans(b_q2), b_score, input_precision="ieee")
        # [M, N]
        b_slope = tl.load(slopes + o_head, mask=m_row, other=0.0)[None, :] if HAS_SLOPES else 0.0
        b_distance = (o_query + keys - queries)[None, :] - o_key[:, None]
        b_logit, b_tanh = to_logits(b_score, b_slope, b_distance, SCALE, SOFTCAP, HAS_SLOPES)
        b_p = tl.exp2(b_logit - b_lse[None, :])
        m_seen = m_key[:, None] & m_row[None, :]
        if WINDOW:
            m_seen &= b_distance < window
        if CAUSAL:
            m_seen &= o_key[:, None] <= (o_query + keys - queries)[None, :]
        b_p = tl.where(m_seen, b_p, 0.0)
        p_grad = grad_out + i_b * sgb + o_head * sgh + o_query.to(tl.int64) * sgt
        b_grad = load_row(p_grad, o_dv, sgd, m_row, DV, DV1)
        b_grad_v = tl.dot(b_p.to(b_grad.dtype), b_grad, b_grad_v, input_precision="ieee")
        b_grad_p = tl.dot(b_v, tl.trans(b_grad), input_precision="ieee")
        b_grad_s = b_p * (b_grad_p - b_delta[None, :])
        if SOFTCAP > 0:
            b_grad_s *= 1.0 - b_tanh * b_tanh
        b_grad_s = b_grad_s.to(b_q1.dtype)
        b_grad_k1 = tl.dot(b_grad_s, b_q1, b_grad_k1, input_precision="ieee")
        if DK2 > 0:
            b_grad_k2 = tl.dot(b_grad_s, b_q2, b_grad_k2, input_precision="ieee")

    o_out = (o_grad + o_key)[:, None]
    m_out = (o_key < keys)[:, None]
    kind = grad_key.dtype.element_ty
    tl.store(grad_key + o_out * DK + o_d1[None, :], (b_grad_k1 * SCALE).to(kind), mask=m_out & (o_d1 < DK)[None, :])
    if DK2 > 0:
        m_d2 = m_out & (o_d2 < DK - DK1)[None, :]
        tl.store(grad_key + o_out * DK + DK1 + o_d2[None, :], (b_grad_k2 * SCALE).to(kind), mask=m_d2)
    tl.store(grad_value + o_out * DV + o_dv[None, :], b_grad_v.to(kind), mask=m_out & (o_dv < DV)[None, :])


@triton.jit
def grad_query_kernel(
    grad_out,
    query,
    key,
    value,
    lse,
    delta,
    key_start,
    lengths,
    slopes,
    cu_seqlens_q,
    cu_seqlens_k,
    tiles,
    grad_query,
    kv_heads,
    queries,
    keys,
    row_tiles,
    window,
    sgb,
    sgh,
    sgt,
    sgd,
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
    """One program: dq of one tile of (query, head of the group) rows; causally longest first."""
    i_tile = row_tiles - 1 - tl.program_id(0) % row_tiles
    i_bh = tl.program_id(0) // row_tiles
    i_b = (i_bh // kv_heads).to(tl.int64)
    i_h = (i_bh % kv_heads).to(tl.int64)
    tokens = queries
    if PACKED:
        i_tile, q_first, queries, k_first, keys = packed_row(tiles, cu_seqlens_q, cu_seqlens_k, i_tile)
        grad_out += q_first * sgt
        query += q_first * sqt
        key += k_first * skt
        value += k_first * svt
    o_row = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    m_row = o_row < queries * GROUP
    o_query = o_row // GROUP
    o_head = i_h * GROUP + o_row % GROUP
    o_d1 = tl.arange(0, DK1)
    o_d2 = tl.arange(0, DK2 if DK2 > 0 else 1)
    o_dv = tl.arange(0, DV1)

    first, end = key_range(key_start, lengths, i_b, keys, HAS_START, HAS_LENGTHS)
    if CAUSAL:
        i_last = (tl.minimum(i_tile * BLOCK_M + BLOCK_M, queries * GROUP) - 1) // GROUP
        end = tl.minimum(end, i_last + keys - queries + 1)
    if PACKED:
        end = tl.where(i_tile * BLOCK_M < queries * GROUP, end, 0)
    if WINDOW:
        first = tl.maximum(first, i_tile * BLOCK_M // GROUP + keys - queries - window + 1)
    b_slope = 0.0
    if HAS_SLOPES:
        b_slope = tl.load(slopes + o_head, mask=m_row, other=0.0)[:, None]
    o_out = (i_b * kv_heads * GROUP + o_head) * tokens + o_query
    if PACKED:
        o_out += q_first
    b_lse, b_delta = load_statistics(lse, delta, o_out, m_row)
    # [M, DK1], [M, DK2], [M, DV1]
    p_query = query + i_b * sqb + o_head * sqh + o_query.to(tl.int64) * sqt
    b_q1 = load_row(p_query, o_d1, sqd, m_row, DK if DK < DK1 else DK1, DK1)
    if DK2 > 0:
        b_q2 = load_row(p_query + DK1 * sqd, o_d2, sqd, m_row, DK - DK1, DK2)
        b_grad_q2 = tl.zeros((BLOCK_M, DK2), tl.float32)
    p_grad = grad_out + i_b * sgb + o_head * sgh + o_query.to(tl.int64) * sgt
    b_grad = load_row(p_grad, o_dv, sgd, m_row, DV, DV1)
    b_grad_q1 = tl.zeros((BLOCK_M, DK1), tl.float32)
    p_key = key + i_b * skb + i_h * skh
    p_value = value + i_b * svb + i_h * svh
    for start in tl.range(first, end, BLOCK_N):
        o_key = start + tl.arange(0, BLOCK_N)
        m_key = o_key < end
        # [N, DK1], [N, DK2], [N, DV1]
        b_k1 = load_tile(p_key, o_key, o_d1, skt, skd, m_key, DK if DK < DK1 else DK1, DK1)
        b_score = tl.dot(b_q1, tl.trans(b_k1), input_precision="ieee")
        if DK2 > 0:
            b_k2 = load_tile(p_key + DK1 * skd, o_key, o_d2, skt, skd, m_key, DK - DK1, DK2)
            b_score = tl.dot(b_q2, tl.trans(b_k2), b_score, input_precision="ieee")
        b_v = load_tile(p_value, o_key, o_dv, svt, svd, m_key, DV, DV1)
        # [M, N]
        b_distance = (o_query + keys - queries)[:, None] - o_key[None, :]
        b_logit, b_tanh = to_logits(b_score, b_slope, b_distance, SCALE, SOFTCAP, HAS_SLOPES)
        b_p = tl.exp2(b_logit - b_lse[:, None])
        m_seen = m_key[None, :]
        if WINDOW:
            m_seen = m_seen & (b_distance < window)
        if CAUSAL:
            m_seen = m_seen & (o_key[None, :] <= (o_query + keys - queries)[:, None])
        b_p = tl.where(m_seen, b_p, 0.0)
        b_grad_p = tl.dot(b_grad, tl.trans(b_v), input_precision="ieee")
        b_grad_s = b_p * (b_grad_p - b_delta[:, None])
        if SOFTCAP > 0:
            b_grad_s *= 1.0 - b_tanh * b_tanh
        b_grad_s = b_grad_s.to(b_k1.dtype)
        b_grad_q1 = tl.dot(b_grad_s, b_k1, b_grad_q1, input_precision="ieee")
        if DK2 > 0:
            b_grad_q2 = tl.dot(b_grad_s, b_k2, b_grad_q2, input_precision="ieee")

    kind = grad_query.dtype.element_ty
    p_out = grad_query + o_out[:, None] * DK
    tl.store(p_out + o_d1[None, :], (b_grad_q1 * SCALE).to(kind), mask=m_row[:, None] & (o_d1 < DK)[None, :])
    if DK2 > 0:
        m_d2 = m_row[:, None] & (o_d2 < DK - DK1)[None, :]
        tl.store(p_out + DK1 + o_d2[None, :], (b_grad_q2 * SCALE).to(kind), mask=m_d2)


def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    key_start: Tensor | None,
    lengths: Tensor | None,
    window: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launcher of ``fastattn::attention_backward``."""
    _launch.check_dtype("attention", "query", query)
    batch, heads, queries, key_dim = query.shape
    kv_heads, keys, value_dim = key.shape[1], key.shape[2], value.shape[3]
    for name, dim in (("query", key_dim), ("value", value_dim)):
        _launch.check_dim("attention", f"{name}'s head dim", dim, LARGEST_DIM)
    grads = query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)
    lse = lse.contiguous()
    delta = delta_of(grad_out, out.contiguous(), lse)
    group, rows = heads // kv_heads, batch * heads * queries
    widest = max(sum(_launch.split_columns(key_dim)), _launch.next_power_of_two(value_dim, 16))
    by_score = bool(window) or softcap > 0 or alibi_slopes is not None or cu_seqlens_q is not None
    for_keys, for_queries = backward_configs(_launch.target_of(query).family, widest, query.itemsize, by_score)
    inputs = (
        *(grad_out, query, key, value, lse, delta),
        query if key_start is None else key_start.contiguous(),
        query if lengths is None else lengths.contiguous(),
        *_features.tensors(query, None, alibi_slopes, cu_seqlens_q, cu_seqlens_k)[1:],
    )
    strides = (*grad_out.stride(), *query.stride(), *key.stride(), *value.stride())
    shapes = {
        "SCALE": float(scale),
        "CAUSAL": causal,
        "HAS_START": key_start is not None,
        "HAS_LENGTHS": lengths is not None,
        **_features.switches(window, softcap, None, alibi_slopes, cu_seqlens_q),
        **_dims(group, key_dim, value_dim),
    }
    del shapes["HAS_SINKS"]  # a sink is part of lse
    tiles, key_tiles = _features.map_tiles(cu_seqlens_k, keys, 1, for_keys.rows, query)
    if batch * kv_heads * keys != 0:
        _launch.kernel(grad_key_value_kernel)[(batch * kv_heads * key_tiles,)](
            *inputs, tiles, grads[1], grads[2], kv_heads, queries, keys, key_tiles, window, *strides, **shapes,
            BLOCK_M=for_keys.rows, BLOCK_N=for_keys.keys, **for_keys.options(),
        )  # fmt: skip
    tiles, row_tiles = _features.map_tiles(cu_seqlens_q, queries, group, for_queries.rows, query)
    if rows != 0:
        _launch.kernel(grad_query_kernel)[(batch * kv_heads * row_tiles,)](
            *inputs, tiles, grads[0], kv_heads, queries, keys, row_tiles, window, *strides, **shapes,
            BLOCK_M=for_queries.rows, BLOCK_N=for_queries.keys, **for_queries.options(),
        )  # fmt: skip
    return grads


def _dims(group: int, key_dim: int, value_dim: int) -> dict[str, int]:
    """Query heads per key/value head, and how both kernels cut the columns."""
    dk1, dk2 = _launch.split_columns(key_dim)
    dv1 = _launch.next_power_of_two(value_dim, 16)
    return {"GROUP": int(group), "DK": int(key_dim), "DK1": dk1, "DK2": dk2, "DV": int(value_dim), "DV1": dv1}


def offline_cases() -> list[OfflineCase]:
    """Every shape class of the table."""

    def case(name: str, key_dim: int, value_dim: int, dtype=torch.bfloat16, features=()) -> OfflineCase:
        def launch() -> object:
            def empty(heads: int, dim: int) -> Tensor:
                return torch.empty(2, heads, 4096, dim, dtype=dtype, device="meta")

            bounds = torch.empty(2, dtype=torch.int32, device="meta")
            lse = torch.empty(2, 32, 4096, device="meta")
            grad, query, out = empty(32, value_dim), empty(32, key_dim), empty(32, value_dim)
            key, value = empty(8, key_dim), empty(8, value_dim)
            return attention_backward(grad, query, key, value, out, lse, True, 0.1, bounds, bounds, *features)

        return OfflineCase(f"attention_backward {name}", launch)

    return [
        *(case(f"{dk}/{dv}", dk, dv) for dk, dv in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))),
        *(
            case(f"{dim}/{dim} window, cap, slopes", dim, dim, features=(1024, 50.0, torch.empty(32, device="meta")))
            for dim in (64, 96, 128, 256)
        ),
        case("128/128 float32", 128, 128, dtype=torch.float32),
        case("256/256 float32", 256, 256, dtype=torch.float32),
    ]
