"""What a model is refused for before it is examined: its configuration, its weights' whereabouts, its caches."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fastattn.integrations._placement import offloaded_to
from fastattn.integrations.transformers import _versions
from fastattn.integrations.transformers._attention import NAME

_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
_UNSUPPORTED_IMPLEMENTATIONS = ("flash", "flex", "paged", "/")


def check_implementation(name: str | None) -> str:
    name = name or "eager"
    if name == NAME or any(part in name for part in _UNSUPPORTED_IMPLEMENTATIONS):
        raise ValueError(
            f'the model uses attn_implementation="{name}", whose inputs are prepared in a way of its own: call '
            'model.set_attn_implementation("sdpa") first'
        )
    if name != "eager" and name not in ALL_ATTENTION_FUNCTIONS:
        raise ValueError(f'attn_implementation="{name}" is not registered with transformers')
    return name


def has_several_axes(config: Any) -> bool:
    """Positions are counted on several axes, as models for images and videos do."""
    return any("mrope_section" in (getattr(config, name, None) or ()) for name in ("rope_parameters", "rope_scaling"))


def check_config(config: Any) -> None:
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        raise ValueError("the model's attention is bidirectional: a compressed cache serves causal attention only")
    if getattr(config, "num_kv_shared_layers", 0) or getattr(config, "kv_sharing_modes", None):
        raise ValueError("the model has layers that share a cache, which is not supported")
    others = sorted({str(t) for t in getattr(config, "layer_types", None) or ()} - set(_LAYER_TYPES))
    if others:
        raise ValueError(f"the model has layers of type {', '.join(others)}, supported are {', '.join(_LAYER_TYPES)}")


def check_weights(decoder: nn.Module) -> None:
    """The weights are here, whole, or come here for every call."""
    fetched = any(offloaded_to(module) is not None for module in decoder.modules())
    for name, parameter in decoder.named_parameters():
        if parameter.is_meta and not fetched:
            raise ValueError(
                f"the model's weights must be on a device, but {name} is on the meta device, and no hook of accelerate "
                "brings it from where it is offloaded to: it was never loaded. Load the model onto one device"
            )


def standard_layers(config: Any) -> list[Any]:
    layers = _versions.standard_layers(config)
    for index, layer in enumerate(layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise ValueError(f"layer {index} needs a {type(layer).__name__}, which a compressed cache has not")
    if all(isinstance(layer, DynamicSlidingWindowLayer) for layer in layers):
        raise ValueError("the model has sliding-window layers only: their cache is bounded already")
    return layers
