"""The paths of a low-rank attention layer: expanded or absorbed, without a cache or over one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fastattn.ops import attention, dequantize, merge_attention
from fastattn.validation import autocasts, hides_values

if TYPE_CHECKING:
    from fastattn.modules.kv_cache import CompressedKVCache
    from fastattn.modules.low_rank.absorption import UpProjection

EXPANDED_SLOTS = 4096  # cached tokens expanded at a time: bounds the memory of a prefill over a long cache


class Projected(NamedTuple):
    """The projections of a layer's new tokens."""

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


def expanded(up: UpProjection, new: Projected, scale: float, causal: bool) -> Tensor:
    """Training and prefill: full keys and values. -> ``[B, H, T, dv]``"""
    key, value = up.expand(new.latent, new.rope_key)
    start, end = new.span()
    out = attention(new.query, key, value, causal=causal, scale=scale, key_start=start, lengths=end)
    assert isinstance(out, Tensor)
    return out


def absorbed(up: UpProjection, new: Projected, scale: float, causal: bool) -> Tensor:
    """The same over one key/value head of ``R + dr`` dims, whose value is the latent."""
    query = absorbed_query(up, new)
    start, end = new.span()
    value = new.latent[:, None]
    out = attention(query, new.latent_key, value, causal=causal, scale=scale, key_start=start, lengths=end)
    assert isinstance(out, Tensor)
    return up.output(out)


def absorbed_over_cache(up: UpProjection, new: Projected, scale: float, cache: CompressedKVCache, layer: int) -> Tensor:
    """Decoding: the cache attends, appends and compresses."""
    query = absorbed_query(up, new)
    out = cache.attend(
        layer,
        query,
        new.latent_key,
        None,
        position_ids=new.position_ids,
        attention_mask=new.mask,
        scale=scale,
    )
    return up.output(out)


def expanded_over_cache(up: UpProjection, new: Projected, scale: float, cache: CompressedKVCache, layer: int) -> Tensor:
    """A prompt or a long chunk: cached tokens and new ones expanded in turn, merged by their log-sum-exps."""
    query = new.query
    key, value = up.expand(new.latent, new.rope_key)
    start, end = new.span()
    parts = [_part(query, key, value, scale, end, start, causal=True)]
    buffer, stored = cache.keys(layer)[:, 0], cache.lengths(layer)[:, 0]
    scale_of_slots = None if cache.storage is None else cache.scales(layer)[0][:, 0]
    # A graph can't depend on how full the cache is; eager mode skips what is empty, all of it at the first prompt.
    slots = buffer.shape[1] if hides_values() or buffer.is_meta else int(stored.max())
    for first in range(0, slots, EXPANDED_SLOTS):
        block = buffer[:, first : min(first + EXPANDED_SLOTS, slots)]
        if scale_of_slots is not None:
            block = dequantize(block, scale_of_slots[:, first : first + block.shape[1]], new.latent.dtype)
        key, value = up.expand(block[..., : up.rank], block[..., up.rank :])
        valid = (stored - first).clamp(0, block.shape[1])
        parts.append(_part(query, key, value, scale, valid))
    outs, lses = zip(*parts, strict=True)
    out = outs[0] if len(parts) == 1 else merge_attention(outs, lses)[0]
    seen_by_policy = absorbed_query(up, new) if cache.needs_queries else None
    cache.update(
        layer,
        seen_by_policy,
        new.latent_key,
        None,
        position_ids=new.position_ids,
        attention_mask=new.mask,
        scale=scale,
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
    if autocasts(query.device.type):  # what was rotated, normed or cached may be wider than the rest
        narrow = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(narrow), key.to(narrow), value.to(narrow)
    out, lse = attention(query, key, value, causal=causal, scale=scale, key_start=start, lengths=end, return_lse=True)
    return out, lse


def absorbed_query(up: UpProjection, new: Projected) -> Tensor:
    """The query as a latent cache sees it: ``[B, H, T, R + dr]``."""
    return torch.cat([up.absorb(new.query_nope), new.query_rope], dim=-1)
