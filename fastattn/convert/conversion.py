"""Convert a trained transformers model: all layers are factored first, then swapped in together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fastattn.convert.attention import ConvertedAttention
from fastattn.convert.calibration import (
    CalibrationStatistics,
    evaluating,
    held_out_loss,
    progress_bar,
    token_batches,
)
from fastattn.convert.config import LowRankConfig
from fastattn.convert.curvature_conversion import check_curvature, convert_by_curvature
from fastattn.convert.factors import LayerFactors, allocate_ranks, build_factors, project, stack_key_value
from fastattn.convert.families import AttentionSite, attention_sites, check_site, decoder_of
from fastattn.convert.layer import Plan, attention_from, layer_row, make_attention, make_plan
from fastattn.convert.memory import peak_memory, reset_peak_memory
from fastattn.convert.moment_source import MomentSource, source_for
from fastattn.convert.report import ConversionReport, LayerReport
from fastattn.convert.resume import ResumeState

if TYPE_CHECKING:
    from collections.abc import Iterator

CONFIG_ENTRY = "fastattn_low_rank"


@torch.inference_mode(False)  # weights created under the caller's inference mode could not be trained
def to_low_rank_(
    model: nn.Module,
    config: LowRankConfig,
    calibration: Tensor | Sequence[Tensor] | CalibrationStatistics,
    evaluation: Tensor | Sequence[Tensor] | None = None,
    resume_dir: str | Path | None = None,
    progress: bool = True,
) -> ConversionReport:
    """Replace the attention of a trained transformers model by :class:`~fastattn.LowRankAttention`, without training.

    Per layer: RoPE is concentrated on ``qk_rope_head_dim`` shared dims (TransMLA, arXiv 2502.07864), the remaining keys
    are balanced with the values, and both are projected together on the directions that matter most for the
    calibration text (``W C W^T`` with ``C = E[x x^T]``, float64); likewise the query. Full ranks with all rope dims
    reproduce the model. New attention is swapped in only when every layer is done; an error or an interrupt before
    leaves the model as it was.

    Supported: decoders of rotary MHA/GQA attention from plain linear projections, split or fused, with or without
    biases (Llama, Mistral, Qwen2, Phi-3 and alike). What each layer computes is checked on the calibration text before.
    Memory: besides the model and the converted layers, one layer's statistics (float64 ``[hidden+1, hidden+1]``) and
    the calibration text's hidden states between two layers.

    Args:
        model: the model; its attention modules are replaced in place.
        config: what to convert into.
        calibration: token ids ``[N, S]`` or a list of ``[S_i]``, without padding; or :func:`calibrate`'s statistics,
            with ``statistics="parallel"``.
        evaluation: held-out token ids, to report the loss before and after; keep them disjoint from ``calibration``.
        resume_dir: finished layers are kept there; the same call after an interrupt goes on from them.
        progress: show a progress bar.

    Returns:
        The report: print it, ``as_dict()``, ``save_json(path)``, ``plot(path)``.

    Raises:
        TypeError, ValueError: an argument that does not fit, attention that can't be expressed, calibration shorter
            than the largest rank or with activations that are not finite. The model is unchanged then.
    """
    started = time.perf_counter()
    chosen = _chosen_sites(model, config)
    if evaluation is not None:
        token_batches("evaluation", evaluation, model)
    reset_peak_memory(model)
    source = source_for(model, config, calibration, chosen)
    if config.method == "curvature":
        check_curvature(model, config, source)
    resume = None if resume_dir is None else _resume_state(resume_dir, model, config, chosen, source)
    loss_before = None if evaluation is None else held_out_loss(model, evaluation)

    replaced, rows = _convert(model, config, source, chosen, resume, progress)
    with _swapped_in(model, chosen, replaced):
        loss_after = None if evaluation is None else held_out_loss(model, evaluation)
    return ConversionReport(
        layers=rows,
        config=config.as_dict(),
        calibration_tokens=source.tokens,
        seconds=time.perf_counter() - started,
        peak_memory_bytes=peak_memory(model),
        loss_before=loss_before,
        loss_after=loss_after,
    )


def _chosen_sites(model: nn.Module, config: LowRankConfig) -> list[AttentionSite]:
    """The attention that ``config`` asks to convert, all of it convertible."""
    if not isinstance(config, LowRankConfig):
        raise TypeError(f"config must be a LowRankConfig, got {type(config).__name__}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a transformers model, got {type(model).__name__}")
    if hasattr(decoder_of(model).config, CONFIG_ENTRY):
        raise ValueError("model must not be converted already, got one whose configuration says it is")
    sites = attention_sites(model)
    chosen = [site for site in sites if config.wants(site.name)]
    if not chosen:
        raise ValueError(f"layers must match at least one of {sites[0].name}..{sites[-1].name}, got {config.layers!r}")
    for site in chosen:
        check_site(model, site)
    return chosen


def _resume_state(
    folder: str | Path, model: nn.Module, config: LowRankConfig, sites: list[AttentionSite], source: MomentSource
) -> ResumeState:
    return ResumeState(Path(folder), model, config, [site.name for site in sites], source.fingerprint)


@contextmanager
def _swapped_in(
    model: nn.Module, sites: list[AttentionSite], replaced: dict[str, ConvertedAttention]
) -> Iterator[None]:
    """``replaced`` takes the place of the original attention, which an error in the context puts back."""
    originals = {site: site.attention for site in sites}
    try:
        for site in sites:
            site.parent.self_attn = replaced[site.name].train(site.attention.training)
        _record(model, replaced)
        yield
    except BaseException:
        for site, attention in originals.items():
            site.parent.self_attn = attention
        _record(model, {})
        raise


def _ranks(
    model: nn.Module, config: LowRankConfig, source: MomentSource, chosen: list[AttentionSite], progress: bool
) -> dict[str, int | None]:
    """Every layer's latent rank; ``None`` for full. A budget is shared by the spectra of the original's statistics."""
    if config.kv_rank_budget is None:
        return {site.name: config.kv_lora_rank for site in chosen}
    source.start(chosen)
    wanted, spectra = {site.name for site in chosen}, []
    for site in progress_bar(attention_sites(model), "Spectra", progress):
        if site.name not in wanted:
            if source.walk is not None:
                source.walk.advance(site.index)
            continue
        plan = make_plan(model, config, source, site, source.original_moment(site, config.damping))
        matrix = stack_key_value(plan.weights, plan.split, plan.moment, balance=config.balance).matrix
        kept = project(matrix, plan.moment, 1, config.method).kept
        spectra.append(kept[: plan.weights.hidden_size + plan.weights.kv_bias])
    return dict(zip((site.name for site in chosen), allocate_ranks(spectra, config.kv_rank_budget), strict=True))


def _convert(
    model: nn.Module,
    config: LowRankConfig,
    source: MomentSource,
    chosen: list[AttentionSite],
    resume: ResumeState | None,
    progress: bool,
) -> tuple[dict[str, ConvertedAttention], list[LayerReport]]:
    """The converted attention by name, and what there is to report of it."""
    with evaluating(model):
        if config.method == "curvature":
            return convert_by_curvature(model, config, source, chosen, resume, progress)
        ranks = _ranks(model, config, source, chosen, progress)
        return _convert_layers(model, config, source, ranks, resume, progress)


def _convert_layers(
    model: nn.Module,
    config: LowRankConfig,
    source: MomentSource,
    ranks: dict[str, int | None],
    resume: ResumeState | None,
    progress: bool,
) -> tuple[dict[str, ConvertedAttention], list[LayerReport]]:
    """The converted attention by name, and what there is to report of it."""
    sites = attention_sites(model)
    source.start([site for site in sites if site.name in ranks])
    replaced: dict[str, ConvertedAttention] = {}
    rows: list[LayerReport] = []
    for site in progress_bar(sites, "Converting", progress):
        walk, sequential = source.walk, config.sequential
        if site.name not in ranks:
            if walk is not None:
                walk.advance(site.index)
            continue
        saved = None if resume is None else resume.load(site.name)
        if saved is not None:
            attention = make_attention(saved.arguments, site.attention, site.index, saved.inv_freq)
            row = LayerReport(**saved.row)
            attention.load_state_dict(saved.state)
            if walk is not None and not sequential:
                walk.advance(site.index)
        else:
            if walk is not None and sequential:
                moment = walk.attention_moment(site.index, advance=False).mean(config.damping)
            else:
                moment = source.original_moment(site, config.damping)
            plan = make_plan(model, config, source, site, moment)
            factors = _factor(plan, config, ranks[site.name])
            attention = attention_from(factors, plan.weights, site)
            row = layer_row(site, plan, factors, attention)
            if resume is not None:
                resume.save(site.name, attention.arguments(), factors.inv_freq, attention.state_dict(), row)
        if walk is not None and sequential:
            with _in_place(site, attention):
                walk.advance(site.index)
        replaced[site.name] = attention
        rows.append(row)
    return replaced, rows


def _factor(plan: Plan, config: LowRankConfig, rank: int | None) -> LayerFactors:
    return build_factors(
        plan.weights,
        plan.split,
        plan.moment,
        kv_rank=rank,
        q_rank=config.q_lora_rank,
        method=config.method,
        balance=config.balance,
    )


@contextmanager
def _in_place(site: AttentionSite, attention: nn.Module) -> Iterator[None]:
    """``attention`` stands in for the site's own while the context lasts."""
    original = site.attention
    site.parent.self_attn = attention
    try:
        yield
    finally:
        site.parent.self_attn = original


def _record(model: nn.Module, replaced: dict[str, ConvertedAttention]) -> None:
    """Say in the model's configuration what its attention is now, so that it can be saved and loaded."""
    config: Any = decoder_of(model).config
    if replaced:
        setattr(config, CONFIG_ENTRY, {"version": 1, "layers": {n: a.arguments() for n, a in replaced.items()}})
    elif hasattr(config, CONFIG_ENTRY):
        delattr(config, CONFIG_ENTRY)
