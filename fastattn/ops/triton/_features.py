"""What the attention kernels share for windows, sinks, soft caps, ALiBi and packed rows.

Each is a compile-time switch: a call without one compiles to the code that it had without all of this.

Packed rows. Tiles never cross rows, so a row of n (query, head) pairs takes ceil(n / BLOCK) tiles. How many that are in
all is known only on the device; the grid has room for the most there can be, and a small map gives every program its
row and its tile of the row. Programs beyond the last row get a tile that lies outside it and do nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.ops.triton._tile import LOG2E


@triton.jit
def tanh(b_x):
    """Within a few units: the series up to 1/4, where the quotient of exponentials would cancel."""
    b_abs = tl.abs(b_x)
    b_square = b_x * b_x
    b_series = 2.0 / 15 + b_square * (-17.0 / 315 + b_square * (62.0 / 2835))
    b_series = b_abs * (1.0 + b_square * (-1.0 / 3 + b_square * b_series))
    b_exp = tl.exp2(b_abs * (-2.0 * LOG2E))
    b_tanh = tl.where(b_abs < 0.25, b_series, (1.0 - b_exp) / (1.0 + b_exp))
    return tl.where(b_x < 0, -b_tanh, b_tanh)


@triton.jit
def to_logits(b_product, b_slope, b_distance, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr):
    """Products of queries and keys as logits in base 2, and tanh of the capped ones (else the products).

    ``b_slope`` and ``b_distance`` broadcast to the products.
    """
    b_tanh = b_product
    if SOFTCAP > 0:
        b_tanh = tanh(b_product * (SCALE / SOFTCAP))
        b_logit = b_tanh * (SOFTCAP * LOG2E)
    else:
        b_logit = b_product * (SCALE * LOG2E)
    if HAS_SLOPES:
        b_logit -= b_slope * LOG2E * tl.abs(b_distance).to(tl.float32)
    return b_logit, b_tanh


@triton.jit
def add_sink(b_max, b_sum, b_out, b_sink):
    """One more logit ``b_sink [M]`` in an online softmax in base 2, without a value."""
    b_sink = b_sink * LOG2E
    b_new = tl.maximum(b_max, b_sink)
    b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_factor = tl.exp2(b_max - b_base)
    return b_new, b_sum * b_factor + tl.exp2(b_sink - b_base), b_out * b_factor[:, None]


@triton.jit
def packed_row(tiles, cu_seqlens_q, cu_seqlens_k, i_tile):
    """The tile of its row that program tile ``i_tile`` has; first query, queries, first key and keys of that row."""
    i_row = tl.load(tiles + 2 * i_tile)
    i_own = tl.load(tiles + 2 * i_tile + 1)
    q_first = tl.load(cu_seqlens_q + i_row)
    queries = tl.load(cu_seqlens_q + i_row + 1) - q_first
    k_first = tl.load(cu_seqlens_k + i_row)
    keys = tl.load(cu_seqlens_k + i_row + 1) - k_first
    return i_own, q_first.to(tl.int64), queries, k_first.to(tl.int64), keys


def map_tiles(cu_seqlens: Tensor | None, total: int, group: int, block: int, unused: Tensor) -> tuple[Tensor, int]:
    """Row and tile of the row for every program tile, int32 ``[tiles, 2]``, and how many there are.

    Without packed rows ``unused`` and the tiles of ``total``.
    """
    if cu_seqlens is None:
        return unused, triton.cdiv(group * total, block)
    rows = cu_seqlens.shape[0] - 1
    tiles = group * total // block + rows  # sum of ceil(n / block) <= (sum of n) / block + rows
    own = (torch.diff(cu_seqlens).long() * group + (block - 1)) // block
    ends = own.cumsum(0)
    tile = torch.arange(tiles, device=cu_seqlens.device)
    row = torch.searchsorted(ends, tile, right=True).clamp(max=rows - 1)
    return torch.stack([row, tile - (ends - own)[row]], dim=1).int(), tiles


def tensors(
    unused: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> tuple[Tensor, ...]:
    """Arguments of a kernel: those given, contiguous and of the dtype that it reads, else ``unused``."""
    floats = (unused if t is None else t.float().contiguous() for t in (sinks, alibi_slopes))
    return (*floats, *(unused if t is None else t.contiguous() for t in (cu_seqlens_q, cu_seqlens_k)))


def switches(
    window: int, softcap: float, sinks: Tensor | None, alibi_slopes: Tensor | None, cu_seqlens: Tensor | None
) -> dict[str, Any]:
    """What a kernel is compiled for."""
    return {
        "WINDOW": window != 0,
        "SOFTCAP": float(softcap),
        "HAS_SINKS": sinks is not None,
        "HAS_SLOPES": alibi_slopes is not None,
        "PACKED": cu_seqlens is not None,
    }
