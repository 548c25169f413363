"""Attention with windows, sinks, soft caps and ALiBi as a dense matrix, in any dtype, and drawn features."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests._helpers import draw


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    distance: Tensor,
    visible: Tensor,
    *,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    narrow: bool = False,
) -> tuple[Tensor, Tensor]:
    """``out`` and ``lse`` through ``softmax`` over one more column for the sink.

    Products are taken in the query's dtype, float32 for float64's yardstick; scores and their softmax in float32
    (float64), as a user of PyTorch would write it.

    Args:
        query: ``[B, H, Sq, Dqk]``.
        key: ``[B, Hkv, Sk, Dqk]``, finite.
        value: ``[B, Hkv, Sk, Dv]``, finite.
        distance: query's position less the key's, broadcasts to ``[B, H, Sq, Sk]``.
        visible: bool, likewise.
        scale: of the softmax.
        sinks: ``[H]``.
        softcap: of the scores.
        alibi_slopes: ``[H]``.
        narrow: scores and softmax in the query's dtype as well, another way of plain PyTorch.
    """
    heads, groups = query.shape[1], query.shape[1] // key.shape[1]
    wide = torch.float64 if query.dtype == torch.float64 else query.dtype if narrow else torch.float32
    scale = query.shape[3] ** -0.5 if scale is None else scale
    key, value = (t[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2) for t in (key, value))
    score = scale * torch.einsum("bhid,bhjd->bhij", query, key).to(wide)
    if softcap is not None:
        score = torch.tanh(score / softcap) * softcap
    if alibi_slopes is not None:
        score = score - alibi_slopes.to(wide).view(1, heads, 1, 1) * distance.abs()
    visible = visible.expand(score.shape)
    sink = score.new_full((*score.shape[:3], 1), float("-inf"))
    if sinks is not None:
        sink = sinks.to(wide).view(1, heads, 1, 1).expand(sink.shape)
    column = torch.cat([score.masked_fill(~visible, float("-inf")), sink], dim=3)
    blind = (column == float("-inf")).all(3, keepdim=True)
    weight = torch.softmax(column.masked_fill(blind, 0.0), dim=3)[..., :-1].masked_fill(~visible, 0.0)
    return torch.einsum("bhij,bhjd->bhid", weight.to(value.dtype), value), torch.logsumexp(column, dim=3)


def buffer_distance(queries: int, keys: int) -> Tensor:
    """Positions of ``attention``: bottom-right by the buffer's index."""
    return torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)


def features(heads: int) -> st.SearchStrategy[dict[str, Any]]:
    """Any of the features, alone and together; windows of 1 and beyond every size among them."""

    @st.composite
    def drawn(draw_: Any) -> dict[str, Any]:
        options: dict[str, Any] = {}
        seed = draw_(draw.seeds)
        if draw_(st.booleans()):
            options["window"] = draw_(st.sampled_from([1, 2, 7, 16, 1000]) | st.integers(1, 60))
        if draw_(st.booleans()):
            options["softcap"] = draw_(st.sampled_from([0.5, 5.0, 30.0]))
        kind = draw_(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
        if draw_(st.booleans()):
            options["sinks"] = draw.normal(heads, dtype=torch.float32, seed=seed, scale=2.0).to(torch.bfloat16).to(kind)
        if draw_(st.booleans()):
            options["alibi_slopes"] = (2.0 ** -torch.arange(1.0, heads + 1)).to(kind)
        return options

    return drawn()


def cast(options: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Features for :func:`dense`, floats in ``dtype``."""
    return {
        name: option.to(dtype) if isinstance(option, Tensor) and option.is_floating_point() else option
        for name, option in options.items()
    }
