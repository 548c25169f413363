"""One head's vectors as numbers, a piece of its slots at a time where they are codes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fastattn.ops import _formats

_NUMBERS = 1 << 18  # of a piece: 1 MiB in float32


def pieces(vectors: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Slots and what they hold of ``vectors [T, D]``: all at once, or of codes a piece, of int4 still transformed."""
    slots = vectors.shape[0]
    if scale is None:
        yield slice(0, slots), vectors.to(dtype)
        return
    columns = vectors.shape[1] * (2 if is_transformed(scale) else 1)
    step = max(1, _NUMBERS // max(1, columns))
    for first in range(0, slots, step):
        part = slice(first, min(first + step, slots))
        yield part, _formats.decode(vectors[part], scale[part], dtype)


def of(scale: Tensor | None, row: int, head: int, count: int) -> Tensor | None:
    """The scales of a head's first ``count`` slots, where there are any."""
    return None if scale is None else scale[row, head, :count]


def is_transformed(scale: Tensor | None) -> bool:
    """Whether codes with these scales stand for Hadamard transforms of vectors ``[..., D]``."""
    return scale is not None and scale.dtype == torch.float16
