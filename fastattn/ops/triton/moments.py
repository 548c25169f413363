"""Mean and covariance of query vectors on a device, streaming, in two passes.

The first pass adds the queries up; the second subtracts the mean before it multiplies, which the shortcut
``E[x^2] - E[x]^2`` would not survive on shifted data. Where few heads meet many tokens, programs share the tokens and a
third kernel adds up their parts, in a fixed order: the same input gives the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.ops.triton import _launch
from fastattn.ops.triton._slots import block_shape
from fastattn.ops.triton.configs import OfflineCase

COUNT_BLOCK = tl.constexpr(2048)
ADD_BLOCK = 1024
SPLIT_TOKENS = 512  # a program with fewer tokens spends more on its start and its part of the sum than it saves
MOST_SPLITS = 16  # bounds the workspace: one covariance per split


@triton.jit
def valid_tokens(p_valid, o_t, tokens, HAS_VALID: tl.constexpr):
    """Which of ``o_t`` are tokens to count."""
    m_t = o_t < tokens
    if HAS_VALID:
        m_t = m_t & (tl.load(p_valid + o_t, mask=m_t, other=0).to(tl.int32) != 0)
    return m_t


@triton.jit
def count_tokens(p_valid, tokens, HAS_VALID: tl.constexpr):
    """How many of a row's tokens count."""
    count = tokens
    if HAS_VALID:
        count = tl.zeros((), tl.int32)
        for start in tl.range(0, tokens, COUNT_BLOCK):
            m_t = valid_tokens(p_valid, start + tl.arange(0, COUNT_BLOCK), tokens, HAS_VALID)
            count += tl.sum(m_t.to(tl.int32), 0)
    return count


@triton.jit
def skips(p_valid, tokens, min_length, HAS_VALID: tl.constexpr):
    """Whether a row has too few tokens; they are only counted where that can be."""
    skip = False
    if min_length > 0:
        skip = count_tokens(p_valid, tokens, HAS_VALID) < min_length
    return skip


