"""Low-rank factors of one attention layer: the joint key/value decomposition, the query, and what they lose."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange, repeat
from torch import Tensor

from fastattn.convert.rope import RopeSplit
from fastattn.convert.weights import AttentionWeights


@dataclass(frozen=True)
class LayerFactors:
    """A converted layer: ``state`` has LowRankAttention's parameter names, float64; the rest is its construction."""

    state: dict[str, Tensor]
    arguments: dict[str, object]
    inv_freq: Tensor
    errors: dict[str, float]


@dataclass(frozen=True)
class Projection:
    """``up [rows, R]``, orthonormal columns, and ``down = up^T W``, ordered by what each direction keeps."""

    up: Tensor
    down: Tensor
    kept: Tensor


def project(matrix: Tensor, moment: Tensor, rank: int, method: str) -> Projection:
    """The rank-``rank`` projection of ``W = matrix`` that loses least.

    ``"loss_optimal"`` minimizes ``E||W z - U U^T W z||^2 = tr(W C W^T) - tr(U^T W C W^T U)`` with ``C = E[z z^T]``: the
    top eigenvectors of ``W C W^T`` (no inverse, no Cholesky factor). ``"plain_svd"`` minimizes ``||W - U U^T W||``: the
    same with ``C = I``. ``kept`` is the eigenvalue of every direction, up to full rank, falling.

    Raises:
        ValueError: ``rank`` above the number of rows.
    """
    if rank > matrix.shape[0]:
        raise ValueError(f"rank must be at most {matrix.shape[0]}, the rows of the projection, got {rank}")
    energy = matrix @ (matrix.T if method == "plain_svd" else moment @ matrix.T)
    values, vectors = torch.linalg.eigh((energy + energy.T) / 2)
    up = vectors.flip(1)[:, :rank]
    return Projection(up=up, down=up.T @ matrix, kept=values.flip(0).clamp_min(0))


def output_error(matrix: Tensor, approximation: Tensor, moment: Tensor) -> float:
    """``sqrt(E||(W - W') z||^2 / E||W z||^2)``, 0 where both vanish."""
    difference = matrix - approximation
    lost = ((difference @ moment) * difference).sum()
    whole = ((matrix @ moment) * matrix).sum()
    if float(whole) <= 0.0:
        return 0.0
    return float((lost.clamp_min(0) / whole).sqrt())


@dataclass(frozen=True)
class JointKeyValue:
    """Balanced rows ``[K_nope / balance; V]`` of a layer, to be decomposed together."""

    matrix: Tensor
    balance: float
    nope_rows: int


def stack_key_value(
    weights: AttentionWeights, split: RopeSplit, moment: Tensor, *, balance: bool = True
) -> JointKeyValue:
    """Keys without position, scaled to the values' size, over the values.

    ``balance = rms||K_nope|| / rms||V||`` over the calibration tokens (root mean squares, which the second moment gives
    exactly, where the publication takes means of norms).
    """
    nope = split.rest @ weights.key
    ratio = 1.0
    if balance and nope.shape[0]:
        keys, values = (float(((rows @ moment) * rows).sum()) for rows in (nope, weights.value))
        if keys > 0.0 and values > 0.0:
            ratio = (keys / values) ** 0.5
    return JointKeyValue(torch.cat([nope / ratio, weights.value]), ratio, nope.shape[0])


def build_factors(
    weights: AttentionWeights,
    split: RopeSplit,
    moment: Tensor,
    *,
    kv_rank: int | None,
    q_rank: int | None,
    method: str = "loss_optimal",
    balance: bool = True,
    latent: Projection | None = None,
    query: Projection | None = None,
) -> LayerFactors:
    """LowRankAttention's parameters for one layer.

    Args:
        weights: the layer.
        split: from :func:`split_rope`.
        moment: ``E[z z^T]`` of the layer's inputs, float64 ``[hidden+1, hidden+1]``.
        kv_rank, q_rank: ranks; ``None`` keeps all (for the query: one full-rank projection).
        latent, query: projections to take instead of those that ``method`` finds: of :func:`stack_key_value`'s rows,
            and of the query's at rank ``q_rank``.

    Raises:
        ValueError: a rank above what the layer has.
    """
    joint = stack_key_value(weights, split, moment, balance=balance)
    full = min(joint.matrix.shape[0], weights.hidden_size + weights.kv_bias)  # more is never needed
    rank = full if kv_rank is None else kv_rank
    if rank > joint.matrix.shape[0]:
        raise ValueError(f"kv_lora_rank must be at most {joint.matrix.shape[0]} here, got {rank}")
    projection = project(joint.matrix, moment, rank, method) if latent is None else latent
    kv_a = torch.cat([projection.down, split.kept @ weights.key * weights.attention_factor])

    arguments: dict[str, object] = {
        "kv_lora_rank": projection.down.shape[0],
        "q_lora_rank": q_rank,
        "qk_nope_head_dim": split.nope_dims.numel(),
        "qk_rope_head_dim": split.kept.shape[0],
        "v_head_dim": weights.v_head_dim,
        "rope_interleave": True,
        "latent_norm": False,
        "bias": weights.kv_bias or weights.output_bias or (weights.query_bias and q_rank is not None),
        "q_bias": weights.query_bias and q_rank is None,
    }
    state: dict[str, Tensor] = {"kv_b_proj.weight": _key_value_up(weights, split, joint, projection.up)}
    if q_rank is not None and query is None:
        query = _project_query(weights, moment, q_rank, method)
    query_error = _query_state(state, weights, split, moment, query, bool(arguments["q_bias"]))
    _set_projection(state, "kv_a_proj_with_mqa", kv_a, bool(arguments["bias"]))
    _set_projection(state, "o_proj", weights.output, bool(arguments["bias"]))
    if q_rank is not None and arguments["bias"]:
        state.setdefault("q_a_proj.bias", state["q_a_proj.weight"].new_zeros(q_rank))

    rebuilt = projection.up @ projection.down
    key = split.from_kept.T @ (split.kept @ weights.key) + split.from_rest.T @ (
        rebuilt[: joint.nope_rows] * joint.balance
    )
    errors = {
        "joint": output_error(joint.matrix, rebuilt, moment),
        "key": output_error(weights.key, key, moment),
        "value": output_error(weights.value, rebuilt[joint.nope_rows :], moment),
        "query": query_error,
        "rope": split.expected_error**0.5,
    }
    return LayerFactors(state, arguments, split.inv_freq.float(), errors)


