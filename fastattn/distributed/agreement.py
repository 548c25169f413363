"""What all ranks of a mesh must have in common, compared before anything depends on it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def check_mesh(mesh: Any, name: str = "mesh") -> DeviceMesh:
    """``mesh`` is a one-dimensional ``DeviceMesh`` that this process is a part of.

    Raises:
        TypeError, ValueError: it is not.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"{name} must be a torch.distributed DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(
            f"{name} must have one dim, got {mesh.ndim} of sizes {list(mesh.shape)}: pass one of them, mesh['name']"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"{name} must contain this process, rank {dist.get_rank()}, got {mesh.mesh.tolist()}")
    return mesh


def agree(mesh: DeviceMesh, what: str, value: object) -> None:
    """Every rank of ``mesh`` has the same ``value``, compared by its ``repr``: one collective of a few bytes.

    Raises:
        ValueError: on every rank, where one differs, with every rank's value.
    """
    found: list[str] = [""] * mesh.size()
    dist.all_gather_object(found, repr(value), group=mesh.get_group())
    if len(set(found)) > 1:
        each = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(found))
        raise ValueError(f"{what} must be the same on every rank of the mesh, got {each}")
