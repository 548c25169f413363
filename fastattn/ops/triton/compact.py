"""The kernels of compaction: choose the best slots of a row, then move them to the front.

Choosing is a radix search over the bits of the scores. Four passes, of eight bits each, find the score of the last slot
that is kept; a fifth keeps everything above and, of the equal ones, the latest. Any number of slots, no sorting, exact.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def order_bits(b_score):
    """uint32 numbers in the order of the scores: zeros of either sign are equal, NaN ranks lowest, below -inf."""
    bits = tl.where(b_score == 0.0, 0.0, b_score).to(tl.uint32, bitcast=True)
    ordered = tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(b_score != b_score, 0, ordered).to(tl.uint32)


@triton.jit
def select_kernel(
    scores,
    positions,
    lengths,
    index,
    moved,
    heads,
    slots,
    budget,
    min_length,
    spb,
    sph,
    spc,
    slb,
    slh,
    BLOCK: tl.constexpr,
):
    """One program: a row. Writes the kept slots to ``index [row, budget]``, moves their positions, sets the length.

    ``moved [row]`` says whether the row changes, so that the kernel that moves the vectors need not read the lengths,
    which are the new ones by then.
    """
    i_row = tl.program_id(0).to(tl.int64)
    i_b = i_row // heads
    i_h = i_row % heads
    p_length = lengths + i_b * slb + i_h * slh
    length = tl.minimum(tl.load(p_length), slots)
    changes = (length > budget) & (length >= min_length)
    tl.store(moved + i_row, changes.to(tl.int32))
    if changes:
        p_score = scores + i_row * slots
        p_position = positions + i_b * spb + i_h * sph
        # The bits of the budget-th best score, eight at a time. Not a function of its own: torch.compile would take
        # whatever its result reaches for derived from the scores, and these for written.
        wanted = budget  # still to take at this prefix, counted from the top
        threshold = tl.zeros((), tl.uint32)
        equal = tl.zeros((), tl.int32)
        o_digit = tl.arange(0, 256)
        for i_pass in tl.static_range(4):
            b_count = tl.zeros((256,), tl.int32)
            for start in tl.range(0, length, BLOCK):
                o_c = start + tl.arange(0, BLOCK)
                m_c = o_c < length
                bits = order_bits(tl.load(p_score + o_c, mask=m_c, other=0.0))
                if i_pass > 0:
                    m_c = m_c & ((bits >> (32 - 8 * i_pass)) == threshold)
                b_digit = ((bits >> (24 - 8 * i_pass)) & 255).to(tl.int32)
                b_count += tl.histogram(b_digit, 256, mask=m_c)
            at_least = tl.sum(b_count, 0) - tl.cumsum(b_count, 0) + b_count
            digit = tl.max(tl.where(at_least >= wanted, o_digit, 0), 0)
            wanted -= tl.sum(tl.where(o_digit > digit, b_count, 0), 0)
            equal = tl.sum(tl.where(o_digit == digit, b_count, 0), 0)
            threshold = (threshold << 8) | digit.to(tl.uint32)

        # Everything above is kept, and the latest of the slots that equal it.
        passed = equal - wanted
        seen = tl.zeros((), tl.int32)
        kept = tl.zeros((), tl.int32)
        for start in tl.range(0, length, BLOCK):
            o_c = start + tl.arange(0, BLOCK)
            m_c = o_c < length
            bits = order_bits(tl.load(p_score + o_c, mask=m_c, other=0.0))
            b_equal = (m_c & (bits == threshold)).to(tl.int32)
            m_keep = m_c & ((bits > threshold) | ((b_equal == 1) & (seen + tl.cumsum(b_equal, 0) > passed)))
            b_keep = m_keep.to(tl.int32)
            o_to = kept + tl.cumsum(b_keep, 0) - 1
            tl.store(index + i_row * budget + o_to, o_c, mask=m_keep)
            b_position = tl.load(p_position + o_c.to(tl.int64) * spc, mask=m_keep, other=-1)
            # a slot moves down at most: its new place may be one that another warp has yet to read in this block
            tl.debug_barrier()
            tl.store(p_position + o_to.to(tl.int64) * spc, b_position, mask=m_keep)
            seen += tl.sum(b_equal, 0)
            kept += tl.sum(b_keep, 0)
        for start in tl.range(budget, slots, BLOCK):
            o_c = start + tl.arange(0, BLOCK)
            tl.store(p_position + o_c.to(tl.int64) * spc, tl.full((BLOCK,), -1, tl.int32), mask=o_c < slots)
        tl.store(p_length, budget)


@triton.jit
def move_slice(
    pointer,
    p_index,
    budget,
    i_slice,
    stride_slot,
    stride_d,
    D: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Move a slice of columns of the kept slots down to the front, in ascending order.

    A slot's source never lies before its destination, and sources ascend: later tiles read nothing that earlier ones
    wrote. Within a tile the barrier keeps a fast warp from writing what a slow one has yet to read.
    """
    o_d = i_slice * COLUMNS + tl.arange(0, COLUMNS)
    m_d = (o_d < D)[None, :]
    o_d = o_d.to(tl.int64)[None, :] * stride_d
    for start in tl.range(0, budget, SLOTS):
        o_to = start + tl.arange(0, SLOTS)
        m_to = o_to < budget
        o_from = tl.load(p_index + o_to, mask=m_to, other=0).to(tl.int64)
        m_tile = m_to[:, None] & m_d
        # [SLOTS, COLUMNS]
        b_tile = tl.load(pointer + o_from[:, None] * stride_slot + o_d, mask=m_tile)
        tl.debug_barrier()
        tl.store(pointer + o_to.to(tl.int64)[:, None] * stride_slot + o_d, b_tile, mask=m_tile)


@triton.jit
def move_kernel(
    key_cache,
    value_cache,
    index,
    moved,
    heads,
    budget,
    key_slices,
    skb,
    skh,
    skc,
    skd,
    svb,
    svh,
    svc,
    svd,
    DK: tl.constexpr,
    DV: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program: a slice of columns of a row's keys or values."""
    i_row = tl.program_id(0).to(tl.int64)
    if tl.load(moved + i_row) == 0:
        return
    i_b = i_row // heads
    i_h = i_row % heads
    i_slice = tl.program_id(1)
    p_index = index + i_row * budget
    if i_slice < key_slices:
        move_slice(key_cache + i_b * skb + i_h * skh, p_index, budget, i_slice, skc, skd, DK, SLOTS, COLUMNS)
    elif DV > 0:
        i_slice -= key_slices
        move_slice(value_cache + i_b * svb + i_h * svh, p_index, budget, i_slice, svc, svd, DV, SLOTS, COLUMNS)
