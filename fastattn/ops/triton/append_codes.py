"""Appending to a quantised cache on a device: one kernel chooses a token's scales and codes and puts them in place."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.ops import _formats
from fastattn.ops.triton import _launch
from fastattn.ops.triton._codes import ROUNDING, to_e4m3
from fastattn.ops.triton._slots import block_shape
from fastattn.ops.triton._tile import load_tile
from fastattn.ops.triton.cache import COUNT_BLOCK, advance, four_strides
from fastattn.ops.triton.configs import OfflineCase


@triton.jit
def store_bytes(
    p_new,
    p_codes,
    p_scale,
    o_t,
    o_slot,
    m_t,
    stride_t,
    stride_d,
    stride_slot,
    stride_code,
    stride_scale,
    FP8: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Tokens as codes of a byte each, with one scale per token."""
    LARGEST: tl.constexpr = 448.0 if FP8 else 127.0
    o_d = tl.arange(0, BLOCK_D)
    # [T, D]
    b_new = load_tile(p_new, o_t, o_d, stride_t, stride_d, m_t, D, BLOCK_D).to(tl.float32)
    b_most = tl.abs(b_new)
    b_bad = tl.sum((~(b_most < float("inf"))).to(tl.int32), 1) > 0
    b_scale = tl.div_rn(tl.max(b_most, 1), tl.full((b_new.shape[0],), LARGEST, tl.float32))
    b_scale = tl.where(b_bad, float("nan"), b_scale)
    b_divisor = tl.where(b_scale > 0.0, b_scale, 1.0)
    b_code = tl.div_rn(b_new, tl.broadcast_to(b_divisor[:, None], b_new.shape))
    b_code = tl.minimum(tl.maximum(b_code, -LARGEST), LARGEST)
    b_code = to_e4m3(b_code) if FP8 else ((b_code + ROUNDING) - ROUNDING).to(tl.int8)
    p_codes += o_slot[:, None] * stride_slot + o_d.to(tl.int64)[None, :] * stride_code
    tl.store(p_codes, b_code, mask=m_t[:, None] & (o_d < D)[None, :])
    tl.store(p_scale + o_slot * stride_scale, b_scale, mask=m_t)


