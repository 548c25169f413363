"""Read the attention of a transformers model, or say why it can't be converted. Nothing here changes a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastattn.convert.weights import AttentionWeights
from fastattn.integrations._arguments import CHANGING_ROPE_TYPES
from fastattn.integrations._placement import offloaded_to

SPLIT = ("q_proj", "k_proj", "v_proj", "o_proj")
FUSED = ("qkv_proj", "o_proj")


@dataclass(frozen=True)
class AttentionSite:
    """Where an attention module sits: ``parent.self_attn``, called ``name``, in decoder layer ``index``."""

    name: str
    index: int
    parent: nn.Module

    @property
    def attention(self) -> nn.Module:
        return self.parent.self_attn  # type: ignore[return-value]


def decoder_of(model: nn.Module) -> nn.Module:
    """The module that holds the embedding, the layers and the rotary tables.

    Raises:
        ValueError: no such module.
    """
    if callable(getattr(model, "merge_and_unload", None)):
        raise ValueError(
            f"model must be a transformers model, got {type(model).__name__} with adapters around one: call its "
            "merge_and_unload() first and pass what that returns"
        )
    decoder = getattr(model, "base_model", model)
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not all(hasattr(layer, "self_attn") for layer in layers):
        raise ValueError(
            "model must be a transformers decoder with layers[i].self_attn (Llama, Mistral, Qwen2, Phi-3 and alike), "
            f"got {type(model).__name__}"
        )
    return decoder


def attention_sites(model: nn.Module) -> list[AttentionSite]:
    """Every decoder layer's attention, in order."""
    decoder = decoder_of(model)
    names = {module: name for name, module in model.named_modules()}
    return [
        AttentionSite(f"{names[layer]}.self_attn", index, layer)
        for index, layer in enumerate(decoder.layers)  # type: ignore[arg-type]
    ]


def fresh_rotary(decoder: nn.Module) -> Any:
    """The decoder's rotary tables, computed anew: a cast of the model rounded those that it holds."""
    rotary = getattr(decoder, "rotary_emb", None)
    if rotary is None or not hasattr(rotary, "inv_freq"):
        raise ValueError(f"model must have one table of rotary frequencies (rotary_emb), got {type(decoder).__name__}")
    with torch.device("cpu"):
        return type(rotary)(config=decoder.config)


def check_site(model: nn.Module, site: AttentionSite) -> None:
    """Refuse attention that a low-rank latent can't express.

    Raises:
        ValueError: naming the module, what it has and why that doesn't fit.
    """
    config, attention = decoder_of(model).config, site.attention
    where = f"model can't be converted: {site.name} ({type(attention).__name__})"
    children = dict(attention.named_children())
    for name in children:
        if "norm" in name:
            raise ValueError(
                f"{where} has {name}: a norm on queries or keys stands between projection and RoPE "
                "and has no place in a linear latent"
            )
    expected = FUSED if "qkv_proj" in children else SPLIT
    if set(children) != set(expected):
        raise ValueError(f"{where} must consist of {SPLIT} or {FUSED}, got {tuple(children)}")
    extra = [name for name, _ in attention.named_parameters(recurse=False)]
    if extra:
        raise ValueError(f"{where} has parameters that LowRankAttention does not: {extra}")
    for name, child in children.items():
        kind = _unreadable(child)
        if kind:
            raise ValueError(
                f"{where}.{name} must be a plain nn.Linear with float weights, neither quantized nor sharded, "
                f"got {kind}"
            )
        if child.weight.is_meta:
            raise ValueError(f"{where}.{name} must be on a device, got an empty module{_offloaded(child)}")
    for name, module in [("", attention), *((f".{name}", child) for name, child in children.items())]:
        if module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook"):
            raise ValueError(f"{where}{name} carries hooks, which a replaced module would lose: remove them first")
    _check_behavior(config, site, where)


def _unreadable(child: nn.Module) -> str:
    """What keeps a projection's numbers from being read, empty if nothing does."""
    kind = f"{type(child).__module__}.{type(child).__qualname__}".removeprefix("torch.nn.modules.linear.")
    if type(child) is not nn.Linear:
        return kind
    weight = child.weight
    if type(weight) is not nn.Parameter:
        return f"{kind} whose weight is a {type(weight).__module__}.{type(weight).__qualname__}"
    if not weight.is_floating_point() or weight.dtype.itemsize < 2:
        return f"{kind} of {weight.dtype}"
    return ""


def _offloaded(child: nn.Module) -> str:
    return "" if offloaded_to(child) is None else ": its weights are offloaded by accelerate, load the model whole"


