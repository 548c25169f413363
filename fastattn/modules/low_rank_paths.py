"""The paths of a low-rank attention layer: expanded or absorbed, without a cache or over one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fastattn.modules import low_rank_absorb as absorbing
from fastattn.ops import attention, merge_attention

if TYPE_CHECKING:
    from fastattn.modules.kv_cache import CompressedKVCache
    from fastattn.modules.low_rank import LowRankAttention

EXPANDED_SLOTS = 4096  # cached tokens expanded at a time: bounds the memory of a prefill over a long cache


class Projected(NamedTuple):
    """What a layer makes of its new tokens."""

    query_nope: Tensor  # [B, H, T, dn]
    query_rope: Tensor  # [B, H, T, dr], rotated
    latent: Tensor  # [B, T, R], normed
    rope_key: Tensor  # [B, T, dr], rotated, shared by all heads
    position_ids: Tensor  # int [B, T]
    mask: Tensor | None  # bool [B, T], False for padding

    @property
    def query(self) -> Tensor:
        """``[B, H, T, dn + dr]``"""
        return torch.cat([self.query_nope, self.query_rope], dim=-1)

    @property
    def latent_key(self) -> Tensor:
        """The row of a latent cache, as one key/value head: ``[B, 1, T, R + dr]``."""
        return torch.cat([self.latent, self.rope_key], dim=-1)[:, None]

    def span(self) -> tuple[Tensor | None, Tensor | None]:
        """Start and end of every row's real tokens, int32 ``[B]``; None without a mask."""
        if self.mask is None:
            return None, None
        index = torch.arange(1, self.mask.shape[1] + 1, dtype=torch.int32, device=self.mask.device)
        end = torch.where(self.mask, index, 0).amax(1)
        return end - self.mask.sum(1, dtype=torch.int32), end


def expanded(module: LowRankAttention, new: Projected, causal: bool) -> Tensor:
    """Training and prefill: full keys and values. -> ``[B, H, T, dv]``"""
    key, value = _expand(module, new.latent, new.rope_key)
    start, end = new.span()
    out = attention(new.query, key, value, causal=causal, scale=module.scale, key_start=start, lengths=end)
    assert isinstance(out, Tensor)
    return out


def absorbed(module: LowRankAttention, new: Projected, causal: bool) -> Tensor:
    """The same over one key/value head of ``R + dr`` dims, whose value is the latent."""
    query, value_up = absorb(module, new)
    start, end = new.span()
    value = new.latent[:, None]
    out = attention(query, new.latent_key, value, causal=causal, scale=module.scale, key_start=start, lengths=end)
    assert isinstance(out, Tensor)
    return absorbing.expand_output(out, value_up)


def absorbed_over_cache(module: LowRankAttention, new: Projected, cache: CompressedKVCache, layer: int) -> Tensor:
    """Decoding: the cache attends, appends and compresses."""
    query, value_up = absorb(module, new)
    out = cache.attend(
        layer,
        query,
        new.latent_key,
        None,
        position_ids=new.position_ids,
        attention_mask=new.mask,
        scale=module.scale,
    )
    return absorbing.expand_output(out, value_up)


def expanded_over_cache(module: LowRankAttention, new: Projected, cache: CompressedKVCache, layer: int) -> Tensor:
    """A prompt or a long chunk: cached tokens and new ones expanded in turn, merged by their log-sum-exps."""
    query = new.query
    key, value = _expand(module, new.latent, new.rope_key)
    start, end = new.span()
    parts = [_part(query, key, value, module.scale, end, start, causal=True)]
    buffer, stored = cache.keys(layer)[:, 0], cache.lengths(layer)[:, 0]
    # A graph can't depend on how full the cache is; eager mode skips what is empty, all of it at the first prompt.
    slots = buffer.shape[1] if torch.compiler.is_compiling() else int(stored.max())
    for first in range(0, slots, EXPANDED_SLOTS):
        block = buffer[:, first : min(first + EXPANDED_SLOTS, slots)]
        key, value = _expand(module, block[..., : module.kv_lora_rank], block[..., module.kv_lora_rank :])
        valid = (stored - first).clamp(0, block.shape[1])
        parts.append(_part(query, key, value, module.scale, valid))
    outs, lses = zip(*parts, strict=True)
    out = outs[0] if len(parts) == 1 else merge_attention(outs, lses)[0]
    seen_by_policy = absorb(module, new)[0] if cache.needs_queries else None
    cache.update(
        layer,
        seen_by_policy,
        new.latent_key,
        None,
        position_ids=new.position_ids,
        attention_mask=new.mask,
        scale=module.scale,
    )
    return out


def _part(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    end: Tensor | None,
    start: Tensor | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    out, lse = attention(query, key, value, causal=causal, scale=scale, key_start=start, lengths=end, return_lse=True)
    return out, lse


def _expand(module: LowRankAttention, latent: Tensor, rope_key: Tensor) -> tuple[Tensor, Tensor]:
    return absorbing.expand_latent(module.kv_b_proj, latent, rope_key, module.num_heads, module.qk_nope_head_dim)


def absorb(module: LowRankAttention, new: Projected) -> tuple[Tensor, Tensor]:
    """The query ``[B, H, T, R + dr]`` as a latent cache sees it, and ``W_UV [H, dv, R]``."""
    weight = absorbing.up_weight(module.kv_b_proj, module.kv_lora_rank, new.query_nope)
    key_up, value_up = absorbing.split_heads(weight, module.num_heads, module.qk_nope_head_dim)
    return torch.cat([absorbing.absorb_query(new.query_nope, key_up), new.query_rope], dim=-1), value_up
