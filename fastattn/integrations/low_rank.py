"""LowRankAttention where a transformers decoder layer expects its own attention module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastattn.integrations._arguments import CACHE_KEYWORD, check_arguments
from fastattn.modules.low_rank import LowRankAttention, paths
from fastattn.modules.low_rank.absorption import absorbs
from fastattn.validation import checks_values, find_split_row

if TYPE_CHECKING:
    from fastattn.modules.kv_cache import CompressedKVCache


class TransformersAttention(LowRankAttention):
    """:class:`~fastattn.LowRankAttention` with the forward signature of transformers' attention modules.

    It serves calls without a cache, calls with a latent :func:`compressed_cache` and calls with a growing
    ``DynamicCache``, which then holds the latents and rope keys instead of keys and values.

    Args:
        layer_idx: this layer's index in a cache.
        others: see :class:`~fastattn.LowRankAttention`.
    """

    def __init__(self, *args: Any, layer_idx: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.layer_idx = layer_idx
        self.is_causal = True

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """``(output [B, S, hidden], None)``.

        Raises:
            ValueError: attention weights are asked for, a mask that is not causal with padding, packed sequences, or
                a cache of another kind.
        """
        compressed = kwargs.pop(CACHE_KEYWORD, None)
        check_arguments(kwargs, "low-rank attention")
        cache = past_key_values if cache is None else cache
        batch, tokens, _ = hidden_states.shape
        if position_ids is not None:
            position_ids = position_ids.expand(batch, tokens)
        if compressed is None and hasattr(cache, "attend_low_rank"):
            compressed = cache  # layers of some models (StableLM, Nemotron) pass on what they name, not other keywords
        if compressed is not None:
            return compressed.attend_low_rank(self, hidden_states, position_ids, attention_mask), None
        if cache is None:
            mask = padding_mask(attention_mask, batch, tokens, tokens)
            return super().forward(hidden_states, position_ids=position_ids, attention_mask=mask), None
        return self._over_growing_cache(hidden_states, position_ids, attention_mask, cache), None

    def attend_latent_cache(
        self,
        hidden_states: Tensor,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        cache: CompressedKVCache,
        layer: int,
    ) -> Tensor:
        """``[B, S, hidden]`` over layer ``layer`` of a latent ``cache``, by :meth:`LowRankAttention.forward`."""
        return super().forward(
            hidden_states, position_ids=position_ids, attention_mask=attention_mask, cache=cache, layer=layer
        )

    def _over_growing_cache(
        self, hidden_states: Tensor, position_ids: Tensor | None, attention_mask: Tensor | None, cache: Any
    ) -> Tensor:
        kind = type(cache)
        if kind.__name__ != "DynamicCache" or kind.__module__ != "transformers.cache_utils":
            raise ValueError(
                "a low-rank layer needs a DynamicCache or fastattn's compressed_cache(model, ...), "
                f"got {type(cache).__name__}"
            )
        batch, tokens, _ = hidden_states.shape
        real = padding_mask(attention_mask, batch, tokens, _stored(cache, self.layer_idx) + tokens)
        if position_ids is None:
            seen = int(cache.get_seq_length(self.layer_idx))
            position_ids = torch.arange(seen, seen + tokens, device=hidden_states.device).expand(batch, tokens)
        queries = self._queries(hidden_states, position_ids)
        latent, rope_key = (new[:, None] for new in self._latents(hidden_states, position_ids))
        latent, rope_key = cache.update(latent, rope_key, self.layer_idx)
        both = paths.Projected(*queries, latent[:, 0], rope_key[:, 0], position_ids, real)
        first_call = tokens == latent.shape[2]
        few = absorbs(tokens, self.kv_lora_rank, self.qk_nope_head_dim, self.v_head_dim)
        attend = paths.absorbed if few and not first_call else paths.expanded
        out = attend(self.up_projection(), both, self.scale, True)
        # Contiguous: projections of other packages may read raw memory.
        return self.o_proj(out.transpose(1, 2).flatten(2).contiguous())


def _stored(cache: Any, index: int) -> Any:
    """Tokens that a growing cache's layer will put before the next ones."""
    seen = cache.get_seq_length(index)
    window = getattr(cache.layers[index], "sliding_window", None) if index < len(cache.layers) else None
    return seen if window is None else min(seen, window - 1)


def padding_mask(mask: Tensor | None, batch: int, tokens: int, keys: int) -> Tensor | None:
    """Which keys are real, bool ``[B, keys]``, from what transformers passes as a mask; ``None`` if all are.

    The newest query of a row sees every real key, and the mask may say nothing beyond padding and causality. The row of
    a query that is itself padding is all of one value, or it could be a token of another, packed sequence.

    Raises:
        ValueError: it does (looked at in eager mode on a CPU), or it has another shape.
    """
    if mask is None:
        return None
    if mask.dim() == 2 and mask.shape == (batch, keys):
        return _contiguous(mask.bool())
    if mask.dim() != 4 or mask.shape[2] != tokens or mask.shape[3] != keys:
        raise ValueError(
            f"attention_mask must be [batch, keys] or [batch, 1, tokens, keys] with {tokens} tokens and {keys} keys, "
            f"got {list(mask.shape)}"
        )
    visible = (mask if mask.dtype == torch.bool else mask == 0)[:, 0].expand(batch, -1, -1)
    real = visible[:, -1]
    if checks_values(mask):
        causal = torch.ones(tokens, keys, dtype=torch.bool, device=mask.device).tril(keys - tokens)
        as_causal = (visible == (causal & real[:, None])).all(-1)
        uniform = visible.all(-1) | ~visible.any(-1)
        if not bool((as_causal | (uniform & ~real[:, -tokens:])).all()):
            raise ValueError("attention_mask must be causal with padding at either end: no other mask is supported")
    return _contiguous(real)


def _contiguous(real: Tensor) -> Tensor:
    """``real``, unless a row's real tokens have padding between them, as messages padded one by one have."""
    if checks_values(real):
        split = find_split_row(real)
        if split is not None:
            raise ValueError(
                "attention_mask must be causal with padding at either end, got padding between the tokens of row "
                f"{split[0]}"
            )
    return real
