"""Lengths and offsets as numbers, for what may look at them: those that lie outside of a buffer are refused."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def checked(name: str, lengths: Tensor, slots: int) -> list[Any]:
    """``lengths`` as nested lists.

    Raises:
        ValueError: one is below 0 or above ``slots``.
    """
    values: list[Any] = lengths.tolist()
    for row in values:
        for value in row if isinstance(row, list) else (row,):
            if not 0 <= value <= slots:
                raise ValueError(f"{name} must lie within the buffer's {slots} slots, got {value}")
    return values
