"""Conversion by the curvature of the loss: gather, choose rotary components and ranks, factor, refit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastattn.convert.allocation import allocate_globally
from fastattn.convert.attention import ConvertedAttention
from fastattn.convert.calibration import progress_bar
from fastattn.convert.config import LowRankConfig
from fastattn.convert.curvature import Directions, check_differentiable, directions
from fastattn.convert.factors import LayerFactors, Projection, build_factors
from fastattn.convert.families import AttentionSite, attention_sites, read_weights
from fastattn.convert.joint_allocation import TOGETHER, LayerCosts, allocate_jointly, pair_counts
from fastattn.convert.layer import Plan, attention_from, layer_row, make_attention, make_plan
from fastattn.convert.layer_curvature import LayerCurvature, check_text, gather_curvature
from fastattn.convert.moment_source import MomentSource
from fastattn.convert.refit import OutputRefit
from fastattn.convert.report import LayerReport
from fastattn.convert.resume import ResumeState
from fastattn.convert.rope import RopeSplit
from fastattn.convert.rope_gradient import RopeComponents, choose_components, gradient_split, rope_components


@dataclass(frozen=True)
class LayerChoice:
    """What a layer is factored from: its RoPE split, and directions of the latent and of the query, best first."""

    split: RopeSplit
    latent: Directions
    query: Directions | None


def check_curvature(model: nn.Module, config: LowRankConfig, source: MomentSource) -> None:
    """Refuse what the curvature can't be gathered from.

    Raises:
        ValueError: a model without gradients, statistics without curvature, or too few sequences.
    """
    given = source.statistics
    if given is None:
        check_text(sum(len(batch) for batch in source.batches))
        check_differentiable(model)
    elif given.curvature is None:
        raise ValueError('method="curvature" needs text or statistics of calibrate_curvature, got those of calibrate')
    elif config.q_lora_rank is not None and any(layer.query is None for layer in given.curvature.values()):
        raise ValueError("q_lora_rank needs statistics of calibrate_curvature(..., with_query=True), got none")


def convert_by_curvature(
    model: nn.Module,
    config: LowRankConfig,
    source: MomentSource,
    chosen: list[AttentionSite],
    resume: ResumeState | None,
    progress: bool,
) -> tuple[dict[str, ConvertedAttention], list[LayerReport]]:
    """The converted attention by name, and what there is to report of it. The model is as before afterwards."""
    moments = _moments(model, config, source, chosen, progress)
    gathered = gather(model, config, source, chosen, moments, resume, progress)
    splits = choose_splits(model, config, source, chosen, moments, gathered)
    choices: dict[str, LayerChoice] = {}
    for site, split in zip(progress_bar(chosen, "Factoring", progress), splits, strict=True):
        choices[site.name] = choose_layer(model, config, site, split, gathered[site.name], moments[site.name])
    rope_dims = [split.kept.shape[0] for split in splits]
    ranks = choose_ranks(config, [choice.latent.cost for choice in choices.values()], rope_dims)
    query_ranks = choose_query_ranks(config, [choice.query for choice in choices.values()])
    by_name = {site.name: pair for site, pair in zip(chosen, zip(ranks, query_ranks, strict=True), strict=True)}
    refit = OutputRefit(model, source.batches) if config.refit else None
    replaced: dict[str, ConvertedAttention] = {}
    rows: list[LayerReport] = []
    for site in progress_bar(attention_sites(model), "Converting", progress):
        if site.name not in by_name:
            if refit is not None:
                refit.skip(site.index)
            continue
        saved = None if resume is None else resume.load(site.name)
        if saved is not None:
            attention = make_attention(saved.arguments, site.attention, site.index, saved.inv_freq)
            attention.load_state_dict(saved.state)
            row = LayerReport(**saved.row)
        else:
            plan = Plan(read_weights(model, site), choices[site.name].split, moments[site.name])
            factors = _factor(plan, choices[site.name], *by_name[site.name])
            attention = attention_from(factors, plan.weights, site)
            row = layer_row(site, plan, factors, attention)
        if refit is not None:
            refit.finish(site.index, site.parent, attention, fit=saved is None)
        if saved is None and resume is not None:
            resume.save(site.name, attention.arguments(), attention.inv_freq, attention.state_dict(), row)
        replaced[site.name] = attention
        rows.append(row)
    return replaced, rows


def choose_splits(
    model: nn.Module,
    config: LowRankConfig,
    source: MomentSource,
    chosen: list[AttentionSite],
    moments: dict[str, Tensor],
    gathered: dict[str, LayerCurvature],
) -> list[RopeSplit]:
    """Every layer's RoPE split."""
    if config.selection != "curvature" or config.qk_rope_head_dim is None:
        return [make_plan(model, config, source, site, moments[site.name]).split for site in chosen]
    found = []
    for site in chosen:
        layer = gathered[site.name]
        found.append(rope_components(read_weights(model, site), layer.rotated, layer.unrotated))
    costs = [components.cost for components in found]
    if config.rank_allocation == "joint":
        kept = _choose_jointly(model, config, source, chosen, moments, gathered, found)
    else:
        kept = choose_components(costs, config.qk_rope_head_dim // 2, shared=config.rank_allocation == "global")
    return [
        gradient_split(read_weights(model, site), components, mask, moments[site.name], source.context)
        for site, components, mask in zip(chosen, found, kept, strict=True)
    ]


def _choose_jointly(
    model: nn.Module,
    config: LowRankConfig,
    source: MomentSource,
    chosen: list[AttentionSite],
    moments: dict[str, Tensor],
    gathered: dict[str, LayerCurvature],
    found: list[RopeComponents],
) -> list[Tensor]:
    """Which components of each layer keep RoPE, where positions and directions compete for the same numbers."""
    layers = []
    for site, components in zip(chosen, found, strict=True):
        costs = LayerCosts([], [], [])
        for pairs in pair_counts(components.cost.numel()):
            mask = choose_components([components.cost], pairs, shared=False)[0]
            weights = read_weights(model, site)
            split = gradient_split(weights, components, mask, moments[site.name], source.context)
            directions_of = choose_layer(
                model, config, site, split, gathered[site.name], moments[site.name], query=False
            )
            lost = directions_of.latent.cost.flip(0).cumsum(0).flip(0)
            costs.pairs.append(pairs)
            costs.rope.append(TOGETHER * float(components.cost[~mask].sum()))
            costs.latent.append(torch.cat([lost, lost.new_zeros(1)]).cpu())
        layers.append(costs)
    kept = allocate_jointly(layers, _numbers_per_layer(config) * len(chosen))
    return [
        choose_components([components.cost], pairs, shared=False)[0]
        for components, pairs in zip(found, kept, strict=True)
    ]


def _numbers_per_layer(config: LowRankConfig) -> int:
    return (config.kv_lora_rank or 0) + (config.qk_rope_head_dim or 0)


def choose_layer(
    model: nn.Module,
    config: LowRankConfig,
    site: AttentionSite,
    split: RopeSplit,
    layer: LayerCurvature,
    moment: Tensor,
    *,
    query: bool = True,
) -> LayerChoice:
    """The directions of one layer, up to full rank; the query's too, if it has a rank and ``query`` asks for it."""
    weights = read_weights(model, site)
    matrix = torch.cat([split.rest @ weights.key, weights.value])
    identity = torch.eye(len(weights.value), dtype=matrix.dtype, device=matrix.device)
    change = torch.block_diag(split.from_rest.T, identity)
    latent = directions(matrix, layer.key_value, moment, change=change, split_at=len(weights.key))
    latent = _first(latent, min(len(matrix), weights.hidden_size + weights.kv_bias))
    if config.q_lora_rank is None or not query:
        return LayerChoice(split, latent, None)
    assert layer.query is not None  # gathered with it
    of_query = directions(weights.query, layer.query, moment)
    of_query = _first(of_query, min(len(weights.query), weights.hidden_size + weights.query_bias))
    return LayerChoice(split, latent, of_query)


def _first(found: Directions, count: int) -> Directions:
    return Directions(found.up[:, :count], found.down[:count], found.cost[:count])


def choose_ranks(config: LowRankConfig, costs: list[Tensor], rope_dims: list[int]) -> list[int]:
    """Every layer's latent rank, of layers with these ``rope_dims``."""
    if config.rank_allocation == "joint":
        available = sum(cost.numel() for cost in costs)
        return allocate_globally(costs, min(available, _numbers_per_layer(config) * len(costs) - sum(rope_dims)))
    if config.kv_rank_budget is not None:
        return allocate_globally(costs, config.kv_rank_budget)
    return _shared_ranks(config, costs, config.kv_lora_rank)


def choose_query_ranks(config: LowRankConfig, found: list[Directions | None]) -> list[int | None]:
    """Every layer's query rank, None for full."""
    costs = [query.cost for query in found if query is not None]
    return list(_shared_ranks(config, costs, config.q_lora_rank)) if costs else [None] * len(found)


def _shared_ranks(config: LowRankConfig, costs: list[Tensor], rank: int | None) -> list[int]:
    if rank is None:
        return [cost.numel() for cost in costs]
    uniform = [min(rank, cost.numel()) for cost in costs]
    return uniform if config.rank_allocation == "uniform" else allocate_globally(costs, sum(uniform))


def _factor(plan: Plan, choice: LayerChoice, rank: int, query_rank: int | None) -> LayerFactors:
    weights = plan.weights
    matrix = torch.cat([plan.split.rest @ weights.key, weights.value])
    query = None
    if choice.query is not None:
        query = _projection(choice.query, weights.query, query_rank or 1)
    return build_factors(
        weights,
        plan.split,
        plan.moment,
        kv_rank=None,
        q_rank=query_rank,
        balance=False,
        latent=_projection(choice.latent, matrix, rank),
        query=query,
    )


def _projection(found: Directions, matrix: Tensor, rank: int) -> Projection:
    return Projection(found.up[:, :rank], found.down[:rank] @ matrix, found.cost)


def _moments(
    model: nn.Module, config: LowRankConfig, source: MomentSource, chosen: list[AttentionSite], progress: bool
) -> dict[str, Tensor]:
    source.start(chosen)
    wanted, moments = {site.name for site in chosen}, {}
    for site in progress_bar(attention_sites(model), "Moments", progress):
        if site.name in wanted:
            moment = source.original_moment(site, config.damping)
            moments[site.name] = moment.to(read_weights(model, site).key.device)
        elif source.walk is not None:
            source.walk.advance(site.index)
    source.walk = None
    return moments


def gather(
    model: nn.Module,
    config: LowRankConfig,
    source: MomentSource,
    chosen: list[AttentionSite],
    moments: dict[str, Tensor],
    resume: ResumeState | None,
    progress: bool,
) -> dict[str, LayerCurvature]:
    """Every chosen layer's curvature: given, finished before, or gathered from the text."""
    if source.statistics is not None:
        assert source.statistics.curvature is not None  # checked before
        return {site.name: source.statistics.curvature[site.name] for site in chosen}
    saved = None if resume is None else resume.load_tensors("curvature")
    if saved is not None:
        result = {}
        for site in chosen:
            own = {k.removeprefix(f"{site.name}/"): v for k, v in saved.items() if k.startswith(f"{site.name}/")}
            result[site.name] = LayerCurvature.from_tensors(own, moments[site.name].device)
        return result
    with_query = config.q_lora_rank is not None
    result = gather_curvature(model, chosen, source.batches, moments, with_query=with_query, progress=progress)
    if resume is not None:
        named = {f"{name}/{part}": value for name, layer in result.items() for part, value in layer.tensors().items()}
        resume.save_tensors("curvature", named)
    return result
