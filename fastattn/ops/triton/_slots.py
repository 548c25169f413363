"""Pieces that the kernels over the slots of a cache share.

A row is one (batch, key/value head) pair. Program axis 0 is the row, axis 1 a chunk of its slots; a program walks its
chunk in blocks. Buffers of the caller may have any strides, results and workspaces are contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.ops.triton import _launch

LARGEST_DIM = 4096
BLOCK_NUMBERS = 8192  # numbers of a block: 64 per thread of 4 warps
PROGRAMS_PER_PROCESSOR = 8


def block_shape(operator: str, name: str, dim: int) -> tuple[int, int]:
    """Slots and columns of a block that holds whole vectors of ``dim`` numbers."""
    _launch.check_dim(operator, name, dim, LARGEST_DIM)
    columns = _launch.next_power_of_two(dim, 16)
    return min(128, BLOCK_NUMBERS // columns), columns


def slot_chunks(tensor: Tensor, rows: int, slots: int, block: int, most: int | None = None) -> tuple[int, int]:
    """How many programs share the slots of a row, and the slots of each: whole blocks, enough programs for the chip.

    Args:
        tensor: lies on the chip.
        rows: rows in all.
        slots: slots of a row.
        block: slots of a block.
        most: at most this many programs per row.
    """
    blocks = (slots + block - 1) // block
    wanted = torch.sym_max(1, _launch.target_of(tensor).processors * PROGRAMS_PER_PROCESSOR // rows)
    if most is not None:
        wanted = torch.sym_min(wanted, most)
    per_program = (blocks + wanted - 1) // wanted
    return (blocks + per_program - 1) // per_program, per_program * block
