"""Absorbed multi-head latent attention over a latent cache: split-KV kernel and launcher."""

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
from fastattn.ops.triton.configs import OfflineCase, latent_config

LARGEST_RANK = 512
LARGEST_ROPE = 128


@triton.jit
def latent_kernel(
    query_latent,
    query_rope,
    cache,
    lengths,
    out,
    lse,
    tokens,
    window,
    capacity,
    row_tiles,
    splits,
    sqb,
    sqh,
    sqt,
    sqd,
    srb,
    srh,
    srt,
    srd,
    scb,
    sct,
    scd,
    slb,
    sos,
    sls,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    RANK1: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE1: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: one split of a row's slots for one tile of (query, head) pairs. All heads read the same latents."""
    i_tile = tl.program_id(0) % row_tiles
    i_b = (tl.program_id(0) // row_tiles).to(tl.int64)
    i_split = tl.program_id(1)

    o_row = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    m_row = o_row < tokens * HEADS
    o_query = o_row // HEADS
    o_head = (o_row % HEADS).to(tl.int64)
    o_rank = tl.arange(0, RANK1)

    i_last = tl.minimum(i_tile * BLOCK_M + BLOCK_M, tokens * HEADS) - 1
    length = tl.load(lengths + i_b * slb)
    length, first, last = split_range(
        length, capacity, tokens, i_last // HEADS, i_split, splits, CAUSAL=CAUSAL, BLOCK_N=BLOCK_N
    )
    if WINDOW:
        first, last = window_range(
            length, tokens, i_tile * BLOCK_M // HEADS, i_last // HEADS, window, i_split, splits, CAUSAL, BLOCK_N
        )
    o_limit = tl.zeros((BLOCK_M,), tl.int32) + length
    if CAUSAL:
        o_limit = length - tokens + 1 + o_query

    # [M, RANK1], [M, ROPE1]
    p_query = query_latent + i_b * sqb + o_head * sqh + o_query.to(tl.int64) * sqt
    b_q = load_row(p_query, o_rank, sqd, m_row, RANK, RANK1)
    if ROPE > 0:
        o_rope = tl.arange(0, ROPE1)
        p_rope = query_rope + i_b * srb + o_head * srh + o_query.to(tl.int64) * srt
        b_r = load_row(p_rope, o_rope, srd, m_row, ROPE, ROPE1)
    p_cache = cache + i_b * scb

    b_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    b_sum = tl.zeros((BLOCK_M,), tl.float32)
    b_out = tl.zeros((BLOCK_M, RANK1), tl.float32)
    for start in tl.range(first, last, BLOCK_N):
        o_slot = start + tl.arange(0, BLOCK_N)
        m_slot = o_slot < last
        # [N, RANK1]: read once, key here and value below
        b_c = load_tile(p_cache, o_slot, o_rank, sct, scd, m_slot, RANK, RANK1)
        b_score = tl.dot(b_q, tl.trans(b_c), input_precision="ieee")
        if ROPE > 0:
            b_k = load_tile(p_cache + RANK * scd, o_slot, o_rope, sct, scd, m_slot, ROPE, ROPE1)
            b_score = tl.dot(b_r, tl.trans(b_k), b_score, input_precision="ieee")
        m_seen = m_slot[None, :] & (o_slot[None, :] < o_limit[:, None])
        if WINDOW:  # a query stands at its own slot, the last that it sees, or one past it
            m_seen = m_seen & (o_slot[None, :] + window + (1 if CAUSAL else 0) > o_limit[:, None])
        b_logit, _ = to_logits(b_score, 0.0, 0, SCALE, SOFTCAP, False)
        b_score = tl.where(m_seen, b_logit, float("-inf"))
        b_weight, b_max, b_sum, b_factor = softmax_step(b_score, b_max, b_sum)
        b_out = tl.dot(b_weight.to(b_c.dtype), b_c, b_out * b_factor[:, None], input_precision="ieee")

    b_divisor, b_lse = softmax_end(b_max, b_sum)
    # rows of the output are (batch, head, query) triples; combine reads nothing but the lse of an empty split
    o_out = (i_b * HEADS + o_head) * tokens + o_query
    m_out = m_row & ((first < last) | (splits == 1))
    tl.store(lse + i_split.to(tl.int64) * sls + o_out, b_lse, mask=m_row)
    tl.store(
        out + i_split.to(tl.int64) * sos + o_out[:, None] * RANK + o_rank[None, :],
        (b_out / b_divisor[:, None]).to(out.dtype.element_ty),
        mask=m_out[:, None] & (o_rank < RANK)[None, :],
    )


def latent_decode(
    query_latent: Tensor,
    query_rope: Tensor,
    cache: Tensor,
    lengths: Tensor,
    scale: float,
    causal: bool,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Launcher of ``fastattn::latent_decode``."""
    _launch.check_dtype("latent_decode", "query_latent", query_latent)
    batch, heads, tokens, rank = query_latent.shape
    rope, capacity = query_rope.shape[3], cache.shape[1]
    _launch.check_dim("latent_decode", "rank", rank, LARGEST_RANK)
    if rope > LARGEST_ROPE:
        raise ValueError(f"latent_decode on a GPU supports rope dims of 0 to {LARGEST_ROPE}, got {rope}")
    out, lse = empty_out_and_lse(query_latent, rank)
    if batch * heads * tokens == 0:
        return out, lse
    rank1, rope1 = _launch.next_power_of_two(rank, 16), _launch.next_power_of_two(rope, 16)
    launch_splits(
        latent_kernel,
        (query_latent, query_rope, cache, lengths),
        out,
        lse,
        config=latent_config(_launch.target_of(cache).family, heads * tokens, rank1, rope1, cache.itemsize),
        groups=batch,
        rows=heads * tokens,
        capacity=capacity,
        sizes=(tokens, window),
        SCALE=float(scale),
        CAUSAL=causal,
        WINDOW=window != 0,
        SOFTCAP=float(softcap),
        HEADS=int(heads),
        RANK=int(rank),
        RANK1=rank1,
        ROPE=int(rope),
        ROPE1=rope1,
    )
    if sinks is not None:
        add_sinks(out, lse, sinks)
    return out, lse


def offline_cases() -> list[OfflineCase]:
    """The ranks in use, times few, some and many rows."""

    def case(
        name: str, heads: int, rank: int, rope: int, tokens: int = 1, dtype=torch.bfloat16, features: tuple = ()
    ) -> OfflineCase:
        def launch() -> object:
            def empty(*shape: int) -> Tensor:
                return torch.empty(shape, dtype=dtype, device="meta")

            lengths = torch.empty(2, dtype=torch.int32, device="meta")
            query = empty(2, heads, tokens, rank), empty(2, heads, tokens, rope)
            return latent_decode(*query, empty(2, 4096, rank + rope), lengths, 0.1, True, *features)

        return OfflineCase(name, launch)

    cases = [
        case(f"latent_decode {rank}+{rope} rows {heads} x {tokens}", heads, rank, rope, tokens)
        for rank, rope in ((512, 64), (448, 128), (256, 64), (128, 64))
        for heads, tokens in ((16, 1), (16, 2), (32, 1), (128, 1), (128, 2))
    ]
    cases += [
        case(
            f"latent_decode {rank}+64 rows {heads * tokens} window, cap", heads, rank, 64, tokens, features=(1024, 50.0)
        )
        for rank in (512, 256)
        for heads, tokens in ((16, 1), (20, 1), (64, 1), (128, 2))
    ]
    cases.append(case("latent_decode 512+64 rows 16 float32", 16, 512, 64, dtype=torch.float32))
    return cases
