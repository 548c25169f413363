"""Conversion by the curvature of the loss: gather, choose ranks, factor, refit."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fastattn.convert.allocation import allocate_globally
from fastattn.convert.attention import ConvertedAttention
from fastattn.convert.calibration import progress_bar
from fastattn.convert.config import LowRankConfig
from fastattn.convert.curvature import (
    MINIMUM_SEQUENCES,
    Curvature,
    Directions,
    check_differentiable,
    directions,
    fit_curvature,
    latent_gradients,
)
from fastattn.convert.factors import build_factors, project, stack_key_value
from fastattn.convert.families import AttentionSite, attention_sites
from fastattn.convert.layer import Plan, attention_from, layer_row, make_attention, make_plan
from fastattn.convert.moment_source import MomentSource
from fastattn.convert.refit import OutputRefit
from fastattn.convert.report import LayerReport
from fastattn.convert.resume import ResumeState


def check_curvature(model: nn.Module, source: MomentSource) -> None:
    """Refuse what the curvature can't be gathered from.

    Raises:
        ValueError: a model without gradients, statistics instead of text, or too few sequences.
    """
    if not source.batches:
        raise ValueError('method="curvature" needs calibration text, got statistics')
    sequences = sum(len(batch) for batch in source.batches)
    if sequences < MINIMUM_SEQUENCES:
        raise ValueError(f'calibration must hold {MINIMUM_SEQUENCES} sequences for "curvature", got {sequences}')
    check_differentiable(model)


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
    found: list[Directions] = []
    for site in chosen:
        matrix = _latent_matrix(make_plan(model, config, source, site, moments[site.name]), config)
        found.append(directions(matrix, gathered[site.name], moments[site.name]))
    ranks = choose_ranks(config, [d.cost for d in found])
    refit = OutputRefit(model, source.batches) if config.refit else None
    by_name = {site.name: (d, rank) for site, d, rank in zip(chosen, found, ranks, strict=True)}
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
            plan = make_plan(model, config, source, site, moments[site.name])
            found_here, rank = by_name[site.name]
            basis = Directions(found_here.up[:, :rank], found_here.down[:rank], found_here.cost)
            factors = build_factors(
                plan.weights,
                plan.split,
                plan.moment,
                kv_rank=None,
                q_rank=config.q_lora_rank,
                method=config.method,
                balance=config.balance,
                basis=(basis.up, basis.down),
            )
            attention = attention_from(factors, plan.weights, site)
            row = layer_row(site, plan, factors, attention)
        if refit is not None:
            refit.finish(site.index, site.parent, attention, fit=saved is None)
        if saved is None and resume is not None:
            resume.save(site.name, attention.arguments(), attention.inv_freq, attention.state_dict(), row)
        replaced[site.name] = attention
        rows.append(row)
    return replaced, rows


def choose_ranks(config: LowRankConfig, costs: list[Tensor]) -> list[int]:
    """Every layer's latent rank."""
    if config.kv_rank_budget is not None:
        return allocate_globally(costs, config.kv_rank_budget)
    if config.kv_lora_rank is None:
        return [cost.numel() for cost in costs]
    uniform = [min(config.kv_lora_rank, cost.numel()) for cost in costs]
    return allocate_globally(costs, sum(uniform)) if config.rank_allocation == "global" else uniform


def _moments(
    model: nn.Module, config: LowRankConfig, source: MomentSource, chosen: list[AttentionSite], progress: bool
) -> dict[str, Tensor]:
    source.start(chosen)
    wanted, moments = {site.name for site in chosen}, {}
    for site in progress_bar(attention_sites(model), "Moments", progress):
        if site.name in wanted:
            moments[site.name] = source.original_moment(site, config.damping)
        elif source.walk is not None:
            source.walk.advance(site.index)
    source.walk = None
    return moments


def _latent_matrix(plan: Plan, config: LowRankConfig) -> Tensor:
    """The latent projection at full rank, ``[R, hidden+1]``, as :func:`build_factors` has it."""
    joint = stack_key_value(plan.weights, plan.split, plan.moment, balance=config.balance)
    full = min(joint.matrix.shape[0], plan.weights.hidden_size + plan.weights.kv_bias)
    return project(joint.matrix, plan.moment, full, config.method).down


def gather(
    model: nn.Module,
    config: LowRankConfig,
    source: MomentSource,
    chosen: list[AttentionSite],
    moments: dict[str, Tensor],
    resume: ResumeState | None,
    progress: bool,
) -> dict[str, Curvature]:
    """Curvature of every layer's full-rank latent, gathered where full-rank latents stand in for the original."""
    saved = None if resume is None else resume.load_tensors("curvature")
    if saved is not None:
        return {s.name: Curvature(saved[f"{s.name}.latent"], saved[f"{s.name}.inputs"]) for s in chosen}
    full: dict[str, Any] = {}
    for site in chosen:
        plan = make_plan(model, config, source, site, moments[site.name])
        factors = build_factors(
            plan.weights, plan.split, plan.moment, kv_rank=None, q_rank=None, method=config.method,
            balance=config.balance,
        )  # fmt: skip
        full[site.name] = attention_from(factors, plan.weights, site).eval()
    originals = [site.attention for site in chosen]
    try:
        for site in chosen:
            site.parent.self_attn = full[site.name]
        gradients = latent_gradients(model, [full[site.name] for site in chosen], source.batches, progress=progress)
    finally:
        for site, attention in zip(chosen, originals, strict=True):
            site.parent.self_attn = attention
    result: dict[str, Curvature] = {}
    for site in chosen:
        result[site.name] = fit_curvature(gradients.pop(0), moments[site.name])
    if resume is not None:
        tensors = {f"{name}.latent": c.latent for name, c in result.items()}
        resume.save_tensors("curvature", tensors | {f"{name}.inputs": c.inputs for name, c in result.items()})
    return result