@triton.jit
def store_halves(
    p_new,
    p_codes,
    p_scale,
    o_t,
    o_slot,
    m_t,
    stride_t,
    stride_d,
    stride_slot,
    stride_code,
    stride_scale,
    stride_group,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Transformed tokens as int4, with one scale per group of 32: two codes a byte, low halves first."""
    GROUPS: tl.constexpr = BLOCK_D // 32
    TOKENS: tl.constexpr = o_t.shape[0]
    o_g, o_j = tl.arange(0, GROUPS), tl.arange(0, 16)
    m_g = m_t[:, None] & (o_g * 32 < D)[None, :]  # [T, G]
    o_column = (o_g * 32)[:, None] + o_j[None, :]
    p_new += o_t.to(tl.int64)[:, None, None] * stride_t + o_column.to(tl.int64)[None, :, :] * stride_d
    # [T, G, 16]
    b_low = tl.load(p_new, mask=m_g[:, :, None], other=0.0).to(tl.float32)
    b_high = tl.load(p_new + 16 * stride_d, mask=m_g[:, :, None], other=0.0).to(tl.float32)
    b_most = tl.maximum(tl.max(tl.abs(b_low), 2), tl.max(tl.abs(b_high), 2))
    # the first of the largest numbers, with its sign
    b_first = tl.min(tl.where(tl.abs(b_low) == b_most[:, :, None], o_j[None, None, :], 32), 2)
    b_other = tl.min(tl.where(tl.abs(b_high) == b_most[:, :, None], o_j[None, None, :] + 16, 32), 2)
    b_first = tl.minimum(b_first, b_other)
    b_signed = tl.sum(tl.where(o_j[None, None, :] == b_first[:, :, None], b_low, 0.0), 2)
    b_signed += tl.sum(tl.where(o_j[None, None, :] + 16 == b_first[:, :, None], b_high, 0.0), 2)
    b_finite = (tl.abs(b_low) < float("inf")) & (tl.abs(b_high) < float("inf"))
    b_bad = tl.sum(tl.sum((~b_finite).to(tl.int32), 2), 1) > 0  # [T]
    b_scale = tl.minimum(tl.maximum(b_signed / -8.0, -65504.0), 65504.0)
    b_scale = tl.where(b_bad[:, None], float("nan"), b_scale).to(tl.float16)
    b_divisor = b_scale.to(tl.float32)
    b_divisor = tl.where(tl.abs(b_divisor) > 0.0, b_divisor, 1.0)
    b_divisor = tl.broadcast_to(b_divisor[:, :, None], (TOKENS, GROUPS, 16))
    b_low = tl.minimum(tl.maximum((tl.div_rn(b_low, b_divisor) + ROUNDING) - ROUNDING, -8.0), 7.0)
    b_high = tl.minimum(tl.maximum((tl.div_rn(b_high, b_divisor) + ROUNDING) - ROUNDING, -8.0), 7.0)
    b_code = (b_low + 8.0).to(tl.uint8) | ((b_high + 8.0).to(tl.uint8) << 4)
    o_byte = (o_g * 16)[:, None] + o_j[None, :]
    p_codes += o_slot[:, None, None] * stride_slot + o_byte.to(tl.int64)[None, :, :] * stride_code
    tl.store(p_codes, b_code, mask=m_g[:, :, None])
    p_scale += o_slot[:, None] * stride_scale + o_g.to(tl.int64)[None, :] * stride_group
    tl.store(p_scale, b_scale, mask=m_g)


@triton.jit
def append_codes_kernel(
    key_cache,
    value_cache,
    positions,
    lengths,
    key_scale,
    value_scale,
    key,
    value,
    position,
    heads,
    tokens,
    slots,
    sckb,
    sckh,
    sckc,
    sckd,
    scvb,
    scvh,
    scvc,
    scvd,
    spb,
    sph,
    spc,
    slb,
    slh,
    sakb,
    sakh,
    sakc,
    sakd,
    savb,
    savh,
    savc,
    savd,
    skb,
    skh,
    skt,
    skd,
    svb,
    svh,
    svt,
    svd,
    FP8: tl.constexpr,
    INT4: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ADVANCE: tl.constexpr,
):
    """One program: a tile of a row's new tokens, as in ``append_kernel``."""
    i_row = tl.program_id(0).to(tl.int64)
    i_b = i_row // heads
    i_h = i_row % heads
    first = tl.program_id(1) * BLOCK_T
    p_length = lengths + i_b * slb + i_h * slh
    p_new = position + i_b * tokens
    length = tl.load(p_length)
    start = length
    if not ADVANCE:
        for o_first in tl.range(0, first, COUNT_BLOCK):
            o_t = o_first + tl.arange(0, COUNT_BLOCK)
            b_position = tl.load(p_new + o_t, mask=o_t < first, other=-1)
            start += tl.sum((b_position >= 0).to(tl.int32), 0)

    o_t = first + tl.arange(0, BLOCK_T)
    b_position = tl.load(p_new + o_t, mask=o_t < tokens, other=-1)
    b_valid = (b_position >= 0).to(tl.int32)
    o_slot = start + tl.cumsum(b_valid, 0) - 1
    m_t = (b_valid == 1) & (o_slot < slots)
    o_slot = o_slot.to(tl.int64)

    p_key, p_codes = key + i_b * skb + i_h * skh, key_cache + i_b * sckb + i_h * sckh
    p_scale = key_scale + i_b * sakb + i_h * sakh
    if INT4:
        store_halves(p_key, p_codes, p_scale, o_t, o_slot, m_t, skt, skd, sckc, sckd, sakc, sakd, DK, BLOCK_DK)
    else:
        store_bytes(p_key, p_codes, p_scale, o_t, o_slot, m_t, skt, skd, sckc, sckd, sakc, FP8, DK, BLOCK_DK)
    if DV > 0:
        p_value, p_codes = value + i_b * svb + i_h * svh, value_cache + i_b * scvb + i_h * scvh
        p_scale = value_scale + i_b * savb + i_h * savh
        if INT4:
            store_halves(p_value, p_codes, p_scale, o_t, o_slot, m_t, svt, svd, scvc, scvd, savc, savd, DV, BLOCK_DV)
        else:
            store_bytes(p_value, p_codes, p_scale, o_t, o_slot, m_t, svt, svd, scvc, scvd, savc, FP8, DV, BLOCK_DV)
    tl.store(positions + i_b * spb + i_h * sph + o_slot * spc, b_position, mask=m_t)
    if ADVANCE:
        tl.debug_barrier()  # every warp has read the old length
        tl.store(p_length, tl.minimum(start + tl.sum(b_valid, 0), slots))


def cache_append_codes_(
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    lengths: Tensor,
    key_scale: Tensor,
    value_scale: Tensor,
    key: Tensor,
    value: Tensor,
    position: Tensor,
) -> None:
    """Launcher of ``fastattn::cache_append_codes_``: launches as of ``cache_append_``, int4 after its transform."""
    _launch.check_dtype("cache_append_", "key", key)
    batch, heads, tokens, _ = key.shape
    if batch * heads * tokens == 0:
        return
    int4 = key_scale.dtype == torch.float16
    key_dim, value_dim = int(key.shape[3]), int(value.shape[3])
    most, _ = block_shape("cache_append_", "a head dim", max(key_dim, value_dim))
    if int4:
        key = _formats.hadamard(key.float())
        value = _formats.hadamard(value.float()) if value_dim else value
    one_tile = tokens <= most
    block_t = _launch.next_power_of_two(int(tokens)) if one_tile and isinstance(tokens, int) else most
    position = position.contiguous()
    slots = key_cache.shape[2]
    written = (key_cache, value_cache, positions, lengths)
    _launch.kernel(append_codes_kernel)[(batch * heads, 1 if one_tile else (tokens + block_t - 1) // block_t)](
        *written,
        key_scale,
        value_scale,
        key,
        value,
        position,
        heads,
        tokens,
        slots,
        *(stride for tensor in written for stride in tensor.stride()),
        *four_strides(key_scale),
        *four_strides(value_scale),
        *key.stride(),
        *value.stride(),
        FP8=key_cache.dtype == torch.uint8 and not int4,
        INT4=int4,
        DK=key_dim,
        DV=value_dim,
        BLOCK_T=block_t,
        BLOCK_DK=_launch.next_power_of_two(key_dim, 32),
        BLOCK_DV=_launch.next_power_of_two(value_dim, 32),
        ADVANCE=one_tile,
        num_warps=4 if block_t * key_dim >= 1024 else 1,
        num_stages=1,
    )
    if not one_tile:
        advance(lengths, position, slots)


def offline_cases() -> list[OfflineCase]:
    """Formats, few and many new tokens, the usual caches and a latent one."""

    def case(storage: str, tokens: int, heads: int, key_dim: int, value_dim: int) -> OfflineCase:
        def launch() -> None:
            def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
                return torch.empty(4, heads, *shape, dtype=dtype, device="meta")

            def stored(dim: int) -> tuple[Tensor, Tensor]:
                codes = empty(4224, _formats.code_width(storage, dim), dtype=_formats.code_dtype(storage))
                groups = (dim // _formats.GROUP,) if storage == "int4" or not dim else ()
                return codes, empty(4224, *groups, dtype=_formats.scale_dtype(storage))

            (keys, key_scale), (values, value_scale) = stored(key_dim), stored(value_dim)
            integers: Any = {"dtype": torch.int32}
            lengths, positions = empty(**integers), empty(4224, **integers)
            position = torch.empty(4, tokens, dtype=torch.int32, device="meta")
            key, value = empty(tokens, key_dim), empty(tokens, value_dim)
            cache_append_codes_(keys, values, positions, lengths, key_scale, value_scale, key, value, position)

        name = f"cache_append_codes_ {storage} {key_dim}/{value_dim} tokens {tokens}"
        return OfflineCase(name, launch, narrow=("append_codes_kernel",))

    shapes = [(1, 8, 128, 128), (512, 8, 128, 128), (1, 1, 576, 0), (512, 1, 576, 0)]
    return [case(storage, *shape) for storage in _formats.STORAGES for shape in shapes]
