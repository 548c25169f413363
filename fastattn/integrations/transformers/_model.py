"""Examining a model and switching it: which layers can be compressed, how it rotates, and the hook that carries caches.

Nothing about the model is taken for granted that can be seen: a forward pass over four tokens with the same embedding
shows every attention call it makes, what it passes, and how queries and keys are rotated from one position to another.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicSlidingWindowLayer

from fastattn.integrations._arguments import CACHE_KEYWORD, SERVED_BY_CACHE, check_arguments
from fastattn.integrations._placement import device_of
from fastattn.integrations.transformers import _versions
from fastattn.integrations.transformers._attention import (
    NAME,
    eager_attention,
    new_token_mask,
    previous_implementation,
    remember_previous,
    was_switched,
)
from fastattn.integrations.transformers._checks import (
    check_config,
    check_implementation,
    check_weights,
    has_several_axes,
    standard_layers,
)
from fastattn.integrations.transformers._heads import check_spread, find_shard
from fastattn.integrations.transformers._layers import CompressedLayer, ForwardedCache
from fastattn.integrations.transformers._rotary import checked_rotary, described, find_rotary, low_rank_rotary
from fastattn.modules.kv_cache.spec import one_or_each
from fastattn.modules.low_rank import LowRankAttention
from fastattn.modules.rotary import Rotary
from fastattn.validation import hides_values

_SWITCHING = threading.RLock()  # one model is examined and switched at a time, whatever thread asks


@dataclass(frozen=True)
class ModelSpec:
    """What a cache for a model must know.

    Attributes:
        slots: per layer of the model, its index among the full-attention layers, None for a sliding window.
        num_heads, num_kv_heads: of every full-attention layer.
        head_dim, v_head_dim: likewise; of layers of low-rank attention one for each where they differ.
        latent_rank: rank of the latents that layers of low-rank attention store, None for other models.
        rotary: the model's rotation, or one for every full-attention layer, None in it for a layer that does not
            rotate; None where what the layers do is not explained.
        no_rotary: why there is none.
        dtype, device: of its keys.
        head_shard: which part of the heads this is, where they are spread over ranks.
    """

    slots: tuple[int | None, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int | tuple[int, ...]
    v_head_dim: int | tuple[int, ...]
    latent_rank: int | tuple[int, ...] | None
    rotary: Rotary | list[Rotary | None] | None
    dtype: torch.dtype
    device: torch.device
    no_rotary: str = ""
    head_shard: Any = None

    @property
    def num_compressed(self) -> int:
        return sum(slot is not None for slot in self.slots)

    def cache_arguments(self) -> dict[str, Any]:
        """What :class:`~fastattn.CompressedKVCache` is constructed with for such a model, its dtype aside."""
        return {
            "num_layers": self.num_compressed,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "v_head_dim": self.v_head_dim,
            "latent_rank": self.latent_rank,
            "num_heads": self.num_heads,
            "rotary": self.rotary,
            "device": self.device,
        }

    @property
    def signature(self) -> str:
        """Equal for models that can use each other's caches."""
        pattern = "".join("w" if slot is None else "f" for slot in self.slots)
        rotation = "of each layer's own"
        if self.rotary is not None:
            each = self.rotary if isinstance(self.rotary, list) else [self.rotary]
            rotation = "; ".join(dict.fromkeys(described(rotary) for rotary in each))
        return (
            f"layers {pattern} (f: full, w: window), {self.num_heads} query heads of {self.head_dim} dims, "
            f"{self.num_kv_heads} key/value heads, value dim {self.v_head_dim}, latent rank {self.latent_rank}, "
            f"rotation {rotation}"
        )