def _project_query(weights: AttentionWeights, moment: Tensor, rank: int, method: str) -> Projection:
    if rank > len(weights.query):
        raise ValueError(f"q_lora_rank must be at most {len(weights.query)} here, got {rank}")
    return project(weights.query, moment, rank, method)


def _key_value_up(weights: AttentionWeights, split: RopeSplit, joint: JointKeyValue, up: Tensor) -> Tensor:
    """The up-projection of every query head, ``[H (dn + dv), R]``, from the joint one ``up`` of the key/value heads."""
    kv_heads = weights.num_kv_heads
    key = split.from_rest.T @ (up[: joint.nope_rows] * joint.balance)
    nope = rearrange(key, "(kv d) r -> kv d r", kv=kv_heads)[:, split.nope_dims]
    value = rearrange(up[joint.nope_rows :], "(kv d) r -> kv d r", kv=kv_heads)
    per_head = torch.cat([nope, value], dim=1)
    return repeat(per_head, "kv d r -> (kv group d) r", group=weights.num_heads // kv_heads)


def _query_state(
    state: dict[str, Tensor],
    weights: AttentionWeights,
    split: RopeSplit,
    moment: Tensor,
    projection: Projection | None,
    bias: bool,
) -> float:
    """Add the query's projections to ``state`` and return their relative output error.

    Head ``h`` of key group ``g`` scores ``q . k_g``. With ``k_g = sum_j kept[j, g]^T k'_j + rest[:, g]^T r`` its rope
    part becomes ``kept[:, g] q`` against the shared rope key ``k'``, rotated at the same frequencies, and its nope part
    stays ``q`` against the rebuilt key. The softmax scale that LowRankAttention derives from the new head dim is undone
    in the weights.
    """
    heads, dim, kv_heads = weights.num_heads, weights.head_dim, weights.num_kv_heads
    rope = rearrange(split.from_kept, "n (kv d) -> kv n d", kv=kv_heads) * weights.attention_factor
    nope = torch.eye(dim, dtype=torch.float64, device=rope.device)[split.nope_dims].expand(kv_heads, -1, -1)
    into_head = torch.cat([nope, rope], dim=1)
    into_head = into_head * weights.scale * into_head.shape[1] ** 0.5
    into_head = repeat(into_head, "kv n d -> (kv group) n d", group=heads // kv_heads)
    if projection is None:
        query = torch.einsum("hnd,hdx->hnx", into_head, rearrange(weights.query, "(h d) x -> h d x", h=heads))
        _set_projection(state, "q_proj", rearrange(query, "h n x -> (h n) x"), bias)
        return 0.0
    up = torch.einsum("hnd,hdr->hnr", into_head, rearrange(projection.up, "(h d) r -> h d r", h=heads))
    state["q_b_proj.weight"] = rearrange(up, "h n r -> (h n) r")
    _set_projection(state, "q_a_proj", projection.down, weights.query_bias)
    return output_error(weights.query, projection.up @ projection.down, moment)


def _set_projection(state: dict[str, Tensor], name: str, matrix: Tensor, bias: bool) -> None:
    state[f"{name}.weight"] = matrix[:, :-1]
    if bias:
        state[f"{name}.bias"] = matrix[:, -1]


def allocate_ranks(spectra: list[Tensor], budget: int) -> list[int]:
    """Share ``budget`` ranks over layers where they lower the relative error most.

    Args:
        spectra: per layer the energies that its directions keep, falling, as :class:`Projection` gives them.
        budget: sum of the ranks; every layer gets at least 1.

    Raises:
        ValueError: fewer than one rank per layer, or more than there are.
    """
    available = sum(spectrum.numel() for spectrum in spectra)
    if not len(spectra) <= budget <= available:
        raise ValueError(f"kv_rank_budget must be between {len(spectra)} (one per layer) and {available}, got {budget}")
    shares = [spectrum / spectrum.sum().clamp_min(torch.finfo(torch.float64).tiny) for spectrum in spectra]
    gains = torch.cat([share[1:].cpu() for share in shares])
    layers = torch.cat([torch.full((share.numel() - 1,), index, device="cpu") for index, share in enumerate(shares)])
    taken = layers[gains.sort(descending=True, stable=True).indices[: budget - len(spectra)]]
    return (torch.bincount(taken, minlength=len(spectra)) + 1).tolist()
