"""One layer on its way: what its factors are computed from, the module made of them, and what is reported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fastattn.convert.attention import ConvertedAttention
from fastattn.convert.config import LowRankConfig
from fastattn.convert.factors import LayerFactors
from fastattn.convert.families import AttentionSite, key_projection, read_weights
from fastattn.convert.moment_source import MomentSource
from fastattn.convert.report import LayerReport
from fastattn.convert.rope import RopeSplit, split_rope

if TYPE_CHECKING:
    from fastattn.convert.weights import AttentionWeights


@dataclass(frozen=True)
class Plan:
    """What a layer's factors are computed from: its weights, their RoPE split and one second moment."""

    weights: AttentionWeights
    split: RopeSplit
    moment: Tensor


def make_plan(
    model: nn.Module, config: LowRankConfig, source: MomentSource, site: AttentionSite, moment: Tensor
) -> Plan:
    """The layer's weights and their RoPE split, with ``moment`` on the weights' device."""
    weights = read_weights(model, site)
    moment = moment.to(weights.key.device)
    split = split_rope(
        weights,
        moment,
        config.qk_rope_head_dim,
        fold=config.freq_fold,
        selection=config.selection,
        mixing=config.rope_mixing,
        context=source.context,
    )
    return Plan(weights, split, moment)


def make_attention(arguments: dict[str, Any], like: nn.Module, index: int, inv_freq: Tensor) -> ConvertedAttention:
    """A converted layer with empty weights, where and as ``like`` has its own."""
    output: Any = like.o_proj
    device = output.weight.device
    # weights are drawn at construction and overwritten later: the caller's random state stays as it was
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        attention = ConvertedAttention(
            **arguments,
            inv_freq=inv_freq.to(device),
            layer_idx=index,
            device=device,
            dtype=output.weight.dtype,
        )
    return attention.requires_grad_(output.weight.requires_grad)


def attention_from(factors: LayerFactors, weights: AttentionWeights, site: AttentionSite) -> ConvertedAttention:
    """The factors as a module in the dtype and on the device of the original."""
    sizes = {"hidden_size": weights.hidden_size, "num_heads": weights.num_heads}
    arguments = {**sizes, **factors.arguments, "replaces": key_projection(site)}
    attention = make_attention(arguments, site.attention, site.index, factors.inv_freq)
    like: Any = site.attention.o_proj
    state = {name: value.to(like.weight.dtype).to(like.weight.device) for name, value in factors.state.items()}
    attention.load_state_dict(state | {"inv_freq": factors.inv_freq})
    for parameter in attention.parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise ValueError(f"{site.name} gives weights beyond the range of {like.weight.dtype}")
    return attention


def layer_row(site: AttentionSite, plan: Plan, factors: LayerFactors, attention: ConvertedAttention) -> LayerReport:
    """What there is to report of a converted layer."""
    itemsize = attention.o_proj.weight.dtype.itemsize
    return LayerReport(
        name=site.name,
        kv_lora_rank=attention.kv_lora_rank,
        q_lora_rank=attention.q_lora_rank,
        qk_rope_head_dim=attention.qk_rope_head_dim,
        freq_fold=plan.split.fold,
        key_error=factors.errors["key"],
        value_error=factors.errors["value"],
        query_error=factors.errors["query"],
        joint_error=factors.errors["joint"],
        rope_error=factors.errors["rope"],
        cache_bytes_before=plan.weights.cached_values * itemsize,
        cache_bytes_after=(attention.kv_lora_rank + attention.qk_rope_head_dim) * itemsize,
    )
