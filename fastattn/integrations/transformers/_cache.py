"""The transformers ``Cache`` around a :class:`~fastattn.CompressedKVCache`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn.integrations._arguments import SERVED_BY_CACHE, check_arguments
from fastattn.integrations.transformers import _versions
from fastattn.integrations.transformers._attention import new_token_mask, previous_attention
from fastattn.integrations.transformers._drafts import limit_drafts
from fastattn.integrations.transformers._layers import CompressedLayer, ForwardedCache, Origin
from fastattn.integrations.transformers._model import CacheHook, ModelSpec, switch
from fastattn.modules.kv_cache import CompressedKVCache
from fastattn.modules.policies import Policy, resolve_policy


def compressed_cache(
    model: Any,
    policy: Policy | str = "key_diff",
    budget: int | Sequence[int] = 1024,
    batch_size: int | None = None,
    interval: int = 128,
    max_step: int = 1,
    dtype: torch.dtype | None = None,
    storage: str | None = None,
) -> CompressedCache:
    """A cache for ``model.generate(..., past_key_values=cache)`` and for forward passes of ``model``.

    The first call for a model examines it with a forward pass over four tokens and switches it to the attention
    function ``"fastattn"``. Calls of the model with another cache, or with none, give what they gave before, to the
    bit. ``model.set_attn_implementation`` switches it back. Give ``generate`` an ``attention_mask``: without one it
    may take a ``pad_token_id`` in the prompt for padding. ``cache.reset()`` makes the cache ready for another prompt.

    Served are causal decoders whose attention goes through transformers' attention interface with rotary embeddings
    (Llama, Mistral, Qwen2, Qwen3, Phi-3 and many others), and models whose attention was replaced by or converted to
    :class:`~fastattn.LowRankAttention`, of which the latents are cached. Sliding-window layers keep transformers' own
    cache.

    Args:
        model: a transformers model.
        policy: a :class:`~fastattn.Policy` or its name, as :class:`~fastattn.CompressedKVCache` takes it.
        budget: tokens kept per row and head of every full-attention layer: one number, or one for each such layer.
        batch_size: rows; with beams or several returned sequences, rows times those. By default what the first call
            after construction or :meth:`CompressedCache.reset` brings.
        interval: decode steps between two compressions.
        max_step: most tokens of a call that counts as a decode step. Above 1 the cache serves assisted decoding, and
            ``generate`` does not compile over it. Drafts are cut to ``max_step - 1`` tokens and end where plain
            decoding would compress, so that the text is plain decoding's.
        dtype: of the cache; must be the dtype of the model's keys, which is the default. Under autocast it may be any:
            queries, keys and values are cast to it.
        storage: ``"int8"``, ``"fp8"`` or ``"int4"`` for quantised keys and values, as in
            :class:`~fastattn.CompressedKVCache`.

    Returns:
        A transformers ``Cache``; its attribute ``kv`` is the :class:`~fastattn.CompressedKVCache`.

    Raises:
        TypeError, ValueError: an argument of another type or range, or a model that cannot be served, and why: no
            rotary embedding, or one whose frequencies change with the length of the text; bidirectional or
            cross-attention; sliding-window layers only; layers that differ, share a cache or are of
            another kind (convolutions, recurrent states). The model is then as it was.
    """
    policy = resolve_policy(policy)
    hook = switched(model)
    spec = hook.spec
    _check_rotation(model, policy, spec)
    kv = CompressedKVCache(
        policy if spec.head_shard is None else spec.head_shard.adapt(policy),
        budget,
        **spec.cache_arguments(),
        batch_size=1 if batch_size is None else batch_size,
        interval=interval,
        max_step=max_step,
        dtype=spec.dtype if dtype is None else dtype,
        storage=storage,
    )
    return CompressedCache(kv, hook, model, sizes_itself=batch_size is None)


def switched(model: Any) -> CacheHook:
    """Let ``model`` serve compressed caches, unless it does; what is known of it then."""
    hook = switch(model)
    limit_drafts(model)
    return hook


def _check_rotation(model: Any, policy: Policy, spec: ModelSpec) -> None:
    """The model has the one rotation that ``policy`` may need."""
    if spec.rotary is None and (policy.needs_rotary or policy.rerotate):
        raise ValueError(
            f"policy must do without the model's rotation, got {policy!r} for {type(model).__name__}: {spec.no_rotary}"
        )


class CompressedCache(ForwardedCache):
    """A transformers cache whose full-attention layers are held, within a budget, by :attr:`kv`.

    Sliding-window layers keep transformers' own cache of their window. :func:`compressed_cache` constructs it.

    Attributes:
        kv: the :class:`~fastattn.CompressedKVCache`; its layer ``i`` is the model's ``i``-th full-attention layer.
        next_logits: logits ``[B, vocabulary]`` after the newest token, where :func:`prefill` fed it; None after any
            other call of the model and any change of the rows.
    """

    def __init__(self, kv: CompressedKVCache, hook: CacheHook, model: Any, sizes_itself: bool = False) -> None:
        spec = hook.spec
        self.kv = kv
        self.next_logits: Tensor | None = None
        self._sizes_itself = sizes_itself
        self._config = hook.config
        self._origin = Origin(model.get_decoder())
        self._slots = spec.slots
        self._last = spec.num_compressed - 1
        super().__init__(self._new_layers(), spec.signature)

    def attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        arguments: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        slot = self._slots[module.layer_idx]
        if slot is None:
            return previous_attention(module)(module, query, key, value, attention_mask, **arguments)
        check_arguments(arguments, "a compressed cache", SERVED_BY_CACHE)
        features = {
            SERVED_BY_CACHE[name]: arguments[name] for name in SERVED_BY_CACHE if arguments.get(name) is not None
        }
        mask, position_ids = new_token_mask(attention_mask), arguments.get("position_ids")
        out = self.kv.attend(
            slot,
            query,
            key,
            value,
            position_ids=position_ids,
            attention_mask=mask,
            scale=arguments.get("scaling"),
            **features,
        )
        if slot == self._last:
            self.entered = False
        return out.transpose(1, 2).contiguous(), None

    def attend_low_rank(
        self, module: Any, hidden_states: Tensor, position_ids: Tensor | None, attention_mask: Tensor | None
    ) -> Tensor:
        slot = self._slots[module.layer_idx]
        mask = new_token_mask(attention_mask)
        out: Tensor = module.attend_latent_cache(hidden_states, position_ids, mask, self.kv, slot)
        if slot == self._last:
            self.entered = False
        return out

    def size_for(self, rows: int) -> None:
        """Take the batch size of a first call, where the constructor was given none.

        Raises:
            ValueError: the cache has another number of rows.
        """
        self.next_logits = None
        if rows == self.batch_size:
            return
        if not self._sizes_itself or int(self.kv.columns) > 0:
            raise ValueError(
                "batch_size must be the rows of every call, with beams or several returned sequences rows times those: "
                f"this cache has {self.batch_size}, got a call of {rows}. Pass compressed_cache(..., batch_size={rows})"
            )
        self._replace(self.kv.select(torch.zeros(rows, dtype=torch.int64, device=self.kv.device)))

    def reset(self) -> None:
        """Empty the cache, in place."""
        self.kv.reset()
        self.next_logits = None
        # Sliding layers start anew: transformers 5.2 resets its own to a window full of zeros.
        self.layers = self._new_layers()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row ``b`` becomes the former row ``beam_idx[b]``."""
        self.kv.reorder(beam_idx)
        self.next_logits = None
        for layer in self._windows():
            layer.reorder_cache(beam_idx)

    def crop(self, tokens: int) -> None:
        """Take back the newest columns, counted as the installed transformers' ``Cache.crop`` counts them.

        Raises:
            ValueError: a compression has run since, or a sliding window has moved on. Nothing changes then.
        """
        removed = _versions.columns_to_crop(int(tokens), int(self.kv.columns))
        for layer in self._windows():
            if removed and layer.get_seq_length() >= layer.sliding_window and not getattr(layer, "record_past", False):
                raise ValueError(
                    f"cannot take back {removed} columns: a sliding-window layer has let go of what came before"
                )
        self.kv.crop(removed)
        if removed:
            self.next_logits = None
        for layer in self._windows():
            layer.crop(-removed)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``; the cache then has another batch size."""
        self._replace(self.kv.select(indices))
        for layer in self._windows():
            layer.batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times; the cache then has another batch size."""
        rows = torch.arange(self.batch_size, device=self.kv.device)
        self._replace(self.kv.select(rows.repeat_interleave(repeats)))
        for layer in self._windows():
            layer.batch_repeat_interleave(repeats)

    def fork(self, indices: Tensor) -> CompressedCache:
        """A new cache of the rows ``indices``, each as often as named; this one stays as it is.

        Args:
            indices: integers ``[N]``, at least one.
        """
        forked = copy.copy(self)
        forked.layers = [
            CompressedLayer(self.kv) if isinstance(layer, CompressedLayer) else copy.deepcopy(layer)
            for layer in self.layers
        ]
        forked.batch_select_indices(indices)
        return forked

    @property
    def batch_size(self) -> int:
        """Rows of the cache."""
        return self.kv.batch_size

    @property
    def has_windows(self) -> bool:
        """Some layers keep a sliding window."""
        return None in self._slots

    @property
    def max_batch_size(self) -> int:
        """Rows of the cache, by transformers' name."""
        return self.batch_size

    def _new_layers(self) -> list[Any]:
        standard = _versions.standard_layers(self._config)
        return [
            layer if slot is None else CompressedLayer(self.kv)
            for slot, layer in zip(self._slots, standard, strict=True)
        ]

    def _windows(self) -> list[Any]:
        return [layer for layer in self.layers if not isinstance(layer, CompressedLayer)]

    def take_kv(self, kv: Any) -> None:
        """Hold the tokens in ``kv``, for as many rows as it has."""
        self._sizes_itself = False
        self._replace(kv)

    def _replace(self, kv: CompressedKVCache) -> None:
        self.kv = kv
        self.next_logits = None
        for layer in self.layers:
            if isinstance(layer, CompressedLayer):
                layer.kv = kv
