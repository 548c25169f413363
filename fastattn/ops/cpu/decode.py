"""Attention over a cache buffer on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from fastattn.ops._features import Features, add_sinks
from fastattn.ops._lengths import checked
from fastattn.ops._outputs import empty_out_and_lse
from fastattn.ops.cpu import _blocks, _flash
from fastattn.ops.cpu.attention import attend_range
from fastattn.ops.cpu.native import operators

NATIVE_QUERIES = 16  # with more, matrix products over blocks of keys are faster


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, scale: float, causal: bool, *options: Any
) -> tuple[Tensor, Tensor]:
    """See :func:`fastattn.ops.decode_attention`."""
    if options:
        return with_features(query, key, value, lengths, scale, causal, *options)
    return plain(query, key, value, lengths, scale, causal)


def with_features(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    scale: float,
    causal: bool,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over a cache with windows, sinks, soft caps and ALiBi."""
    if Features(window, softcap, None, alibi_slopes).by_score:
        out, lse = empty_out_and_lse(query, value.shape[3])
        out.zero_()
        lse.fill_(float("-inf"))
        kv_heads = key.shape[1]
        grouped_query, grouped_out, grouped_lse = (t.unflatten(1, (kv_heads, -1)) for t in (query, out, lse))
        slopes = None if alibi_slopes is None else alibi_slopes.view(kv_heads, -1)
        for batch, heads, length in blocks_of_equal_length(lengths, key.shape[2]):
            of_heads = None if slopes is None else slopes[heads]
            _blocks.forward_slots(
                grouped_query[batch, heads],
                key[batch, heads, :length],
                value[batch, heads, :length],
                None if positions is None else positions[batch, heads, :length],
                grouped_out[batch, heads],
                grouped_lse[batch, heads],
                causal=causal,
                scale=scale,
                features=Features(window, softcap, None, of_heads),
            )
    else:
        out, lse = plain(query, key, value, lengths, scale, causal)
    if sinks is not None:
        add_sinks(out, lse, sinks)
    return out, lse


def plain(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention over a cache without any of these."""
    native = operators()
    if native and query.shape[2] <= NATIVE_QUERIES and key.stride(3) == 1 and value.stride(3) == 1:
        return native.decode_attention(query, key, value, lengths, scale, causal)
    kv_heads, capacity = key.shape[1:3]
    if query.shape[2] == 1 or not causal:
        length = _common_length(lengths, capacity)
        if length and scale > 0 and query.numel() and _flash.takes_as_is(query, key, value):
            folded = query.view(query.shape[0], kv_heads, -1, query.shape[3])
            out, lse = _flash.forward_rows(folded, key[:, :, :length], value[:, :, :length], scale)
            return out.contiguous().view(query.shape), lse.contiguous().view(query.shape[:3])
    out, lse = empty_out_and_lse(query, value.shape[3])
    out.zero_()
    lse.fill_(float("-inf"))
    grouped_query, grouped_out, grouped_lse = (t.unflatten(1, (kv_heads, -1)) for t in (query, out, lse))
    for batch, heads, length in blocks_of_equal_length(lengths, capacity):
        attend_range(
            grouped_query[batch, heads],
            key[batch, heads, :length],
            value[batch, heads, :length],
            grouped_out[batch, heads],
            grouped_lse[batch, heads],
            first=length - query.shape[2] + 1 if causal else length + 1,
            scale=scale,
        )
    return out, lse


def _common_length(lengths: Tensor, capacity: int) -> int:
    """Valid slots of every batch row and head, 0 where they differ."""
    flat = checked("lengths", lengths.flatten(), capacity)
    return flat[0] if flat and flat.count(flat[0]) == len(flat) else 0


def blocks_of_equal_length(lengths: Tensor, capacity: int) -> Iterator[tuple[slice, slice, int]]:
    """Neighboring batch rows, else neighboring heads of one, with as many valid slots; not those with none."""
    valid = checked("lengths", lengths, capacity)
    for begin, end in _runs([row if min(row) < max(row) else row[0] for row in valid]):
        row = valid[begin]
        if min(row) == max(row):
            if row[0] > 0:
                yield slice(begin, end), slice(len(row)), row[0]
            continue
        for first, last in _runs(row):
            if row[first] > 0:
                for same in range(begin, end):
                    yield slice(same, same + 1), slice(first, last), row[first]


def _runs(values: list) -> Iterator[tuple[int, int]]:
    """Begin and end of each run of equal neighbors."""
    begin = 0
    for index in range(1, len(values) + 1):
        if index == len(values) or values[index] != values[begin]:
            yield begin, index
            begin = index
