"""CPU formulations of the scores and query moments.

They work row by row on the valid slots only, so that temporaries stay the size of one row, and skip rows that are not
full after one look at the lengths.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fastattn.ops._outputs import accumulator_dtype
from fastattn.ops.cpu.native import operators

# Vectors are widened to float32 in pieces of about this many numbers (16 MiB), which malloc keeps for the next call.
_PIECE = 1 << 22


def score_knorm(key: Tensor, lengths: Tensor, min_length: int) -> Tensor:
    native = operators()
    if native and key.stride(3) == 1:
        return native.score_knorm(key, lengths, min_length)
    out = _no_score(key)
    heads = key.shape[1]
    for b, length in _full_rows(lengths, min_length):
        parts = max(1, min(heads, length * heads * key.shape[3] // _PIECE))
        for keys, scores in zip(key[b, :, :length].chunk(parts), out[b, :, :length].chunk(parts), strict=True):
            torch.linalg.vector_norm(keys, dim=-1, dtype=out.dtype, out=scores).neg_()
    return _mask_ragged(out, lengths)


def score_key_diff(key: Tensor, lengths: Tensor, min_length: int) -> Tensor:
    native = operators()
    if native and key.stride(3) == 1:
        return native.score_key_diff(key, lengths, min_length)
    out = _no_score(key)
    for b, _ in _full_rows(lengths, min_length):
        for h, count in enumerate(lengths[b].tolist()):
            # Contiguous: a norm over a strided dim is summed in sequence and errs several times as much.
            unit = _unit(key[b, h, :count].to(out.dtype).contiguous())
            out[b, h, :count] = -(unit @ _unit(unit.sum(0)))  # the sum's length does not matter
    return out


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
) -> Tensor:
    out = _no_score(key)
    groups = _groups(query_mean, query_samples, key.shape[1])
    for b, _ in _full_rows(lengths, min_length):
        for h, count in enumerate(lengths[b].tolist()):
            if count == 0:
                continue
            group = slice(h * groups, (h + 1) * groups)
            wide = key[b, h, :count].to(out.dtype)
            if query_samples is not None:
                logits = scale * (query_samples[b, group] @ wide.mT)  # [G, N, T]
                variance, mean = torch.var_mean(logits, dim=1, correction=0)
                z = mean + variance / 2
            else:
                assert query_mean is not None
                z = scale * (query_mean[b, group] @ wide.mT)  # [G, T]
                if query_cov is not None:
                    for g, cov in enumerate(query_cov[b, group]):
                        z[g] += (scale**2 / 2) * ((wide @ cov) * wide).sum(-1)
            sink = positions[b, h, :count] < n_sink
            z = z.masked_fill(sink, float("-inf"))
            score = torch.softmax(z, dim=-1).mean(0)
            if use_value_norm:
                norm = torch.linalg.vector_norm(value[b, h, :count], dim=-1, dtype=out.dtype)
                score = (score + epsilon) * norm
            out[b, h, :count] = score.masked_fill(sink, float("inf"))
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


def _full_rows(lengths: Tensor, min_length: int) -> Iterator[tuple[int, int]]:
    """Row and longest valid length of the rows of which some head is to be scored."""
    for b, row in enumerate(lengths.tolist()):
        longest = max(row, default=0)
        if longest > 0 and longest >= min_length:
            yield b, longest


def _mask_ragged(out: Tensor, lengths: Tensor) -> Tensor:
    """-inf beyond the heads' own lengths, where a row's heads differ."""
    slots = torch.arange(out.shape[2])
    return out.masked_fill_(slots >= lengths[..., None], float("-inf"))
