"""Appending to a cache and compacting it, in place, on a device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.ops.triton import _launch
from fastattn.ops.triton._slots import block_shape
from fastattn.ops.triton._tile import load_tile
from fastattn.ops.triton.compact import move_kernel, select_kernel
from fastattn.ops.triton.configs import OfflineCase

COUNT_BLOCK = tl.constexpr(2048)
SELECT_BLOCK = 2048
MOVE_SLOTS = 256
MOVE_BYTES = 64  # width of a column slice: two sectors of memory


@triton.jit
def append_kernel(
    key_cache,
    value_cache,
    positions,
    lengths,
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
    skb,
    skh,
    skt,
    skd,
    svb,
    svh,
    svt,
    svd,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ADVANCE: tl.constexpr,
):
    """One program: a tile of a row's new tokens. With ``ADVANCE`` it is the row's only one and sets the length too."""
    i_row = tl.program_id(0).to(tl.int64)
    i_b = i_row // heads
    i_h = i_row % heads
    first = tl.program_id(1) * BLOCK_T
    p_length = lengths + i_b * slb + i_h * slh
    p_new = position + i_b * tokens
    length = tl.load(p_length)
    start = length
    if not ADVANCE:
        # Behind the earlier tiles' tokens. Counted here, not in a function: torch.compile would take what its result
        # reaches for derived from the positions, and these for written.
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

    o_dk = tl.arange(0, BLOCK_DK)
    # [T, DK]
    b_key = load_tile(key + i_b * skb + i_h * skh, o_t, o_dk, skt, skd, m_t, DK, BLOCK_DK)
    p_key = key_cache + i_b * sckb + i_h * sckh + o_slot[:, None] * sckc + o_dk.to(tl.int64)[None, :] * sckd
    tl.store(p_key, b_key, mask=m_t[:, None] & (o_dk < DK)[None, :])
    if DV > 0:
        o_dv = tl.arange(0, BLOCK_DV)
        # [T, DV]
        b_value = load_tile(value + i_b * svb + i_h * svh, o_t, o_dv, svt, svd, m_t, DV, BLOCK_DV)
        p_value = value_cache + i_b * scvb + i_h * scvh + o_slot[:, None] * scvc + o_dv.to(tl.int64)[None, :] * scvd
        tl.store(p_value, b_value, mask=m_t[:, None] & (o_dv < DV)[None, :])
    tl.store(positions + i_b * spb + i_h * sph + o_slot * spc, b_position, mask=m_t)
    if ADVANCE:
        tl.debug_barrier()  # every warp has read the old length
        tl.store(p_length, tl.minimum(start + tl.sum(b_valid, 0), slots))


@triton.jit
def advance_kernel(lengths, position, heads, tokens, slots, slb, slh):
    """One program: the length of a row, after all its tokens are in place."""
    i_row = tl.program_id(0).to(tl.int64)
    i_b = i_row // heads
    p_length = lengths + i_b * slb + (i_row % heads) * slh
    p_new = position + i_b * tokens
    length = tl.load(p_length)
    for o_first in tl.range(0, tokens, COUNT_BLOCK):
        o_t = o_first + tl.arange(0, COUNT_BLOCK)
        b_position = tl.load(p_new + o_t, mask=o_t < tokens, other=-1)
        length += tl.sum((b_position >= 0).to(tl.int32), 0)
    tl.debug_barrier()  # every warp has read the old length
    tl.store(p_length, tl.minimum(length, slots))


def cache_append_(
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    lengths: Tensor,
    key: Tensor,
    value: Tensor,
    position: Tensor,
) -> None:
    """See :func:`fastattn.ops.cache_append_`. One launch where a row's tokens fit a tile, as in decoding, else two."""
    _launch.check_dtype("cache_append_", "key_cache", key_cache)
    batch, heads, tokens, _ = key.shape
    slots = key_cache.shape[2]
    if batch * heads * tokens == 0:
        return
    key_dim, value_dim = int(key.shape[3]), int(value.shape[3])
    most, _ = block_shape("cache_append_", "a head dim", max(key_dim, value_dim))
    one_tile = tokens <= most
    block_t = _launch.next_power_of_two(int(tokens)) if one_tile and isinstance(tokens, int) else most
    position = position.contiguous()
    _launch.kernel(append_kernel)[(batch * heads, 1 if one_tile else (tokens + block_t - 1) // block_t)](
        key_cache,
        value_cache,
        positions,
        lengths,
        key,
        value,
        position,
        heads,
        tokens,
        slots,
        *key_cache.stride(),
        *value_cache.stride(),
        *positions.stride(),
        *lengths.stride(),
        *key.stride(),
        *value.stride(),
        DK=key_dim,
        DV=value_dim,
        BLOCK_T=block_t,
        BLOCK_DK=_launch.next_power_of_two(key_dim, 16),
        BLOCK_DV=_launch.next_power_of_two(value_dim, 16),
        ADVANCE=one_tile,
        num_warps=4 if block_t * key_dim >= 1024 else 1,
        num_stages=1,
    )
    if not one_tile:
        advance(lengths, position, slots)


def advance(lengths: Tensor, position: Tensor, slots: int) -> None:
    """Add the tokens of ``position [B, T]``, contiguous, to ``lengths [B, Hkv]``, up to ``slots``."""
    rows, heads = lengths.shape
    _launch.kernel(advance_kernel)[(rows * heads,)](
        lengths, position, heads, position.shape[1], slots, *lengths.stride(), num_warps=4, num_stages=1
    )


def cache_compact_(
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    lengths: Tensor,
    scores: Tensor,
    budget: int,
    min_length: int,
) -> None:
    """See :func:`fastattn.ops.cache_compact_`. Two launches."""
    _launch.check_dtype("cache_compact_", "key_cache", key_cache)
    _compact(((key_cache, value_cache),), positions, lengths, scores, budget, min_length)


def cache_compact_codes_(
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    lengths: Tensor,
    key_scale: Tensor,
    value_scale: Tensor,
    scores: Tensor,
    budget: int,
    min_length: int,
) -> None:
    """The same of a quantised cache, whose scales move too. Three launches."""
    pairs = ((key_cache, value_cache), (key_scale, value_scale))
    _compact(pairs, positions, lengths, scores, budget, min_length)


def _compact(
    pairs: tuple[tuple[Tensor, Tensor], ...],
    positions: Tensor,
    lengths: Tensor,
    scores: Tensor,
    budget: int,
    min_length: int,
) -> None:
    """Choose the best slots, then move what each pair of buffers holds for them."""
    if scores.dtype != torch.float32:
        raise TypeError(f"cache_compact_ on a GPU takes float32, got scores of {scores.dtype}")
    batch, heads, slots = positions.shape
    rows = batch * heads
    if rows == 0 or slots <= budget:
        return
    index = lengths.new_empty(rows, budget)
    moved = lengths.new_empty(rows)
    _launch.kernel(select_kernel)[(rows,)](
        scores.contiguous(),
        positions,
        lengths,
        index,
        moved,
        heads,
        slots,
        budget,
        min_length,
        *positions.stride(),
        *lengths.stride(),
        BLOCK=SELECT_BLOCK,
        num_warps=8,
        num_stages=1,
    )
    for keys, values in pairs:
        key_dim, value_dim = (int(x.shape[3]) if x.dim() == 4 else 1 for x in (keys, values))
        columns = min(MOVE_BYTES // keys.element_size(), _launch.next_power_of_two(max(key_dim, value_dim)))
        key_slices, value_slices = (triton.cdiv(dim, columns) for dim in (key_dim, value_dim))
        _launch.kernel(move_kernel)[(rows, key_slices + value_slices)](
            keys,
            values,
            index,
            moved,
            heads,
            budget,
            key_slices,
            *four_strides(keys),
            *four_strides(values),
            DK=key_dim,
            DV=value_dim,
            SLOTS=MOVE_SLOTS,
            COLUMNS=columns,
            num_warps=8,
            num_stages=1,
        )


def four_strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides of ``[B, Hkv, C, n]``, or of scales ``[B, Hkv, C]``, which have one number per slot.

    In place of a view: torch.compile copies what a kernel writes through one.
    """
    return tensor.stride() if tensor.dim() == 4 else (*tensor.stride(), 1)


def offline_cases() -> list[OfflineCase]:
    """Both updates of the usual caches and of a latent one; few and many new tokens."""
    widths = {"64/64": (8, 64, 64), "128/128": (8, 128, 128), "192/128": (8, 192, 128), "576/0": (1, 576, 0)}

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def cache(heads: int, key_dim: int, value_dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        shape = (4, heads, 4224)
        integers = (empty(*shape, dtype=torch.int32), empty(*shape[:2], dtype=torch.int32))
        return (empty(*shape, key_dim), empty(*shape, value_dim), *integers)

    def append_case(name: str, tokens: int, heads: int, key_dim: int, value_dim: int) -> OfflineCase:
        def launch() -> None:
            key, value = empty(4, heads, tokens, key_dim), empty(4, heads, tokens, value_dim)
            position = empty(4, tokens, dtype=torch.int32)
            cache_append_(*cache(heads, key_dim, value_dim), key, value, position)

        # a few tokens are fewer numbers than the lanes of a warp hold at 16 bytes each
        narrow = ("append_kernel",) if tokens <= 4 else ()
        return OfflineCase(f"cache_append_ {name} tokens {tokens}", launch, narrow=narrow)

    def compact_case(name: str, heads: int, key_dim: int, value_dim: int) -> OfflineCase:
        def launch() -> None:
            scores = empty(4, heads, 4224, dtype=torch.float32)
            cache_compact_(*cache(heads, key_dim, value_dim), scores, 4096, 4224)

        return OfflineCase(f"cache_compact_ {name}", launch, narrow=("select_kernel",))

    appends = [append_case(name, tokens, *sizes) for name, sizes in widths.items() for tokens in (1, 4, 512)]
    return [*appends, *(compact_case(name, *sizes) for name, sizes in widths.items())]