class CacheHook:
    """Forward pre-hook of a model: hands the compressed cache in its arguments on to the attention calls."""

    def __init__(self, decoder: nn.Module, previous: str) -> None:
        self.argument = _versions.cache_argument(decoder)
        self.position = _versions.argument_position(decoder, self.argument)
        self.wants_columns = _versions.takes_columns(decoder)
        self.previous = previous
        self.config = decoder.config
        self.signature = ""
        self.spec: ModelSpec
        self.fingerprint = 0
        remember_previous(self.config, previous)

    def __call__(self, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cache = self._cache(args, kwargs)
        if not isinstance(cache, ForwardedCache):
            return None
        if decoder.config._attn_implementation != NAME:
            raise ValueError(
                f'the model\'s attention was set to "{decoder.config._attn_implementation}" after its compressed cache '
                "was made: call compressed_cache again"
            )
        if cache.signature != self.signature:
            raise ValueError(
                f"this cache was made for another model: expected one for {self.signature}, got one for "
                f"{cache.signature}"
            )
        if kwargs.get("use_cache") is False:
            raise ValueError("use_cache must not be False in a call that brings a compressed cache")
        tokens = _new_tokens(args, kwargs)
        if tokens is not None and tokens.shape[1] == 0:
            raise ValueError(
                "a call must bring at least one new token, got none: for another prompt call cache.reset() first; to "
                "go on, pass the whole text so far, of which at least the last token has not been fed"
            )
        if tokens is not None:
            cache.size_for(tokens.shape[0])
        if kwargs.get("output_attentions") or getattr(decoder.config, "output_attentions", False):
            raise ValueError("output_attentions=True is not supported by a compressed cache: it forms no weights")
        if decoder.training and getattr(decoder, "gradient_checkpointing", False):
            raise ValueError("gradient checkpointing runs layers twice: call model.eval() to use a compressed cache")
        if self.wants_columns:
            _versions.give_columns(args, kwargs, cache.get_seq_length())
        cache.entered = True
        kwargs[CACHE_KEYWORD] = cache
        return args, kwargs

    def _cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for name in _versions.CACHE_ARGUMENTS:
            if kwargs.get(name) is not None:
                return kwargs[name]
        return args[self.position] if len(args) > self.position else None

    def __setstate__(self, state: dict[str, Any]) -> None:  # of copy.deepcopy and pickle
        self.__dict__.update(state)
        remember_previous(self.config, self.previous)


def _new_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Input ids ``[B, T]`` or embeddings ``[B, T, D]`` of a call of a decoder."""
    for given in (args[0] if args else None, kwargs.get("input_ids"), kwargs.get("inputs_embeds")):
        if isinstance(given, Tensor):
            return given
    return None


def switch(model: Any) -> CacheHook:
    """Switch ``model`` to the attention function ``"fastattn"``, unless it is already.

    Raises:
        TypeError, ValueError: it can't be served; then nothing has changed.
    """
    with _SWITCHING:
        return _switched(_find_decoder(model))


def _switched(decoder: Any) -> CacheHook:
    hook = next((h for h in decoder._forward_pre_hooks.values() if isinstance(h, CacheHook)), None)
    implementation = decoder.config._attn_implementation
    fingerprint = _fingerprint(decoder)
    if hook is not None and implementation == NAME and hook.fingerprint == fingerprint:
        return hook
    check_config(decoder.config)
    if hides_values():
        raise ValueError(
            "model must be examined with real tensors: call compressed_cache outside of FakeTensorMode, torch.compile "
            "and torch.export first"
        )
    check_weights(decoder)
    check_spread(decoder)
    new = hook is None
    if hook is None:
        shared = implementation == NAME and was_switched(decoder.config)  # by another model of the same config object
        previous = previous_implementation(decoder.config) if shared else check_implementation(implementation)
        hook = CacheHook(decoder, previous)
        handle = decoder.register_forward_pre_hook(hook, with_kwargs=True)
    elif implementation != NAME:
        hook.previous = check_implementation(implementation)
        remember_previous(decoder.config, hook.previous)
    try:
        decoder.config._attn_implementation = NAME
        hook.spec = _examine(decoder, hook)
    except BaseException:
        decoder.config._attn_implementation = implementation if new else hook.previous
        if new:
            handle.remove()
        raise
    hook.signature = hook.spec.signature
    hook.fingerprint = fingerprint
    return hook


def _find_decoder(model: Any) -> Any:
    if not hasattr(model, "get_decoder") or not hasattr(model, "config"):
        raise TypeError(f"model must be a transformers model with a decoder, got {type(model).__name__}")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{type(model).__name__} is an encoder-decoder: its cross-attention is not supported")
    decoder = model.get_decoder()
    if not _versions.takes_keywords(decoder):
        raise ValueError(
            f"{type(decoder).__name__}.forward takes no further keyword arguments, so its attention does not go "
            "through transformers' attention interface"
        )
    return decoder


def _fingerprint(decoder: nn.Module) -> int:
    """Changes when modules are replaced, converted to another dtype or moved."""
    first = next(decoder.parameters(), None)
    placed = None if first is None else (first.dtype, first.device)
    return hash((tuple(type(module) for module in decoder.modules()), placed))


class _Examination(ForwardedCache):
    """A cache that stores nothing and records the attention calls of a forward pass."""

    def __init__(self, layers: list[Any], signature: str) -> None:
        super().__init__(
            [layer if isinstance(layer, DynamicSlidingWindowLayer) else CompressedLayer(None) for layer in layers],
            signature,
        )
        self.calls: dict[int, list[dict[str, Any]]] = {}

    def attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        arguments: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        call = {"module": module, "query": query, "key": key, "value": value, "mask": attention_mask, **arguments}
        self.calls.setdefault(module.layer_idx, []).append(call)
        if isinstance(self.layers[module.layer_idx], CompressedLayer):
            check_arguments(arguments, "a compressed cache", SERVED_BY_CACHE)
            new_token_mask(attention_mask)
        # All zeros: every position then has the same input in the next layer too.
        rows, heads, tokens, _ = query.shape
        return query.new_zeros(rows, tokens, heads, value.shape[3]), None

    def attend_low_rank(
        self, module: Any, hidden_states: Tensor, position_ids: Tensor | None, attention_mask: Tensor | None
    ) -> Tensor:
        query, key = module.latent_query_and_key(hidden_states, position_ids)
        value = key[..., : module.kv_lora_rank]
        self.attend(module, query, key, value, attention_mask, {"position_ids": position_ids})
        return torch.zeros_like(hidden_states)


def _examine(decoder: Any, hook: CacheHook) -> ModelSpec:
    config, name = decoder.config, type(decoder).__name__
    standard = standard_layers(config)
    low_rank = any(isinstance(module, LowRankAttention) for module in decoder.modules())
    found = None if low_rank else find_rotary(decoder)
    last = min(1000, getattr(config, "max_position_embeddings", None) or 1000) - 1
    cache = _Examination(standard, hook.signature)
    positions = torch.tensor([[0, 1, min(3, last), last]], device="cpu")
    try:
        _run(decoder, hook, cache, positions)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ValueError(
            f"a forward pass of {name} over four tokens with a compressed cache failed ({type(error).__name__}: "
            f"{error}). Layers that use the attention mask themselves, beside transformers' attention interface, are "
            "one cause; the error says whether it is theirs"
        ) from error

    slots: list[int | None] = []
    full: list[dict[str, Any]] = []
    for index, layer in enumerate(cache.layers):
        calls = cache.calls.get(index, [])
        if len(calls) != 1:
            raise ValueError(
                f"layer {index} of {name} made {len(calls)} calls through transformers' attention interface, expected 1"
            )
        if not low_rank and hook.previous == "eager" and eager_attention(calls[0]["module"]) is None:
            raise ValueError(f'{type(calls[0]["module"]).__name__} has no function for attn_implementation="eager"')
        slots.append(len(full) if isinstance(layer, CompressedLayer) else None)
        if isinstance(layer, CompressedLayer):
            full.append(calls[0])
            _check_call(f"layer {index} of {name}", calls[0], positions, rotates=found is not None or low_rank)
    shapes = {_shape_of(call, widths=not low_rank) for call in full}
    if len(shapes) > 1:
        raise ValueError(f"the full-attention layers of {name} differ (heads, dims, dtype, device): {sorted(shapes)}")
    rotary: Rotary | list[Rotary | None] | None
    if low_rank:
        rotary, no_rotary = low_rank_rotary(full), ""
    else:
        rotary, no_rotary = checked_rotary(name, full, positions, found)
    query, key = full[0]["query"], full[0]["key"]
    value_dim = one_or_each([call["value"].shape[3] for call in full])
    return ModelSpec(
        slots=tuple(slots),
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=one_or_each([call["key"].shape[3] for call in full]),
        v_head_dim=value_dim,
        latent_rank=value_dim if low_rank else None,
        rotary=rotary,
        dtype=key.dtype,
        device=key.device,
        no_rotary=no_rotary,
        head_shard=find_shard(full[0]["module"], query.shape[1], key.shape[1], low_rank),
    )


def _run(decoder: Any, hook: CacheHook, cache: _Examination, positions: Tensor) -> None:
    """A forward pass over tokens that differ in their position only, with the model in evaluation mode."""
    table = decoder.get_input_embeddings()
    embedding, device = table.weight, device_of(table)
    if device is None:
        raise ValueError("the model's embedding must be on a device or have a hook that brings it, got the meta device")
    generator = torch.Generator("cpu").manual_seed(0)
    embeds = torch.randn(1, 1, decoder.config.hidden_size, generator=generator, device="cpu")
    dtype = embedding.dtype if embedding.is_floating_point() else torch.get_default_dtype()
    embeds = embeds.expand(-1, positions.shape[1], -1).to(device, dtype)
    training = [module for module in decoder.modules() if module.training]
    decoder.eval()
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):  # the cache's dtype is the weights'
            decoder(
                inputs_embeds=embeds,
                position_ids=positions.to(device),
                use_cache=True,
                **{hook.argument: cache},
            )
    finally:
        for module in training:
            module.training = True


def _shape_of(call: dict[str, Any], widths: bool) -> tuple[Any, ...]:
    key = call["key"]
    dims = (key.shape[3], call["value"].shape[3]) if widths else ()
    return call["query"].shape[1], key.shape[1], *dims, str(key.dtype), str(key.device)


def _check_call(layer: str, call: dict[str, Any], positions: Tensor, rotates: bool) -> None:
    module, seen = call["module"], call.get("position_ids")
    if not getattr(module, "is_causal", True):
        raise ValueError(f"{layer} is not causal: a compressed cache serves causal attention only")
    if call["mask"] is None:
        raise ValueError(f"{layer} makes its attention mask itself, without transformers' mask interface")
    if seen is None and not rotates:
        return  # positions only order the tokens then, and the cache counts them as the model does
    if seen is None or seen.shape != positions.shape or not torch.equal(seen.cpu(), positions):
        if has_several_axes(module.config):
            raise ValueError(
                f"{layer} counts positions on several axes (mrope_section, for images and videos), which is not "
                "supported: a compressed cache knows one position per token"
            )
        raise ValueError(f"{layer} does not pass position_ids [batch, tokens] on to its attention call")
