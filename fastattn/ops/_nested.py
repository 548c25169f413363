"""Nested tensors of layout jagged as packed rows, and back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class PackedRows(NamedTuple):
    """The rows of nested tensors side by side, ``[1, heads, total, D]``, and where each begins and ends."""

    query: Tensor
    key: Tensor
    value: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    offsets: Tensor

    def unpack(self, packed: Tensor) -> Tensor:
        """``[1, H, total, ...]`` as a nested ``[B, H, j, ...]`` whose rows are the query's."""
        rows = torch.nested.nested_tensor_from_jagged(packed[0].transpose(0, 1), self.offsets)
        return rows.transpose(1, 2)


def pack(
    query: Tensor, key: Tensor, value: Tensor, *, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None
) -> PackedRows:
    """Nested ``[B, H, j, D]`` tensors, made as ``[B, j, H, D]`` and transposed, as packed rows."""
    for name, bound in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if bound is not None:
            raise ValueError(f"{name} must be None with a nested query, whose rows say where they end")
    for name, rows in (("query", query), ("key", key), ("value", value)):
        _check(name, rows)
    (packed_query, query_offsets), (packed_key, key_offsets), (packed_value, value_offsets) = (
        _unwrap(rows) for rows in (query, key, value)
    )
    if query_offsets.shape != key_offsets.shape:
        raise ValueError(
            f"key must have query's {query_offsets.shape[0] - 1} rows, got {key_offsets.shape[0] - 1} nested rows"
        )
    if key.shape[2] != value.shape[2] and not torch.equal(key_offsets, value_offsets):
        raise ValueError("value must have key's tokens in every row, got nested rows of other lengths")
    return PackedRows(packed_query, packed_key, packed_value, query_offsets.int(), key_offsets.int(), _unwrap(query)[1])


def _check(name: str, rows: object) -> None:
    if not isinstance(rows, Tensor) or not rows.is_nested or rows.layout != torch.jagged:
        raise TypeError(f"{name} must be a nested tensor of layout jagged, as query is, got {_kind(rows)}")
    if rows.dim() != 4 or rows._ragged_idx != 2:  # type: ignore[attr-defined]
        raise ValueError(
            f"{name} must be nested [B, heads, j, D], a transposed [B, j, heads, D], got {rows.dim()} dims with the "
            f"ragged one at {rows._ragged_idx}"  # type: ignore[attr-defined]
        )
    if rows.lengths() is not None:  # type: ignore[attr-defined]
        raise ValueError(f"{name} must have no holes between its nested rows: call .contiguous()")


def _kind(rows: object) -> str:
    if not isinstance(rows, Tensor):
        return type(rows).__name__
    return f"a nested tensor of layout {rows.layout}" if rows.is_nested else "a tensor"


def _unwrap(rows: Tensor) -> tuple[Tensor, Tensor]:
    made: Any = rows.transpose(1, 2)
    return made.values().transpose(0, 1)[None], made.offsets()
