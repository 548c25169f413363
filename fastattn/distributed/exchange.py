"""Collectives of a cache whose tokens are spread over ranks, with errors that say what to do."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


def gather(part: Tensor, mesh: DeviceMesh) -> Tensor:
    """Every rank's ``part``, ``[ranks, *part.shape]``; the same bits on every rank.

    Raises:
        RuntimeError: a rank stopped, or did not come within the process group's timeout.
    """
    part = part.contiguous()
    try:
        flat = collectives.all_gather_tensor(part, 0, mesh)
        if isinstance(flat, collectives.AsyncCollectiveTensor):
            flat = flat.wait()
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {dist.get_rank()} got no answer from the other ranks of mesh {mesh.mesh.tolist()}: one of them "
            "stopped, raised an error of its own (see its output), or took longer than the process group's timeout, "
            f"which init_process_group(timeout=...) sets. {error}"
        ) from error
    return flat.unflatten(0, (mesh.size(), part.shape[0]))


def total(part: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of every rank's ``part``, added in the order of ranks."""
    return gather(part, mesh).sum(0)


def total_logsumexp(part: Tensor, mesh: DeviceMesh) -> Tensor:
    """The log of the sum of ``exp`` of every rank's ``part``; -inf where all are."""
    return gather(part, mesh).logsumexp(0)


def agree_on_tokens(key: Tensor, position: Tensor, mesh: DeviceMesh) -> None:
    """All ranks bring the same tokens: their number, their positions and, but for rounding, their keys.

    Raises:
        ValueError: on every rank, where they differ.
    """
    real = key.double().masked_fill((position < 0)[:, None, :, None], 0.0)
    told = torch.stack(
        [real.new_tensor(key.shape[0]), real.new_tensor(key.shape[2]), position.sum().double(), real.sum()]
    )
    told = torch.cat([told, real.abs().sum()[None]])
    every = gather(told, mesh)
    rounding = 1e-2 * every[:, 4].max()
    same = (every[:, :3] == every[0, :3]).all() & ((every[:, 3] - every[0, 3]).abs() <= rounding).all()
    if not bool(same):
        shapes = [f"rank {rank}: {int(row[0])} x {int(row[1])}" for rank, row in enumerate(every.tolist())]
        raise ValueError(
            "every rank must bring the same tokens to a cache whose tokens are spread over ranks, got prompts (rows x "
            f"columns) {', '.join(shapes)} that differ in size, positions or keys"
        )
