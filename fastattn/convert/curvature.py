"""What an error of a latent projection costs the loss: Kronecker-factored curvature, and the factors that it asks for.

For labels sampled from the model's own predictions the expected outer product of a parameter's gradients is the Fisher
information, the curvature of the KL divergence from the model. One gradient matrix ``G_s`` of the latent projection
is taken for each sequence ``s``, so that errors of tokens which add up count together. ``E[vec(G) vec(G)^T]`` is
approximated by ``A (x) B`` (K-FAC, arXiv 1503.05671; estimated like the covariance of a matrix-normal
distribution, Dutilleul 1999, https://doi.org/10.1080/00949659908811970).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

LATENT_DAMPING = 0.05
INPUT_MIXING = 0.2
MINIMUM_SEQUENCES = 4


@dataclass(frozen=True)
class Curvature:
    """``latent = A [R, R]`` and ``inputs = B [hidden+1, hidden+1]``, float64: an error ``D`` of the projection
    ``[R, hidden+1]`` costs about ``tr(A D B D^T) / 2`` nats per token."""

    latent: Tensor
    inputs: Tensor


@dataclass(frozen=True)
class Directions:
    """A change of basis of a full-rank latent: ``up [R, n]``, ``down [n, R]``, and what losing each direction costs."""

    up: Tensor
    down: Tensor
    cost: Tensor


def check_differentiable(model: nn.Module) -> None:
    """Refuse a model that can't give gradients.

    Raises:
        ValueError: parameters made in inference mode, without values, or spread over devices.
    """
    devices = set()
    for name, parameter in model.named_parameters():
        if parameter.is_inference():
            raise ValueError(f'method="curvature" needs gradients, got {name} made in inference mode')
        if parameter.is_meta or not parameter.dtype.is_floating_point:
            raise ValueError(f'method="curvature" needs float weights on one device, got {name} of {parameter.dtype}')
        devices.add(parameter.device)
    if len(devices) > 1:
        raise ValueError(f'method="curvature" needs the model on one device, got {sorted(map(str, devices))}')
    if model.get_output_embeddings() is None:  # type: ignore[operator]
        raise ValueError(f'method="curvature" needs a language-model head, got {type(model).__name__}')


def fit_curvature(gradients: Sequence[Tensor], moment: Tensor, *, rounds: int = 3, floor: float = 1e-3) -> Curvature:
    """``A`` and ``B`` whose Kronecker product fits the second moment of ``gradients``, by alternating estimates.

    ``A = mean_s G B^-1 G^T / D`` and ``B = mean_s G^T A^-1 G / R``, starting from ``B = moment``; ``B`` has a mean
    diagonal of 1. ``floor`` times the mean diagonal is added before each inverse.

    Args:
        gradients: ``S`` matrices ``[R, D]``.
        moment: ``E[z z^T]``, ``[D, D]``.
    """
    stacked = torch.stack(list(gradients)).float()
    count, rows, columns = stacked.shape
    inputs = moment.float() * (columns / moment.trace().float())
    latent = inputs.new_zeros(rows, rows)
    for _ in range(rounds):
        whitened = stacked @ torch.linalg.inv(_lifted(inputs, floor))
        latent = torch.einsum("srd,sqd->rq", whitened, stacked) / (count * columns)
        whitened = torch.linalg.inv(_lifted(latent, floor)) @ stacked
        inputs = torch.einsum("srd,sre->de", whitened, stacked) / (count * rows)
        size = inputs.diagonal().mean()
        inputs, latent = inputs / size, latent * size
    return Curvature((latent + latent.T).double() / 2, (inputs + inputs.T).double() / 2)


def directions(
    matrix: Tensor, curvature: Curvature, moment: Tensor, *, change: Tensor | None = None, split_at: int | None = None
) -> Directions:
    """The basis in which leaving out the last directions of ``W = matrix`` costs least: SVD of ``A^1/2 W B^1/2``.

    ``A`` is mixed with 5% of its mean diagonal, ``B`` with 20% of ``moment`` of the same trace, for what few
    sequences can't tell. With ``A^1/2 W B W^T A^1/2 = V diag(s) V^T``: ``up = A^-1/2 V``, ``down = V^T A^1/2``;
    ``cost = s / 2``, nats per token.

    Args:
        matrix: ``[n, hidden+1]``.
        curvature: of ``matrix``, or of ``change matrix``.
        moment: ``E[z z^T]``.
        change: ``[R, n]``: an error ``D`` of ``matrix`` is one of ``change D`` where the curvature was taken.
        split_at: rows before and from there on are damped by a mean diagonal each.
    """
    latent = damped_by_block(curvature.latent, LATENT_DAMPING, split_at)
    if change is not None:
        latent = change.T @ latent @ change
    share = curvature.inputs.trace() / moment.trace()
    inputs = (1 - INPUT_MIXING) * curvature.inputs + INPUT_MIXING * share * moment
    values, vectors = torch.linalg.eigh((latent + latent.T) / 2)
    root = values.clamp_min(float(values.max()) * 1e-9).sqrt()
    half, inverse = (vectors * root) @ vectors.T, (vectors / root) @ vectors.T
    weighted = half @ matrix
    energy, basis = torch.linalg.eigh(weighted @ inputs @ weighted.T)
    basis = basis.flip(1)
    return Directions(inverse @ basis, basis.T @ half, energy.flip(0).clamp_min(0) / 2)


def damped_by_block(matrix: Tensor, share: float, split_at: int | None = None) -> Tensor:
    """``(1 - share) A`` plus ``share`` times the mean of its diagonal, of the rows before ``split_at`` and the rest."""
    diagonal = matrix.diagonal()
    split_at = diagonal.numel() if split_at is None else split_at
    means = [part.mean().expand(part.numel()) for part in (diagonal[:split_at], diagonal[split_at:]) if part.numel()]
    return (1 - share) * matrix + share * torch.diag(torch.cat(means))


def _lifted(matrix: Tensor, share: float) -> Tensor:
    eye = torch.eye(matrix.shape[0], dtype=matrix.dtype, device=matrix.device)
    level = matrix.diagonal().mean().clamp_min(torch.finfo(matrix.dtype).tiny)
    return matrix + share * level * eye