@triton.jit
def sum_kernel(
    query,
    valid,
    partial,
    heads,
    tokens,
    share,
    splits,
    min_length,
    sqb,
    sqh,
    sqt,
    sqd,
    HAS_VALID: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: the sum of a share of a head's queries, ``partial [head, split, D]``."""
    i_head = tl.program_id(0).to(tl.int64)
    i_split = tl.program_id(1)
    i_b = i_head // heads
    p_valid = valid + i_b * tokens
    if skips(p_valid, tokens, min_length, HAS_VALID):
        return
    p_query = query + i_b * sqb + (i_head % heads) * sqh
    first = i_split * share
    last = tl.minimum(first + share, tokens)
    o_d = tl.arange(0, BLOCK_D)
    # one sum per token of a block, added up at the end: short chains of additions, and one exchange between warps
    b_sum = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for start in tl.range(first, last, BLOCK_T):
        o_t = start + tl.arange(0, BLOCK_T)
        m_t = valid_tokens(p_valid, o_t, last, HAS_VALID)
        # [T, D]
        pointers = p_query + o_t.to(tl.int64)[:, None] * sqt + o_d.to(tl.int64)[None, :] * sqd
        b_query = tl.load(pointers, mask=m_t[:, None] & (o_d < D)[None, :], other=0.0)
        b_sum += b_query.to(tl.float32)
    tl.store(partial + (i_head * splits + i_split) * D + o_d, tl.sum(b_sum, 0), mask=o_d < D)


@triton.jit
def mean_of(partial, i_head, splits, count, o_d, D: tl.constexpr, BLOCK: tl.constexpr):
    """Columns ``o_d`` of a head's mean, from the partial sums; zero where nothing counts and beyond ``D``."""
    b_sum = tl.zeros((BLOCK,), tl.float32)
    for i_split in tl.range(0, splits):
        b_sum += tl.load(partial + (i_head * splits + i_split) * D + o_d, mask=o_d < D, other=0.0)
    return b_sum / tl.maximum(count, 1)


@triton.jit
def centered_tile(p_query, o_t, o_d, sqt, sqd, m_t, b_mean, D: tl.constexpr, BLOCK: tl.constexpr):
    """Queries less their mean ``[T, BLOCK]``, zeros for tokens that do not count."""
    pointers = p_query + o_t.to(tl.int64)[:, None] * sqt + o_d.to(tl.int64)[None, :] * sqd
    m_tile = m_t[:, None]
    if D % BLOCK != 0:
        m_tile = m_tile & (o_d < D)[None, :]
    b_query = tl.load(pointers, mask=m_tile, other=0.0).to(tl.float32)
    return tl.where(m_t[:, None], b_query - b_mean[None, :], 0.0)


@triton.jit
def covariance_kernel(
    query,
    valid,
    partial,
    mean,
    cov,
    heads,
    tokens,
    share,
    splits,
    min_length,
    sqb,
    sqh,
    sqt,
    sqd,
    HAS_VALID: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """One program: a tile of a head's covariance over a share of its tokens, ``cov [head, split, D, D]``.

    Tiles above the diagonal are left to those below, which write both.
    """
    TILES: tl.constexpr = (D + BLOCK_M - 1) // BLOCK_M
    i_head = tl.program_id(0).to(tl.int64)
    i_m = tl.program_id(1) // TILES
    i_n = tl.program_id(1) % TILES
    i_split = tl.program_id(2)
    i_b = i_head // heads
    p_valid = valid + i_b * tokens
    if i_n > i_m:
        return
    count = count_tokens(p_valid, tokens, HAS_VALID)
    if count < min_length:
        return
    p_query = query + i_b * sqb + (i_head % heads) * sqh
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = i_n * BLOCK_M + tl.arange(0, BLOCK_M)
    b_mean_m = mean_of(partial, i_head, splits, count, o_m, D, BLOCK_M)
    b_mean_n = mean_of(partial, i_head, splits, count, o_n, D, BLOCK_M)
    first = i_split * share
    last = tl.minimum(first + share, tokens)
    b_acc = tl.zeros((BLOCK_M, BLOCK_M), tl.float32)
    for start in tl.range(first, last, BLOCK_T):
        o_t = start + tl.arange(0, BLOCK_T)
        m_t = valid_tokens(p_valid, o_t, last, HAS_VALID)
        # [T, M], [T, N]
        b_m = centered_tile(p_query, o_t, o_m, sqt, sqd, m_t, b_mean_m, D, BLOCK_M)
        b_n = centered_tile(p_query, o_t, o_n, sqt, sqd, m_t, b_mean_n, D, BLOCK_M)
        b_acc = tl.dot(tl.trans(b_m), b_n, b_acc, input_precision=PRECISION)
    b_acc = b_acc / tl.maximum(count, 1)
    p_cov = cov + (i_head * splits + i_split) * D * D
    m_tile = (o_m < D)[:, None] & (o_n < D)[None, :]
    tl.store(p_cov + o_m[:, None] * D + o_n[None, :], b_acc, mask=m_tile)
    if i_m > i_n:
        tl.store(p_cov + o_n[None, :] * D + o_m[:, None], b_acc, mask=m_tile)
    elif i_split == 0:
        tl.store(mean + i_head * D + o_m, b_mean_m, mask=o_m < D)


@triton.jit
def add_kernel(
    valid, cov, total, heads, tokens, splits, size, min_length, HAS_VALID: tl.constexpr, BLOCK: tl.constexpr
):
    """One program: a block of a head's covariance, added up over the splits."""
    i_head = tl.program_id(0).to(tl.int64)
    if skips(valid + (i_head // heads) * tokens, tokens, min_length, HAS_VALID):
        return
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_sum = tl.zeros((BLOCK,), tl.float32)
    for i_split in tl.range(0, splits):
        b_sum += tl.load(cov + (i_head * splits + i_split) * size + o, mask=o < size, other=0.0)
    tl.store(total + i_head * size + o, b_sum, mask=o < size)


def query_moments(query: Tensor, valid: Tensor | None, min_length: int) -> tuple[Tensor, Tensor]:
    """See :func:`fastattn.ops.query_moments`."""
    _launch.check_dtype("query_moments", "query", query)
    batch, heads, tokens, _ = query.shape
    dim = int(query.shape[3])
    block_t, block_d = block_shape("query_moments", "a head dim", dim)
    block_t = min(block_t, 32)
    mean = query.new_empty(batch, heads, dim, dtype=torch.float32)
    cov = query.new_empty(batch, heads, dim, dim, dtype=torch.float32)
    if mean.numel() == 0:
        return mean, cov
    target = _launch.target_of(query)
    block_m = min(32 if query.dtype == torch.float32 else 64, block_d)
    tiles = (dim + block_m - 1) // block_m
    splits, share = _split_tokens(target, batch * heads * (tiles * (tiles + 1) // 2), tokens, block_t)
    has_valid = valid is not None
    valid = valid.contiguous() if valid is not None else query  # a stand-in that is not read
    partial = query.new_empty(batch * heads, splits, dim, dtype=torch.float32)
    parts = cov if splits == 1 else query.new_empty(batch * heads, splits, dim, dim, dtype=torch.float32)
    sizes = (heads, tokens, share, splits, min_length, *query.stride())
    _launch.kernel(sum_kernel)[(batch * heads, splits)](
        query,
        valid,
        partial,
        *sizes,
        HAS_VALID=has_valid,
        D=dim,
        BLOCK_T=block_t,
        BLOCK_D=block_d,
        num_warps=4,
        num_stages=2,
    )
    # centered queries have all the bits of float32: three TF32 products where the chip has them, else float32 ones
    exact = query.dtype == torch.float32 or target.family == "gfx942"
    _launch.kernel(covariance_kernel)[(batch * heads, tiles * tiles, splits)](
        query,
        valid,
        partial,
        mean,
        parts,
        *sizes,
        HAS_VALID=has_valid,
        PRECISION="ieee" if exact else "tf32x3",
        D=dim,
        BLOCK_M=block_m,
        BLOCK_T=16 if block_m == 64 and not exact else 32,
        num_warps=4,
        num_stages=2,
    )
    if splits != 1:
        sizes = (heads, tokens, splits, dim * dim, min_length)
        _launch.kernel(add_kernel)[(batch * heads, (dim * dim + ADD_BLOCK - 1) // ADD_BLOCK)](
            valid, parts, cov, *sizes, HAS_VALID=has_valid, BLOCK=ADD_BLOCK, num_warps=4, num_stages=1
        )
    return mean, cov


def _split_tokens(target: _launch.Target, programs: int, tokens: int, block: int) -> tuple[int, int]:
    """How many programs share the tokens where ``programs`` do without splitting, and the tokens of each in blocks."""
    wanted = 2 * target.processors // programs  # two programs per processor run at once
    splits = torch.sym_max(1, torch.sym_min(torch.sym_min(wanted, MOST_SPLITS), tokens // SPLIT_TOKENS))
    return splits, ((tokens + splits - 1) // splits + block - 1) // block * block


def offline_cases() -> list[OfflineCase]:
    """A window of queries while decoding, and a prompt whose tokens are shared by several programs."""

    def case(dim: int, tokens: int, dtype: torch.dtype) -> OfflineCase:
        def launch() -> object:
            query = torch.empty(1, 8, tokens, dim, dtype=dtype, device="meta")
            return query_moments(query, torch.empty(1, tokens, dtype=torch.bool, device="meta"), 0)

        return OfflineCase(f"query_moments {dim} tokens {tokens} {str(dtype)[6:]}", launch)

    cases = [case(dim, tokens, torch.bfloat16) for dim in (64, 96, 128, 192, 256) for tokens in (128, 8192)]
    return [*cases, case(128, 8192, torch.float16), case(128, 8192, torch.float32)]
