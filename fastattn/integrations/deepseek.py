"""DeepSeek-V2 and V3 models in transformers with their attention replaced by LowRankAttention."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from fastattn.integrations._placement import device_of
from fastattn.integrations.low_rank import TransformersAttention

# transformers' class -> whether its rotation pairs neighbors whatever the configuration says
_REPLACED = {"DeepseekV2Attention": True, "DeepseekV3Attention": False}
_KEPT_MODULES = (
    "q_proj",
    "q_a_proj",
    "q_a_layernorm",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_a_layernorm",
    "kv_b_proj",
    "o_proj",
)

Model = TypeVar("Model", bound=nn.Module)


def replace_attention_(model: Model) -> Model:
    """Replace the attention of a DeepSeek-V2 or V3 model by :class:`~fastattn.LowRankAttention`, in place.

    The model then decodes absorbed: over transformers' own growing cache, which holds the latents, and over
    ``compressed_cache(model, ...)``. Projections and norms are the same modules as before, so that adapters, quantized
    weights and offloading hooks on them go on working; the names in the state_dict stay.

    Args:
        model: a transformers model, or any module that holds ``DeepseekV2Attention`` or ``DeepseekV3Attention``.

    Returns:
        ``model``.

    Raises:
        TypeError: not a module.
        ValueError: it has no such attention, or one that LowRankAttention can't stand for (dropout, rotary frequencies
            that change with the length, fewer key/value heads, hooks on the attention module itself). Then nothing has
            been replaced.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if _is_replaced(child)
    ]
    if not found:
        others = sorted({type(m).__name__ for m in model.modules() if type(m).__name__.endswith("Attention")})
        raise ValueError(
            f"model must hold {' or '.join(_REPLACED)}, got {type(model).__name__} with {others or 'no attention'}"
        )
    new = [_low_rank_from(child) for _, _, child in found]  # all of them, before the model changes
    for (parent, name, _), attention in zip(found, new, strict=True):
        setattr(parent, name, attention)
    return model


def _is_replaced(module: nn.Module) -> bool:
    """Of transformers' own classes: others of that name, which come with checkpoints, compute in their own way."""
    kind = type(module)
    return kind.__name__ in _REPLACED and kind.__module__.startswith("transformers.models.deepseek_v")


def _low_rank_from(old: nn.Module) -> TransformersAttention:
    """The same layer as LowRankAttention, holding the projections and norms of ``old``."""
    config: Any = old.config
    _check_supported(old, config)
    interleave = _REPLACED[type(old).__name__] or bool(getattr(config, "rope_interleave", True))
    new = TransformersAttention(
        config.hidden_size,
        config.num_attention_heads,
        kv_lora_rank=config.kv_lora_rank,
        q_lora_rank=config.q_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        rope_theta=config.rope_parameters["rope_theta"],
        rope_interleave=interleave,
        rope_scaling=_rope_scaling(config),
        softmax_scale=float(old.scaling),  # type: ignore[arg-type]  # with or without mscale, as this release has it
        layer_idx=int(old.layer_idx),  # type: ignore[arg-type]
        device="meta",
    )
    for name in _KEPT_MODULES:
        if getattr(old, name, None) is not None:
            setattr(new, name, getattr(old, name))
    device = device_of(old)
    if device is not None:  # else they stay on the CPU, and move with the module
        new.inv_freq = new.inv_freq.to(device)
    return new.train(old.training)


def _check_supported(old: nn.Module, config: Any) -> None:
    name = type(old).__name__
    if config.attention_dropout:
        raise ValueError(f"{name} must have attention_dropout 0, got {config.attention_dropout}")
    if config.num_key_value_heads != config.num_attention_heads:
        raise ValueError(
            f"{name} must have as many key/value heads as heads ({config.num_attention_heads}), got "
            f"{config.num_key_value_heads}"
        )
    if old._forward_hooks or old._forward_pre_hooks or "forward" in old.__dict__:
        raise ValueError(
            f"{name} must carry no hooks of its own, which a replaced module would lose: remove them first"
        )


def _rope_scaling(config: Any) -> dict[str, Any] | None:
    parameters = {key: value for key, value in config.rope_parameters.items() if value is not None}
    if parameters.get("rope_type", "default") == "yarn" and "factor" not in parameters:
        parameters["factor"] = config.max_position_embeddings / parameters["original_max_position_embeddings"]
    return parameters
