"""CPU formulations of the scores and query moments.

They work row by row on the valid slots only, so that temporaries stay the size of one row, and skip rows that are not
full after one look at the lengths.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fastattn.ops import _formats
from fastattn.ops._lengths import checked
from fastattn.ops._outputs import accumulator_dtype
from fastattn.ops.cpu._pieces import is_transformed, of, pieces
from fastattn.ops.cpu.native import operators

# Vectors are widened to float32 in pieces of about this many numbers (16 MiB), which malloc keeps for the next call.
_PIECE = 1 << 22


def score_knorm(key: Tensor, lengths: Tensor, min_length: int, key_scale: Tensor | None = None) -> Tensor:
    native = operators()
    if native and key.stride(3) == 1 and (key_scale is None or key_scale.dim() == 3 or key_scale.stride(3) == 1):
        return native.score_knorm(key, lengths, min_length, key_scale)
    out = _no_score(key)
    heads = key.shape[1]
    for b, length in _full_rows(lengths, key.shape[2], min_length):
        if key_scale is not None:
            for h, count in enumerate(lengths[b].tolist()):
                out[b, h, :count] = -_norms(key[b, h, :count], of(key_scale, b, h, count), out.dtype)
            continue
        parts = max(1, min(heads, length * heads * key.shape[3] // _PIECE))
        for keys, scores in zip(key[b, :, :length].chunk(parts), out[b, :, :length].chunk(parts), strict=True):
            torch.linalg.vector_norm(keys, dim=-1, dtype=out.dtype, out=scores).neg_()
    return _mask_ragged(out, lengths)


def score_key_diff(key: Tensor, lengths: Tensor, min_length: int, key_scale: Tensor | None = None) -> Tensor:
    native = operators()
    if native and key.stride(3) == 1 and (key_scale is None or key_scale.dim() == 3 or key_scale.stride(3) == 1):
        return native.score_key_diff(key, lengths, min_length, key_scale)
    out = _no_score(key)
    for b, _ in _full_rows(lengths, key.shape[2], min_length):
        for h, count in enumerate(lengths[b].tolist()):
            _key_diff_head_(out[b, h, :count], key[b, h, :count], of(key_scale, b, h, count))
    return out


def _key_diff_head_(out: Tensor, key: Tensor, scale: Tensor | None) -> None:
    """Scores of one head, in two passes over what may be codes."""

    def units() -> Iterator[tuple[slice, Tensor]]:
        # Contiguous: a norm over a strided dim is summed in sequence and errs several times as much.
        return ((part, _unit(numbers.contiguous())) for part, numbers in pieces(key, scale, out.dtype))

    found = list(units()) if scale is None else None
    columns = 2 * key.shape[1] if is_transformed(scale) else key.shape[1]
    total = out.new_zeros(columns)
    for _, unit in found or units():
        total += unit.sum(0)
    anchor = _unit(total)  # the sum's length does not matter
    for part, unit in found or units():
        out[part] = -(unit @ anchor)


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
    out = _no_score(key)
    groups = _groups(query_mean, query_samples, key.shape[1])
    for b, _ in _full_rows(lengths, key.shape[2], min_length):
        for h, count in enumerate(lengths[b].tolist()):
            if count == 0:
                continue
            group = slice(h * groups, (h + 1) * groups)
            statistics = tuple(None if t is None else t[b, group] for t in (query_mean, query_cov, query_samples))
            z = _expected_logits(key[b, h, :count], of(key_scale, b, h, count), statistics, scale, out.dtype)
            sink = positions[b, h, :count] < n_sink
            z = z.masked_fill_(sink, float("-inf"))
            score = torch.softmax(z, dim=-1).mean(0)
            if use_value_norm:
                norm = _norms(value[b, h, :count], of(value_scale, b, h, count), out.dtype, value_dim)
                score = (score + epsilon) * norm
            out[b, h, :count] = score.masked_fill(sink, float("inf"))
    return out


def _expected_logits(
    key: Tensor, key_scale: Tensor | None, statistics: tuple[Tensor | None, ...], scale: float, dtype: torch.dtype
) -> Tensor:
    """``z [G, T]`` of one head, whose keys may be codes. Where those are transformed, the statistics are as well."""
    mean, cov, samples = statistics
    if is_transformed(key_scale):
        mean, samples = (None if t is None else _formats.hadamard(t) for t in (mean, samples))
        cov = None if cov is None else _formats.hadamard(_formats.hadamard(cov).mT).mT
    statistic = mean if samples is None else samples
    assert statistic is not None
    z = key.new_empty(statistic.shape[0], key.shape[0], dtype=dtype)
    for part, wide in pieces(key, key_scale, dtype):
        if samples is not None:
            logits = scale * (samples @ wide.mT)  # [G, N, T]
            variance, average = torch.var_mean(logits, dim=1, correction=0)
            z[:, part] = average + variance / 2
            continue
        assert mean is not None
        z[:, part] = scale * (mean @ wide.mT)
        if cov is not None:
            for g, of_head in enumerate(cov):
                z[g, part] += (scale**2 / 2) * ((wide @ of_head) * wide).sum(-1)
    return z


def _norms(vectors: Tensor, scale: Tensor | None, dtype: torch.dtype, dim: int = 0) -> Tensor:
    """Norms of one head's vectors ``[T, D]``, or of their first ``dim`` numbers, which a transform changes."""
    if scale is None:
        return torch.linalg.vector_norm(vectors, dim=-1, dtype=dtype)
    out = vectors.new_empty(vectors.shape[0], dtype=dtype)
    for part, wide in pieces(vectors, scale, dtype):
        numbers = wide
        if 0 < dim < wide.shape[1]:
            numbers = (_formats.hadamard(wide) if is_transformed(scale) else wide)[:, :dim]
        out[part] = torch.linalg.vector_norm(numbers, dim=-1)
    return out