def _check_behavior(config: Any, site: AttentionSite, where: str) -> None:
    attention = site.attention
    window = (
        attention.sliding_window if hasattr(attention, "sliding_window") else getattr(config, "sliding_window", None)
    )
    longest = getattr(config, "max_position_embeddings", None)
    if window and (longest is None or window < longest):
        raise ValueError(
            f"{where} has a sliding window of {window}, which LowRankAttention lacks; "
            "set config.sliding_window = None before loading to convert it as full attention"
        )
    for name in ("attn_logit_softcapping", "attention_dropout"):
        if getattr(config, name, None):
            raise ValueError(f"{where} has {name} {getattr(config, name)}, which LowRankAttention lacks")
    clip = getattr(config, "clip_qkv", None)
    if clip is not None:
        raise ValueError(
            f"{where} has clip_qkv {clip}: projections clipped before the rotation are not linear in their input, "
            "however few of them the calibration text clips"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") in CHANGING_ROPE_TYPES:
        raise ValueError(f"{where} has RoPE of type {rope['rope_type']!r}, whose frequencies change with length")


def read_weights(model: nn.Module, site: AttentionSite) -> AttentionWeights:
    """The layer's projections in float64, on the CPU where its device has no float64."""
    decoder = decoder_of(model)
    attention: Any = site.attention
    config: Any = decoder.config
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    output: nn.Linear = attention.o_proj
    if hasattr(attention, "qkv_proj"):
        fused: nn.Linear = attention.qkv_proj
        dim = int(attention.head_dim)
        query, key, value = _matrix(fused).split([heads * dim, kv_heads * dim, kv_heads * dim])
        query_bias = kv_bias = fused.bias is not None
    else:
        projections: tuple[nn.Linear, nn.Linear, nn.Linear] = (attention.q_proj, attention.k_proj, attention.v_proj)
        query, key, value = (_matrix(projection) for projection in projections)
        query_bias = projections[0].bias is not None
        kv_bias = projections[1].bias is not None or projections[2].bias is not None
    if query.shape[0] % heads or key.shape[0] % kv_heads or query.shape[0] // heads != key.shape[0] // kv_heads:
        raise ValueError(
            f"model can't be converted: {site.name} must hold {heads} query and {kv_heads} key heads of one size, "
            f"got projections of {query.shape[0]} and {key.shape[0]} rows"
        )
    rotary = fresh_rotary(decoder)
    head_dim = query.shape[0] // heads
    inv_freq = rotary.inv_freq.detach().float()
    if 2 * inv_freq.numel() > head_dim:
        raise ValueError(
            f"model can't be converted: {site.name} has {inv_freq.numel()} rotary frequencies for heads of {head_dim}"
        )
    return AttentionWeights(
        query=query,
        key=key,
        value=value,
        output=_matrix(output),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=value.shape[0] // kv_heads,
        inv_freq=inv_freq.to(query.device),
        scale=float(attention.scaling),
        attention_factor=float(rotary.attention_scaling),
        query_bias=query_bias,
        kv_bias=kv_bias,
        output_bias=output.bias is not None,
    )


def key_projection(site: AttentionSite) -> str:
    """The name of the projection that gives the keys."""
    return "qkv_proj" if hasattr(site.attention, "qkv_proj") else "k_proj"


def _matrix(projection: nn.Linear) -> Tensor:
    """``[W b]`` in float64; a column of zeros without a bias."""
    weight = projection.weight.detach()
    weight = (weight.cpu() if weight.device.type == "mps" else weight).double()
    bias = weight.new_zeros(weight.shape[0]) if projection.bias is None else projection.bias.detach().to(weight)
    return torch.cat([weight, bias[:, None]], dim=1)


def check_reading(
    weights: AttentionWeights, site: AttentionSite, inputs: Tensor, outputs: Tensor, *, probed: bool = False
) -> None:
    """The layer's own output on the first tokens of a text is what ``weights`` say it computes.

    Catches whatever a model does that no attribute shows: another rotation, another scale, a cap. ``probed``: inputs
    that are scaled from a text's.

    Raises:
        ValueError: it is not.
    """
    expected = weights.attend(inputs.to(weights.query.device))
    rounded = {inputs.dtype, outputs.dtype} - {torch.float32, torch.float64}  # of the model, or of autocast
    outputs = outputs.to(expected)
    difference = float((outputs - expected).norm() / expected.norm().clamp_min(1e-30))
    allowed = 5e-2 if rounded or probed else 1e-3
    if not difference <= allowed:
        raise ValueError(
            f"model can't be converted: {site.name} ({type(site.attention).__name__}) does not compute plain rotary "
            f"attention, its output differs from it by {difference:.2g} of its norm"
            + (" at inputs scaled far from those of the calibration text" if probed else "")
        )
