"""Expected Attention on a device: logits of the expected attention, their softmax over the slots, the score.

Three kernels. The first writes the logit of every query head and slot, with the maximum and the sum of exponentials of
each tile of slots; the second combines those to one maximum and one sum per query head; the third averages the heads of
a group and multiplies by the value's norm. The workspace is one number per query head and slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.ops import _formats
from fastattn.ops.triton import _launch
from fastattn.ops.triton._slots import block_shape, slot_chunks
from fastattn.ops.triton._tile import load_tile
from fastattn.ops.triton.configs import OfflineCase
from fastattn.ops.triton.expected_logits import MEAN, MOMENTS, SAMPLES, logits_kernel, logits_tile

SOFTMAX_BLOCK = 256


@triton.jit
def softmax_kernel(lengths, partial, softmax, tiles, min_length, GROUP: tl.constexpr, BLOCK_S: tl.constexpr):
    """One program: a query head. ``softmax [query head, 2]`` gets its largest logit and the factor on exponentials."""
    i_head = tl.program_id(0).to(tl.int64)
    if tl.load(lengths + i_head // GROUP) < min_length:
        return
    peak = float("-inf")
    total = 0.0
    for start in tl.range(0, tiles, BLOCK_S):
        o_s = start + tl.arange(0, BLOCK_S)
        p_partial = partial + (i_head * tiles + o_s) * 2
        b_peak = tl.load(p_partial, mask=o_s < tiles, other=float("-inf"))
        b_total = tl.load(p_partial + 1, mask=o_s < tiles, other=0.0)
        new = tl.maximum(peak, tl.max(b_peak, 0))
        base = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(peak - base) + tl.sum(b_total * tl.exp(b_peak - base), 0)
        peak = new
    # a head without a scored slot pays no attention
    tl.store(softmax + i_head * 2, tl.where(total == 0.0, 0.0, peak))
    tl.store(softmax + i_head * 2 + 1, tl.where(total == 0.0, 0.0, 1.0 / (GROUP * tl.where(total == 0.0, 1.0, total))))


@triton.jit
def score_kernel(
    value,
    lengths,
    positions,
    logits,
    softmax,
    score,
    heads,
    slots,
    chunk,
    n_sink,
    min_length,
    svb,
    svh,
    svc,
    svd,
    EPSILON: tl.constexpr,
    VALUE_NORM: tl.constexpr,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: a chunk of a row's slots."""
    i_row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + i_row)
    if length < min_length:
        return
    p_value = value + (i_row // heads) * svb + (i_row % heads) * svh
    first = tl.program_id(1) * chunk
    last = tl.minimum(first + chunk, slots)
    o_d = tl.arange(0, BLOCK_D)
    for start in tl.range(first, last, BLOCK_C):
        o_c = start + tl.arange(0, BLOCK_C)
        m_valid = (o_c < length) & (o_c < last)
        b_position = tl.load(positions + i_row * slots + o_c, mask=m_valid, other=0)
        m_scored = m_valid & (b_position >= n_sink)
        b_score = tl.zeros((BLOCK_C,), tl.float32)
        for i_head in tl.range(i_row * GROUP, (i_row + 1) * GROUP):
            b_z = tl.load(logits + i_head * slots + o_c, mask=m_scored, other=float("-inf"))
            b_score += tl.exp(b_z - tl.load(softmax + i_head * 2)) * tl.load(softmax + i_head * 2 + 1)
        if VALUE_NORM:
            b_value = load_tile(p_value, o_c, o_d, svc, svd, m_valid, DV, BLOCK_D).to(tl.float32)
            b_score = (b_score + EPSILON) * tl.sqrt_rn(tl.sum(b_value * b_value, 1))
        b_score = tl.where(m_scored, b_score, tl.where(m_valid, float("inf"), float("-inf")))
        tl.store(score + i_row * slots + o_c, b_score, mask=o_c < last)


def score_expected_attention(
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    positions: Tensor,
    query_mean: Tensor | None,
    query_cov: Tensor | None,
    query_samples: Tensor | None,
    scale: float,
    n_sink: int,
    epsilon: float,
    use_value_norm: bool,
    min_length: int,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    value_dim: int = 0,
) -> Tensor:
    """See :func:`fastattn.ops.score_expected_attention`."""
    if key_scale is not None:
        key, value = _formats.numbers(key, key_scale), _formats.numbers(value, value_scale)[..., :value_dim]
    operator = "score_expected_attention"
    _launch.check_dtype(operator, "key", key)
    batch, heads, slots, _ = key.shape
    value_dim = int(value.shape[3])
    block_shape(operator, "a key head dim", int(key.shape[3]))
    block_c, block_d = block_shape(operator, "a value head dim", value_dim) if use_value_norm else (128, 16)
    score = key.new_empty(batch, heads, slots, dtype=torch.float32)
    if score.numel() == 0:
        return score
    lengths, positions = lengths.contiguous(), positions.contiguous()
    statistics = (query_mean, query_cov, query_samples)
    group, logits, softmax = _logits_and_softmax(key, lengths, positions, statistics, scale, n_sink, min_length)
    chunks, chunk = slot_chunks(key, batch * heads, slots, block_c)
    _launch.kernel(score_kernel)[(batch * heads, chunks)](
        value,
        lengths,
        positions,
        logits,
        softmax,
        score,
        heads,
        slots,
        chunk,
        n_sink,
        min_length,
        *value.stride(),
        EPSILON=float(epsilon),
        VALUE_NORM=bool(use_value_norm),
        GROUP=group,
        DV=value_dim,
        BLOCK_C=block_c,
        BLOCK_D=block_d,
        num_warps=4,
        num_stages=2,
    )
    return score


def _logits_and_softmax(
    key: Tensor,
    lengths: Tensor,
    positions: Tensor,
    statistics: tuple[Tensor | None, Tensor | None, Tensor | None],
    scale: float,
    n_sink: int,
    min_length: int,
) -> tuple[int, Tensor, Tensor]:
    """The group, ``logits [query heads, slots]`` and ``softmax [query heads, 2]`` (see :func:`softmax_kernel`)."""
    batch, heads, slots, _ = key.shape
    dim = int(key.shape[3])
    form, matrix, columns, matrix_strides = _matrix(*statistics)
    group = int(matrix.shape[1] // heads)
    tile = logits_tile(_launch.target_of(key).family, key.dtype, form, dim, columns)
    tiles = (slots + tile["BLOCK_M"] - 1) // tile["BLOCK_M"]
    logits = key.new_empty(batch * heads * group, slots, dtype=torch.float32)
    partial = key.new_empty(batch * heads * group, tiles, 2, dtype=torch.float32)
    softmax = key.new_empty(batch * heads * group, 2, dtype=torch.float32)
    # a matrix product is worth a program of its own; without one, a program reads its keys once for all heads
    heads_each = group if form == MEAN.value else 1
    _launch.kernel(logits_kernel)[(batch * heads * (group // heads_each), tiles)](
        key,
        lengths,
        positions,
        matrix if statistics[0] is None else statistics[0].contiguous(),
        matrix,
        logits,
        partial,
        heads,
        slots,
        tiles,
        columns,
        n_sink,
        min_length,
        *key.stride(),
        *matrix_strides,
        SCALE=float(scale),
        FORM=form,
        GROUP=group,
        HEADS=heads_each,
        D=dim,
        **tile,
    )
    _launch.kernel(softmax_kernel)[(batch * heads * group,)](
        lengths, partial, softmax, tiles, min_length, GROUP=group, BLOCK_S=SOFTMAX_BLOCK, num_warps=4, num_stages=1
    )
    return group, logits, softmax


def _matrix(
    query_mean: Tensor | None, query_cov: Tensor | None, query_samples: Tensor | None
) -> tuple[int, Tensor, int, tuple[int, ...]]:
    """The form, the matrix ``[D, columns]`` of each query head that multiplies the keys, its columns, its strides."""
    if query_samples is not None:
        sb, sh, sn, sk = query_samples.stride()
        return SAMPLES.value, query_samples, query_samples.shape[2], (sb, sh, sk, sn)
    if query_cov is not None:
        return MOMENTS.value, query_cov, query_cov.shape[3], query_cov.stride()
    assert query_mean is not None
    return MEAN.value, query_mean, 0, (0, 0, 0, 0)


def offline_cases() -> list[OfflineCase]:
    """The three forms over usual caches, and the sample form over a latent one."""

    def case(name: str, form: str, heads: int, group: int, dim: int, value_dim: int, dtype: torch.dtype) -> OfflineCase:
        def launch() -> object:
            def empty(*shape: int, of: torch.dtype = torch.float32) -> Tensor:
                return torch.empty(shape, dtype=of, device="meta")

            shape = (2, heads, 4224)
            key, value = empty(*shape, dim, of=dtype), empty(*shape, value_dim, of=dtype)
            lengths, positions = empty(*shape[:2], of=torch.int32), empty(*shape, of=torch.int32)
            mean = None if form == "samples" else empty(2, heads * group, dim)
            cov = empty(2, heads * group, dim, dim) if form == "moments" else None
            samples = empty(2, heads * group, 128, dim) if form == "samples" else None
            return score_expected_attention(
                key, value, lengths, positions, mean, cov, samples, 0.125, 4, 0.0, True, 4224
            )

        return OfflineCase(f"score_expected_attention {name} {form}", launch, narrow=("softmax_kernel",))

    bf16 = torch.bfloat16
    cases = [
        case(f"{dim}/{value_dim}", form, 8, 4, dim, value_dim, bf16)
        for dim, value_dim in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
        for form in ("mean", "moments", "samples")
    ]
    cases.append(case("576/512 latent", "samples", 1, 16, 576, 512, bf16))
    cases.append(case("128/128 float16", "moments", 8, 4, 128, 128, torch.float16))
    cases.append(case("128/128 float32", "moments", 8, 4, 128, 128, torch.float32))
    return cases
