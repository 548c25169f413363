"""Attention over a quantised cache: split-KV kernel that turns codes into numbers in registers, and its launcher."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.ops import _formats
from fastattn.ops._features import add_sinks
from fastattn.ops._outputs import empty_out_and_lse
from fastattn.ops.triton import _launch
from fastattn.ops.triton._codes import E4M3_FACTOR, load_halves, load_numbers, low_columns
from fastattn.ops.triton._features import to_logits
from fastattn.ops.triton._split import launch_splits, split_range, window_range
from fastattn.ops.triton._tile import load_row, softmax_end, softmax_step
from fastattn.ops.triton.configs import OfflineCase, codes_config

LARGEST_DIM = 512
LARGEST_LATENT = 640  # rank and rope dim together


@triton.jit
def codes_kernel(
    query,
    key,
    value,
    key_scale,
    value_scale,
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
    sakb,
    sakh,
    sakt,
    sakd,
    savb,
    savh,
    savt,
    savd,
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
    FP8: tl.constexpr,
    INT4: tl.constexpr,
    LATENT: tl.constexpr,
    DK: tl.constexpr,
    DK1: tl.constexpr,
    DK2: tl.constexpr,
    DV: tl.constexpr,
    DV1: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: one split of the slots for one row tile of one group, as in ``decode_kernel``.

    Dims count codes: with ``INT4`` bytes, each two columns of query and output. With ``LATENT`` the value is the first
    ``DK1`` columns of the key and read once.
    """
    i_tile = tl.program_id(0) % row_tiles
    i_bh = tl.program_id(0) // row_tiles
    i_split = tl.program_id(1)
    i_b = (i_bh // kv_heads).to(tl.int64)
    i_h = (i_bh % kv_heads).to(tl.int64)
    DTYPE: tl.constexpr = query.dtype.element_ty
    # In float16 weights times scales could be too small: they are kept relative to the largest scale so far.
    RELATIVE: tl.constexpr = (tl.float16 == DTYPE) and not INT4
    FACTOR: tl.constexpr = E4M3_FACTOR if FP8 else 1.0

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
    if DK2 > 0:
        o_d2 = tl.arange(0, DK2)
    if INT4:
        # [M, DK1] twice, [M, DK2] twice
        m_d1 = m_row[:, None] & (o_d1 < DK)[None, :]
        p_low = p_query[:, None] + low_columns(o_d1).to(tl.int64)[None, :] * sqd
        b_q1 = tl.load(p_low, mask=m_d1, other=0.0)
        b_q1h = tl.load(p_low + 16 * sqd, mask=m_d1, other=0.0)
        if DK2 > 0:
            m_d2 = m_row[:, None] & (o_d2 < DK - DK1)[None, :]
            p_low = p_query[:, None] + low_columns(DK1 + o_d2).to(tl.int64)[None, :] * sqd
            b_q2 = tl.load(p_low, mask=m_d2, other=0.0)
            b_q2h = tl.load(p_low + 16 * sqd, mask=m_d2, other=0.0)
    else:
        # [M, DK1], [M, DK2]
        b_q1 = load_row(p_query, o_d1, sqd, m_row, DK if DK < DK1 else DK1, DK1)
        if DK2 > 0:
            b_q2 = load_row(p_query, DK1 + o_d2, sqd, m_row, DK, DK1 + DK2)
    p_key = key + i_b * skb + i_h * skh
    p_value = value + i_b * svb + i_h * svh
    p_key_scale = key_scale + i_b * sakb + i_h * sakh
    p_value_scale = value_scale + i_b * savb + i_h * savh

    b_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    b_sum = tl.zeros((BLOCK_M,), tl.float32)
    b_out = tl.zeros((BLOCK_M, DV1), tl.float32)
    if INT4:
        b_outh = tl.zeros((BLOCK_M, DV1), tl.float32)
    largest = 0.0
    for start in tl.range(first, last, BLOCK_N):
        o_slot = start + tl.arange(0, BLOCK_N)
        m_slot = o_slot < last
        if INT4:
            # [N, DK1] twice, [N, DK2] twice
            b_k1, b_k1h = load_halves(
                p_key, p_key_scale, o_slot, o_d1, skt, skd, sakt, sakd, m_slot, DTYPE, DK if DK < DK1 else DK1, DK1
            )
            b_score = tl.dot(b_q1, tl.trans(b_k1), input_precision="ieee")
            b_score = tl.dot(b_q1h, tl.trans(b_k1h), b_score, input_precision="ieee")
            if DK2 > 0:
                b_k2, b_k2h = load_halves(
                    p_key + DK1 * skd, p_key_scale + (DK1 // 16) * sakd, o_slot, o_d2,
                    skt, skd, sakt, sakd, m_slot, DTYPE, DK - DK1, DK2,
                )  # fmt: skip
                b_score = tl.dot(b_q2, tl.trans(b_k2), b_score, input_precision="ieee")
                b_score = tl.dot(b_q2h, tl.trans(b_k2h), b_score, input_precision="ieee")
        else:
            # [N, DK1], [N, DK2]
            b_k1 = load_numbers(p_key, o_slot, o_d1, skt, skd, m_slot, DTYPE, FP8, DK if DK < DK1 else DK1, DK1)
            b_score = tl.dot(b_q1, tl.trans(b_k1), input_precision="ieee")
            if DK2 > 0:
                b_k2 = load_numbers(p_key + DK1 * skd, o_slot, o_d2, skt, skd, m_slot, DTYPE, FP8, DK - DK1, DK2)
                b_score = tl.dot(b_q2, tl.trans(b_k2), b_score, input_precision="ieee")
            b_key_scale = tl.load(p_key_scale + o_slot.to(tl.int64) * sakt, mask=m_slot, other=0.0) * FACTOR
            b_score *= b_key_scale[None, :]
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
        if INT4:
            # [N, DV1] twice
            if LATENT:
                b_v, b_vh = b_k1, b_k1h
            else:
                b_v, b_vh = load_halves(
                    p_value, p_value_scale, o_slot, o_dv, svt, svd, savt, savd, m_slot, DTYPE, DV, DV1
                )
            b_weight = b_weight.to(DTYPE)
            b_outh = tl.dot(b_weight, b_vh, b_outh * b_factor[:, None], input_precision="ieee")
        else:
            # [N, DV1]
            if LATENT:
                b_v, b_value_scale = b_k1, b_key_scale
            else:
                b_v = load_numbers(p_value, o_slot, o_dv, svt, svd, m_slot, DTYPE, FP8, DV, DV1)
                b_value_scale = tl.load(p_value_scale + o_slot.to(tl.int64) * savt, mask=m_slot, other=0.0) * FACTOR
            if RELATIVE:
                before = largest
                largest = tl.maximum(largest, tl.max(b_value_scale, 0))
                unit = tl.where(largest > 0.0, largest, 1.0)
                b_factor *= before / unit
                b_value_scale /= unit
            b_weight = (b_weight * b_value_scale[None, :]).to(DTYPE)
        b_out = tl.dot(b_weight, b_v, b_out * b_factor[:, None], input_precision="ieee")

    b_divisor, b_lse = softmax_end(b_max, b_sum)
    if RELATIVE:
        b_out *= largest
    # rows of the output are (batch, head, query) triples; combine reads nothing but the lse of an empty split
    o_out = (i_b * kv_heads * GROUP + o_head) * tokens + o_query
    m_out = m_row & ((first < last) | (splits == 1))
    tl.store(lse + i_split.to(tl.int64) * sls + o_out, b_lse, mask=m_row)
    m_out = m_out[:, None] & (o_dv < DV)[None, :]
    p_out = out + i_split.to(tl.int64) * sos
    if INT4:
        p_out += o_out[:, None] * (2 * DV) + low_columns(o_dv)[None, :]
        tl.store(p_out + 16, (b_outh / b_divisor[:, None]).to(out.dtype.element_ty), mask=m_out)
    else:
        p_out += o_out[:, None] * DV + o_dv[None, :]
    tl.store(p_out, (b_out / b_divisor[:, None]).to(out.dtype.element_ty), mask=m_out)


def decode_codes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_scale: Tensor,
    value_scale: Tensor,
    lengths: Tensor,
    scale: float,
    causal: bool,
    value_dim: int,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Launcher of ``fastattn::decode_codes``."""
    _launch.check_dtype("decode_attention", "query", query)
    batch, heads, tokens, key_dim = query.shape
    int4 = key_scale.dim() == 4
    latent = value.shape[3] == key.shape[3] and value_dim < _columns(value, int4)
    name = "a latent and its rope key of" if latent else "query's head dim"
    _launch.check_dim("decode_attention", name, key_dim, LARGEST_LATENT if latent else LARGEST_DIM)
    _launch.check_dim("decode_attention", "value's head dim", value_dim, LARGEST_DIM)
    out, lse = empty_out_and_lse(query, value_dim)
    if batch * heads * tokens == 0:
        return out, lse
    part, block, columns = out, 1, value_dim
    if int4:
        block = _formats.block_of(_columns(value, int4))
        columns = (value_dim + block - 1) // block * block  # the transform mixes whole blocks
        query = _formats.hadamard(query.float()).to(query.dtype)
        part = torch.empty(*out.shape[:3], columns, dtype=torch.float32, device=out.device)
    _launch_codes(
        (query, _bytes(key), _bytes(value), _four(key_scale), _four(value_scale), lengths), part, lse,
        latent, scale, causal, window, softcap, alibi_slopes, positions,
    )  # fmt: skip
    if int4:
        out = _formats.hadamard(part, block).to(out.dtype)
        out = out if columns == value_dim else out[..., :value_dim].contiguous()
    if sinks is not None:
        add_sinks(out, lse, sinks)
    return out, lse


def _launch_codes(
    inputs: tuple[Tensor, ...],
    out: Tensor,
    lse: Tensor,
    latent: bool,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    positions: Tensor | None,
) -> None:
    query, key, _, key_scale = inputs[:4]
    int4 = key_scale.dtype == torch.float16
    kv_heads, tokens, group = key.shape[1], query.shape[2], query.shape[1] // key.shape[1]
    per_code = 2 if int4 else 1
    key_codes, value_codes = int(query.shape[3]) // per_code, int(out.shape[3]) // per_code
    dk1, dk2 = _launch.split_columns(key_codes)
    dv1 = _launch.next_power_of_two(value_codes, 16)
    shared = latent and value_codes <= dk1
    dv1 = dk1 if shared else dv1
    numbers = per_code * (dk1 + dk2 + (0 if shared else dv1))
    family = _launch.target_of(query).family
    launch_splits(
        codes_kernel,
        inputs,
        out,
        lse,
        config=codes_config(family, group * tokens, numbers, query.itemsize, shared, int4),
        groups=key.shape[0] * kv_heads,
        rows=group * tokens,
        capacity=key.shape[2],
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
        FP8=key.dtype == torch.uint8 and not int4,
        INT4=int4,
        LATENT=shared,
        DK=key_codes,
        DK1=dk1,
        DK2=dk2,
        DV=value_codes,
        DV1=dv1,
    )


def _columns(codes: Tensor, int4: bool) -> int:
    return int(codes.shape[3]) * (2 if int4 else 1)


def _bytes(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8) if codes.dtype == torch.float8_e4m3fn else codes


def _four(scale: Tensor) -> Tensor:
    return scale if scale.dim() == 4 else scale[..., None]


def offline_cases() -> list[OfflineCase]:
    """Formats times the usual head dims, few and many rows of a group; latents; features."""

    def case(name: str, storage: str, heads: tuple[int, int], dims: tuple[int, int], tokens: int = 1, **options: Any):
        def launch() -> object:
            def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
                return torch.empty(shape, dtype=dtype, device="meta")

            kv_heads, group = heads
            dim, value_dim = dims
            shape, dtype = (2, kv_heads, 4096), _formats.scale_dtype(storage)
            groups = (dim // _formats.GROUP,) if storage == "int4" else ()
            codes = empty(*shape, _formats.code_width(storage, dim), dtype=_formats.code_dtype(storage))
            scale = empty(*shape, *groups, dtype=dtype)
            query = empty(2, kv_heads * group, tokens, dim, dtype=options.get("dtype", torch.bfloat16))
            lengths = empty(2, kv_heads, dtype=torch.int32)
            features: tuple[Any, ...] = ()
            if "features" in options:
                slopes = empty(kv_heads * group, dtype=torch.float32)
                features = (1024, 50.0, None, slopes, empty(*shape, dtype=torch.int32))
            return decode_codes(query, codes, codes, scale, scale, lengths, 0.1, True, value_dim, *features)

        # bytes of int4 for few slots are fewer than the threads have room for at 16 each
        narrow = ("codes_kernel",) if storage == "int4" else ()
        return OfflineCase(f"decode_codes {storage} {name}", launch, narrow=narrow)

    cases = []
    for storage in _formats.STORAGES:
        for group, tokens in ((4, 1), (16, 2), (8, 8)):
            name = f"128/128 rows {group * tokens}"
            cases.append(case(name, storage, (8, group), (128, 128), tokens))
        cases += [case(f"{dim}/{dim} rows 4", storage, (8, 4), (dim, dim)) for dim in (64, 96, 256, 512)]
        cases += [case(f"latent 576 rows {rows}", storage, (1, rows), (576, 512)) for rows in (16, 128)]
        cases.append(case("128/128 rows 4 window, cap, slopes", storage, (8, 4), (128, 128), features=True))
        for dtype in (torch.float16, torch.float32):
            cases.append(case(f"128/128 rows 4 {str(dtype)[6:]}", storage, (8, 4), (128, 128), dtype=dtype))
    return cases
