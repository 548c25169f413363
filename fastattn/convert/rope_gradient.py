"""Choose what keeps RoPE by the loss: components of the key heads, and which of them all layers together keep.

Per frequency the gradients of "take ``P k`` from the rotated keys and add it to the keys without position" are
approximated by a Kronecker product ``A (x) B`` over heads, as the latent's are in ``curvature``; its singular
vectors mix the heads into components whose losses add up (the mixing need not be unitary, RoPE commutes with any).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastattn.convert.rope import RopeSplit, component_rows, keep_all, rotation_error, unrotated_rows
from fastattn.convert.weights import AttentionWeights

DAMPING = 0.05
ROOT_DAMPING = 0.02


@dataclass(frozen=True)
class RopeComponents:
    """All components of a layer, ``P = Hkv F`` of them, frequency by frequency.

    ``loading``, ``dual`` complex ``[P, Hkv, F]``: keys are ``sum_p dual_p (loading_p^H k)``. ``factor``, complex
    ``[P]``: what a component is multiplied by when it loses its position, to stay close to its rotated self.
    ``cost [P]``: nats per token that this is expected to cost.
    """

    loading: Tensor
    dual: Tensor
    factor: Tensor
    cost: Tensor


def rope_components(weights: AttentionWeights, rotated: Tensor, unrotated: Tensor) -> RopeComponents:
    """The components that the gradients ask for.

    Args:
        weights: the layer.
        rotated, unrotated: complex ``[S, F, Hkv, Hkv]``, as ``LayerGradients`` has them.
    """
    device, heads, count = weights.key.device, weights.num_kv_heads, weights.inv_freq.numel()
    rotated, unrotated = (g.to(device, torch.complex128) for g in (rotated, unrotated))
    shape = (count, heads, heads, count)
    loading, dual = (torch.zeros(shape, dtype=torch.complex128, device=device) for _ in range(2))
    factor = torch.ones(count, heads, dtype=torch.complex128, device=device)
    cost = torch.zeros(count, heads, dtype=torch.float64, device=device)
    for frequency in range(count):
        kept, lost = rotated[:, frequency], unrotated[:, frequency]
        left, right = _alternate(lost - kept)
        (half, inverse), (right_half, _) = _roots(left), _roots(right)
        basis = torch.linalg.svd(half @ right_half)[0]
        load, back = half @ basis, inverse @ basis
        size = load.norm(dim=0).clamp_min(torch.finfo(torch.float64).tiny)
        loading[frequency, :, :, frequency] = (load / size).T
        dual[frequency, :, :, frequency] = (back * size).T
        mixing = torch.einsum("gp,hp->pgh", back * size, (load / size).conj())
        gained = torch.einsum("sgh,pgh->ps", lost.conj(), mixing)
        given = torch.einsum("sgh,pgh->ps", kept.conj(), mixing).real
        factor[frequency] = _fitted_factor(gained, given)
        cost[frequency] = ((factor[frequency][:, None] * gained).real - given).square().mean(1) / 2
    return RopeComponents(loading.flatten(0, 1), dual.flatten(0, 1), factor.flatten(), cost.flatten())


def _fitted_factor(gained: Tensor, given: Tensor) -> Tensor:
    """``argmin_c E(Re(c gained) - given)^2``, drawn to 1 by 5% of the mean diagonal; ``[P]`` from ``[P, S]``."""
    rows = torch.stack([gained.real, -gained.imag], dim=2)
    gram = rows.mT @ rows
    pull = DAMPING * gram.diagonal(dim1=1, dim2=2).mean(1).clamp_min(torch.finfo(torch.float64).tiny)
    eye = torch.eye(2, dtype=gram.dtype, device=gram.device)
    target = (rows.mT @ given[:, :, None])[..., 0] + pull[:, None] * eye[0]
    solved = torch.linalg.solve(gram + pull[:, None, None] * eye, target[..., None])[..., 0]
    return torch.complex(solved[:, 0], solved[:, 1])


def _alternate(gradients: Tensor, rounds: int = 4) -> tuple[Tensor, Tensor]:
    """``A`` and ``B``, ``[n, n]``, of complex ``gradients [S, n, n]`` by alternating estimates."""
    size = gradients.shape[1]
    eye = torch.eye(size, dtype=gradients.dtype, device=gradients.device)
    left, right = eye, eye
    for _ in range(rounds):
        whitened = gradients @ torch.linalg.inv(_damped(right, DAMPING))
        left = torch.einsum("sij,skj->ik", whitened, gradients.conj()) / gradients.shape[0] / size
        whitened = torch.linalg.inv(_damped(left, DAMPING)) @ gradients
        right = torch.einsum("sij,sik->jk", gradients.conj(), whitened) / gradients.shape[0] / size
        scale = right.diagonal().real.mean().clamp_min(torch.finfo(torch.float64).tiny)
        left, right = left * scale, right / scale
    return left, right


def _damped(matrix: Tensor, share: float) -> Tensor:
    matrix = (matrix + matrix.mH) / 2
    level = matrix.diagonal().real.mean().clamp_min(torch.finfo(torch.float64).tiny)
    return matrix + share * level * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)


def _roots(matrix: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(_damped(matrix, ROOT_DAMPING))
    root = values.clamp_min(torch.finfo(torch.float64).tiny).sqrt()
    return (vectors * root) @ vectors.mH, (vectors / root) @ vectors.mH


def choose_components(costs: list[Tensor], pairs: int, *, shared: bool) -> list[Tensor]:
    """Which components of each layer keep RoPE, as masks ``[P]``: those that cost most to lose.

    Args:
        costs: per layer, ``[P]``.
        pairs: components kept by a layer, on average with ``shared``: one threshold then holds for all layers, and
            every layer keeps at least one.

    Raises:
        ValueError: more components than a layer has.
    """
    for index, cost in enumerate(costs):
        if pairs > cost.numel():
            raise ValueError(f"qk_rope_head_dim must be at most {2 * cost.numel()} in layer {index}, got {2 * pairs}")
    if not shared:
        return [torch.zeros_like(c, dtype=torch.bool).index_fill_(0, c.topk(pairs).indices, True) for c in costs]
    flat = torch.cat([c.masked_fill(c.argmax() == torch.arange(c.numel(), device=c.device), torch.inf) for c in costs])
    chosen = torch.zeros_like(flat, dtype=torch.bool)
    chosen[flat.topk(pairs * len(costs)).indices] = True
    return list(chosen.split([c.numel() for c in costs]))


def gradient_split(
    weights: AttentionWeights, components: RopeComponents, chosen: Tensor, moment: Tensor, context: int
) -> RopeSplit:
    """The split that lets the ``chosen`` components keep RoPE at their own frequencies."""
    if bool(chosen.all()):
        return keep_all(weights)
    at = torch.arange(chosen.numel(), device=chosen.device) // weights.num_kv_heads
    lost = (components.dual * components.factor[:, None, None])[~chosen]
    plain = unrotated_rows(weights)
    keys = component_rows(weights, components.loading) @ weights.key
    energy = ((keys @ moment) * keys).sum(1).view(-1, 2).sum(1) * components.dual.abs().square().sum((1, 2))
    error = energy * rotation_error(weights.inv_freq.double(), context)[at]
    total = energy.sum().clamp_min(torch.finfo(torch.float64).tiny)
    return RopeSplit(
        kept=component_rows(weights, components.loading[chosen]),
        rest=torch.cat([component_rows(weights, components.loading[~chosen]), plain]),
        inv_freq=weights.inv_freq[at[chosen]],
        nope_dims=torch.arange(weights.head_dim, device=plain.device),
        fold=1,
        energy_kept=float(energy[chosen].sum() / total),
        expected_error=float(error[~chosen].sum() / total),
        kept_dual=component_rows(weights, components.dual[chosen]),
        rest_dual=torch.cat([component_rows(weights, lost), plain]),
        expected_cost=float(components.cost[~chosen].sum()),
    )
