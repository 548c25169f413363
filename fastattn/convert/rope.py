"""Concentrate RoPE: collect the energy of all key heads in few rotated dims, and leave the rest without position.

Multiplying a pair ``(a, b)`` by a rotation is multiplying the complex number ``a + ib`` by ``exp(i angle)``. At one
frequency the pairs of all heads are rotated alike, so any unitary mixing of heads commutes with RoPE; its principal
components collect the energy of the calibrated keys (TransMLA, arXiv 2502.07864). FreqFold treats neighboring
frequencies as equal and mixes over them too, at the price of rotating some pairs at a slightly wrong frequency.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from fastattn.convert.weights import AttentionWeights


@dataclass(frozen=True)
class RopeSplit:
    """An orthogonal change of basis of all key heads side by side, ``[kept; rest]``.

    ``kept [dr, Hkv d]``: rows of the shared rope key, pairs interleaved, pair ``i`` rotated at ``inv_freq[i]``.
    ``rest [m, Hkv d]``: rows that lose or never had a position. ``nope_dims``: a head's dims that ``rest`` reaches.
    ``energy_kept``: share of the rotated key energy in ``kept``. ``expected_error``: mean squared change of the rotated
    keys, relative to their energy, that lost positions and changed frequencies cause. ``kept_dual``, ``rest_dual``:
    where the change of basis is not orthogonal, what rebuilds the keys: ``kept_dual^T kept + rest_dual^T rest``.
    ``expected_cost``: nats per token that lost positions are expected to cost, where gradients chose them.
    """

    kept: Tensor
    rest: Tensor
    inv_freq: Tensor
    nope_dims: Tensor
    fold: int
    energy_kept: float
    expected_error: float
    kept_dual: Tensor | None = None
    rest_dual: Tensor | None = None
    expected_cost: float = 0.0

    @property
    def from_kept(self) -> Tensor:
        return self.kept if self.kept_dual is None else self.kept_dual

    @property
    def from_rest(self) -> Tensor:
        return self.rest if self.rest_dual is None else self.rest_dual


@dataclass(frozen=True)
class _Components:
    """Principal components of the folded groups: ``loading`` complex ``[P, Hkv, F]``, ``energy [P, F]``."""

    loading: Tensor
    energy: Tensor
    group: Tensor
    rank_in_group: Tensor
    fold: int


def split_rope(
    weights: AttentionWeights,
    moment: Tensor,
    rope_dim: int | None,
    *,
    fold: int | str = "search",
    selection: str = "energy",
    mixing: str = "complex",
    context: int = 2048,
) -> RopeSplit:
    """Choose which directions of the keys keep RoPE.

    Args:
        weights: the layer.
        moment: ``E[z z^T]``, float64 ``[hidden+1, hidden+1]``.
        rope_dim: dims that keep RoPE; ``None`` keeps all, exactly.
        fold, selection, mixing: see :class:`LowRankConfig`.
        context: tokens over which lost positions are judged; distances count by the inverse of their length.

    Raises:
        ValueError: ``rope_dim`` above what the layer has, a ``fold`` that does not divide the frequencies, or a
            uniform selection that does not share out evenly.
    """
    frequencies, heads = weights.inv_freq.numel(), weights.num_kv_heads
    if rope_dim is None or rope_dim == weights.max_rope_dim:
        return keep_all(weights)
    if rope_dim > weights.max_rope_dim:
        raise ValueError(f"qk_rope_head_dim must be at most {weights.max_rope_dim} here, got {rope_dim}")
    covariance = weights.key @ moment @ weights.key.T
    folds = [m for m in range(1, frequencies + 1) if frequencies % m == 0]
    if isinstance(fold, int):
        if fold not in folds:
            raise ValueError(f"freq_fold must divide the {frequencies} frequencies of a head, got {fold}")
        folds = [fold]
    elif selection == "uniform":
        folds = [m for m in folds if _shares_evenly(rope_dim, frequencies, m, heads)]
    best: RopeSplit | None = None
    for candidate in folds:
        components = _concentrate(weights, covariance, candidate, mixing)
        split = _select(weights, components, rope_dim // 2, selection, context)
        if best is None or split.expected_error < best.expected_error:
            best = split
    if best is None:
        raise ValueError(f"no freq_fold shares {rope_dim // 2} rope pairs evenly over {frequencies} frequencies")
    return best


def _shares_evenly(rope_dim: int, frequencies: int, fold: int, heads: int) -> bool:
    per_group, left = divmod(rope_dim // 2, frequencies // fold)
    return left == 0 and 0 < per_group <= fold * heads


def keep_all(weights: AttentionWeights) -> RopeSplit:
    """Every pair of every head at its own frequency: nothing is mixed and nothing lost."""
    heads, count = weights.num_kv_heads, weights.inv_freq.numel()
    loading = torch.eye(heads * count, dtype=torch.complex128, device=weights.key.device).view(-1, heads, count)
    return RopeSplit(
        kept=component_rows(weights, loading),
        rest=unrotated_rows(weights),
        inv_freq=weights.inv_freq.repeat(heads),
        nope_dims=torch.arange(2 * count, weights.head_dim, device=weights.key.device),
        fold=1,
        energy_kept=1.0,
        expected_error=0.0,
    )


def _concentrate(weights: AttentionWeights, covariance: Tensor, fold: int, mixing: str) -> _Components:
    """Principal components over heads and folded frequencies, by falling energy within each group."""
    heads, count = weights.num_kv_heads, weights.inv_freq.numel()
    by_head = rearrange(covariance, "(h d) (g e) -> h d g e", h=heads, g=heads)
    first, second = slice(0, count), slice(count, 2 * count)
    real = by_head[:, first, :, first] + by_head[:, second, :, second]
    imaginary = by_head[:, second, :, first] - by_head[:, first, :, second]
    if mixing == "real":
        imaginary = torch.zeros_like(imaginary)
    size, groups = heads * fold, count // fold
    loading = torch.zeros(count * heads, heads, count, dtype=torch.complex128, device=covariance.device)
    energy = torch.zeros(count * heads, count, dtype=torch.float64, device=covariance.device)
    for index in range(groups):
        folded = slice(index * fold, (index + 1) * fold)
        block = torch.complex(
            real[:, folded, :, folded].reshape(size, size), imaginary[:, folded, :, folded].reshape(size, size)
        )
        if mixing == "real":
            values, vectors = torch.linalg.eigh(block.real)
            vectors = vectors.to(torch.complex128)
        else:
            values, vectors = torch.linalg.eigh(block)
        values, vectors = values.flip(0).clamp_min(0), vectors.flip(1).T.reshape(size, heads, fold)
        rows = slice(index * size, (index + 1) * size)
        loading[rows, :, folded] = vectors
        energy[rows, folded] = values[:, None] * vectors.abs().square().sum(dim=1)
    order = torch.arange(count * heads, device=covariance.device)
    return _Components(loading, energy, order // size, order % size, fold)


def rotation_error(difference: Tensor, context: int) -> Tensor:
    """``E|exp(i difference distance) - 1|^2`` over distances below ``context``, weighted by ``1 / (1 + distance)``."""
    distance = torch.arange(context, dtype=torch.float64, device=difference.device)
    weight = 1 / (1 + distance)
    angles = difference.double()[..., None] * distance
    return ((2 - 2 * angles.cos()) * weight).sum(-1) / weight.sum()


def _select(weights: AttentionWeights, components: _Components, pairs: int, selection: str, context: int) -> RopeSplit:
    frequency = weights.inv_freq.double()
    fold = components.fold
    lost = components.energy @ rotation_error(frequency, context)
    if selection == "uniform":
        if not _shares_evenly(2 * pairs, frequency.numel(), fold, weights.num_kv_heads):
            raise ValueError(
                f"a uniform selection must share its pairs evenly over {frequency.numel() // fold} groups, got {pairs}"
            )
        per_group = pairs // (frequency.numel() // fold)
        chosen = components.rank_in_group < per_group
        rotated_at = components.group * fold + (components.rank_in_group * fold).div(per_group, rounding_mode="floor")
        rotated_at = rotated_at.clamp_max(frequency.numel() - 1)
        changed = _changed_frequency_error(components, frequency, context).gather(1, rotated_at[:, None])[:, 0]
    else:
        changed, rotated_at = _changed_frequency_error(components, frequency, context).min(dim=1)
        chosen = torch.zeros_like(components.group, dtype=torch.bool)
        chosen[(lost - changed).topk(pairs).indices] = True
    total = components.energy.sum().clamp_min(torch.finfo(torch.float64).tiny)
    error = changed[chosen].sum() + lost[~chosen].sum()
    rest = torch.cat([component_rows(weights, components.loading[~chosen]), unrotated_rows(weights)])
    return RopeSplit(
        kept=component_rows(weights, components.loading[chosen]),
        rest=rest,
        inv_freq=weights.inv_freq[rotated_at[chosen]],
        nope_dims=torch.arange(weights.head_dim, device=rest.device),
        fold=fold,
        energy_kept=float(components.energy[chosen].sum() / total),
        expected_error=float(error / total),
    )


def _changed_frequency_error(components: _Components, frequency: Tensor, context: int) -> Tensor:
    """``[P, F]``: error of each component when rotated at each frequency, infinite outside its group."""
    between = rotation_error(frequency[:, None] - frequency[None, :], context)
    error = components.energy @ between
    group_of = torch.arange(frequency.numel(), device=error.device) // components.fold
    return error.masked_fill(group_of[None] != components.group[:, None], torch.inf)


def component_rows(weights: AttentionWeights, loading: Tensor) -> Tensor:
    """Complex components ``[n, Hkv, F]`` as real rows ``[2 n, Hkv d]``: real part, imaginary part, interleaved.

    A component is ``sum conj(u) z`` of the pairs ``z = a + ib``: real part ``ur a + ui b``, imaginary ``ur b - ui a``.
    """
    number, heads, count = loading.shape
    rows = torch.zeros(number, 2, heads, weights.head_dim, dtype=torch.float64, device=loading.device)
    rows[:, 0, :, :count], rows[:, 0, :, count : 2 * count] = loading.real, loading.imag
    rows[:, 1, :, :count], rows[:, 1, :, count : 2 * count] = -loading.imag, loading.real
    return rearrange(rows, "n part h d -> (n part) (h d)")


def unrotated_rows(weights: AttentionWeights) -> Tensor:
    """Unit rows of the dims that RoPE never rotated."""
    basis = torch.eye(weights.num_kv_heads * weights.head_dim, dtype=torch.float64, device=weights.key.device)
    by_head = rearrange(basis, "(h d) c -> h d c", h=weights.num_kv_heads)
    return rearrange(by_head[:, 2 * weights.inv_freq.numel() :], "h d c -> (h d) c")