def query_moments(query: Tensor, valid: Tensor | None, min_length: int) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, dim = query.shape
    dtype = accumulator_dtype(query.dtype)
    mean = query.new_zeros(batch, heads, dim, dtype=dtype)
    cov = query.new_zeros(batch, heads, dim, dim, dtype=dtype)
    counts = [tokens] * batch if valid is None else valid.sum(1).tolist()
    for b, count in enumerate(counts):
        if count < max(min_length, 1):
            continue
        chosen = None if valid is None or count == tokens else valid[b].nonzero().flatten()
        step = max(1, _PIECE // max(1, count * dim))
        for first in range(0, heads, step):
            piece = query[b, first : first + step]
            wide = (piece if chosen is None else piece.index_select(1, chosen)).to(dtype)
            center = wide.mean(1)
            wide = wide - center[:, None]
            mean[b, first : first + step] = center
            cov[b, first : first + step] = wide.mT @ wide / count
    return mean, cov


def _unit(vectors: Tensor) -> Tensor:
    """Divided by their norm; zero stays zero."""
    norm = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors / norm.masked_fill_(norm == 0, 1.0)


def _groups(query_mean: Tensor | None, query_samples: Tensor | None, kv_heads: int) -> int:
    statistic = query_mean if query_samples is None else query_samples
    assert statistic is not None
    return statistic.shape[1] // kv_heads


def _no_score(key: Tensor) -> Tensor:
    dtype = accumulator_dtype(key.dtype)
    return key.new_full(key.shape[:3], float("-inf"), dtype=dtype)


def _full_rows(lengths: Tensor, slots: int, min_length: int) -> Iterator[tuple[int, int]]:
    """Row and longest valid length of the rows of which some head is to be scored."""
    for b, row in enumerate(checked("lengths", lengths, slots)):
        longest = max(row, default=0)
        if longest > 0 and longest >= min_length:
            yield b, longest


def _mask_ragged(out: Tensor, lengths: Tensor) -> Tensor:
    """-inf beyond the heads' own lengths, where a row's heads differ."""
    slots = torch.arange(out.shape[2])
    return out.masked_fill_(slots >= lengths[..., None], float("-inf"))
