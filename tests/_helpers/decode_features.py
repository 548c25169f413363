"""Decode calls with features, drawn, and positions and masks of their slots computed slot by slot."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests._helpers import draw
from tests._helpers.features import cast, dense, features

Call = tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]


@st.composite
def decode_calls(draw_: Any, slots: int = 40, dtypes: Any = draw.FLOAT_DTYPES, most_queries: int = 4) -> Call:
    """Ragged caches with or without gaps, NaN and impossible positions beyond the valid slots."""
    batch, kv_heads, groups = draw_(st.integers(1, 2)), draw_(st.integers(1, 2)), draw_(st.integers(1, 3))
    queries, capacity = draw_(st.integers(1, most_queries)), draw_(draw.sizes(slots, 1))
    dim, value_dim = draw_(st.sampled_from([(8, 8), (7, 5), (24, 16)]))
    dtype, seed = draw_(st.sampled_from(dtypes)), draw_(draw.seeds)
    query = draw.normal(batch, kv_heads * groups, queries, dim, dtype=dtype, seed=seed)
    key = draw.normal(batch, kv_heads, capacity, dim, dtype=dtype, seed=seed + 1)
    value = draw.normal(batch, kv_heads, capacity, value_dim, dtype=dtype, seed=seed + 2)
    lengths = draw_(draw.lengths((batch, kv_heads), capacity))
    query, key, value = (draw.strided(t, draw_(draw.layouts)) for t in (query, key, value))
    for buffer in (key, value):
        draw.poison_slots_(buffer, lengths)
    options = draw_(features(kv_heads * groups)) | {"causal": draw_(st.booleans())}
    if draw_(st.booleans()):
        generator = torch.Generator().manual_seed(seed)
        steps = torch.randint(1, 5, (batch, kv_heads, capacity), generator=generator)
        positions = (steps.cumsum(2) - 1).int()
        unused = torch.arange(capacity) >= lengths[..., None]
        options["positions"] = draw.strided(positions.masked_fill(unused, -1), draw_(draw.layouts))
    return query, key, value, lengths, options


def dense_decode(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, options: dict[str, Any], *, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Keys and values finite; features as in :func:`tests._helpers.features.dense`."""
    batch, heads, queries, _ = query.shape
    kv_heads, capacity = key.shape[1:3]
    distance = torch.zeros(batch, heads, queries, capacity, dtype=torch.int64)
    visible = torch.zeros(batch, heads, queries, capacity, dtype=torch.bool)
    positions = options.get("positions")
    for b, own_head in itertools.product(range(batch), range(kv_heads)):
        length = int(lengths[b, own_head])
        if length == 0:
            continue
        where = torch.arange(capacity) if positions is None else positions[b, own_head].long()
        group = slice(own_head * heads // kv_heads, (own_head + 1) * heads // kv_heads)
        for i in range(queries):
            slot = length - queries + i if options["causal"] else length
            if slot < 0:
                continue
            position = where[slot] if options["causal"] else where[length - 1] + 1
            distance[b, group, i, :length] = position - where[:length]
            seen = (torch.arange(capacity) <= slot) & (position - where < options.get("window", 1 << 40))
            visible[b, group, i] = seen & (torch.arange(capacity) < length)
    extra = {name: option for name, option in options.items() if name in ("sinks", "softcap", "alibi_slopes")}
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return dense(query, key, value, distance, visible, scale=scale, **cast(extra, dtype))
