"""What an error of a latent projection costs the loss: Kronecker-factored curvature, and the factors that it asks for.

For labels sampled from the model's own predictions the expected outer product of a parameter's gradients is the Fisher
information, the curvature of the KL divergence from the model. One gradient matrix ``G_s`` of the latent projection
is taken for each sequence ``s``, so that errors of tokens which add up count together. ``E[vec(G) vec(G)^T]`` is
approximated by ``A (x) B`` (K-FAC, arXiv 1503.05671; estimated like the covariance of a matrix-normal
distribution, Dutilleul 1999, https://doi.org/10.1080/00949659908811970).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastattn.convert.calibration import progress_bar

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


def latent_gradients(
    model: nn.Module, attentions: Sequence[Any], batches: list[Tensor], *, seed: int = 0, progress: bool = False
) -> list[list[Tensor]]:
    """Per module, per sequence: ``G / sqrt(S)``, ``[R, hidden+1]``, with ``G`` the gradient of the latent projection.

    The loss is the summed negative log-likelihood of one label per position, sampled from the model with a generator of
    its own. Parameters get no gradient. Kept in float32, in bfloat16 for models of two bytes per weight.

    Args:
        model: holds ``attentions`` (modules with ``kv_a_proj_with_mqa`` and ``kv_lora_rank``).
        batches: token ids ``[B, S]``; fed one sequence at a time.
    """
    device = batches[0].device
    generator = torch.Generator(device).manual_seed(seed)
    latents: dict[int, Tensor] = {}
    inputs: dict[int, Tensor] = {}

    def keep(index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            latents[index] = output if output.requires_grad else output.requires_grad_()
            inputs[index] = args[0].detach()

        return hook

    gathered: list[list[Tensor]] = [[] for _ in attentions]
    hooks = [a.kv_a_proj_with_mqa.register_forward_hook(keep(i)) for i, a in enumerate(attentions)]
    try:
        for ids in progress_bar([row[None] for batch in batches for row in batch], "Curvature", progress, "sequence"):
            with torch.enable_grad():
                logits = model(input_ids=ids, use_cache=False).logits[0].float()
                labels = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)[:, 0]
                loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
                gradients = torch.autograd.grad(loss, [latents[i] for i in range(len(attentions))])
            for index, gradient in enumerate(gradients):
                rows = gradient[0, :, : attentions[index].kv_lora_rank].float()
                x = torch.cat([inputs[index][0].float(), rows.new_ones(rows.shape[0], 1)], dim=1)
                kept = rows.T @ x / math.sqrt(rows.shape[0])
                gathered[index].append(kept if gradient.dtype.itemsize >= 4 else kept.bfloat16())
            latents.clear()
            inputs.clear()
    finally:
        for handle in hooks:
            handle.remove()
    return gathered


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


def directions(matrix: Tensor, curvature: Curvature, moment: Tensor) -> Directions:
    """The basis in which leaving out the last directions of ``W = matrix`` costs least: SVD of ``A^1/2 W B^1/2``.

    ``A`` is mixed with 5% of its mean diagonal, ``B`` with 20% of ``moment`` of the same trace, for what few
    sequences can't tell. With ``A^1/2 W B W^T A^1/2 = V diag(s) V^T``: ``up = A^-1/2 V``, ``down = V^T A^1/2``;
    ``cost = s / 2``, nats per token.
    """
    latent = _lifted((1 - LATENT_DAMPING) * curvature.latent, LATENT_DAMPING / (1 - LATENT_DAMPING))
    share = curvature.inputs.trace() / moment.trace()
    inputs = (1 - INPUT_MIXING) * curvature.inputs + INPUT_MIXING * share * moment
    values, vectors = torch.linalg.eigh(latent)
    root = values.clamp_min(float(values.max()) * 1e-9).sqrt()
    half, inverse = (vectors * root) @ vectors.T, (vectors / root) @ vectors.T
    weighted = half @ matrix
    energy, basis = torch.linalg.eigh(weighted @ inputs @ weighted.T)
    basis = basis.flip(1)
    return Directions(inverse @ basis, basis.T @ half, energy.flip(0).clamp_min(0) / 2)


def _lifted(matrix: Tensor, share: float) -> Tensor:
    eye = torch.eye(matrix.shape[0], dtype=matrix.dtype, device=matrix.device)
    return matrix + share * matrix.diagonal().mean() * eye
