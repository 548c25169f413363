"""One layer's part of a call: what the model brings, and what follows from it for every step of the update."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastattn.modules.kv_cache.state import CallState
from fastattn.validation import fixed, has_autocast, resolve_scale


@dataclass
class NewTokens:
    """The arguments of ``attend`` and ``update``, as given.

    Attributes:
        layer: index of the layer.
        query: ``[B, H, T, Dk]``, None where neither attention nor the policy looks at it.
        key: ``[B, Hkv, T, Dk]``.
        value: ``[B, Hkv, T, Dv]``, None for a latent cache.
        position_ids: integers ``[B, T]`` or ``[1, T]``, None to count.
        attention_mask: bool ``[B, T]``, False for padding.
        scale: softmax scale.
        attend: the attention is wanted as well.
        features: what changes the softmax, by the names of attention's arguments: ``sinks``, ``softcap``,
            ``alibi_slopes``.
    """

    layer: int
    query: Tensor | None
    key: Tensor
    value: Tensor | None
    position_ids: Tensor | None
    attention_mask: Tensor | None
    scale: float | None
    attend: bool
    features: dict[str, Any] = field(default_factory=dict)

    def convert_(self, dtype: torch.dtype) -> None:
        """A mask of integers becomes one of bools and, under autocast, query, key and value take the cache's ``dtype``.

        Under autocast projections come in its dtype, and what was rotated or normed in a wider one.
        """
        mask = self.attention_mask
        if isinstance(mask, Tensor) and not mask.is_floating_point() and not mask.is_complex():
            self.attention_mask = mask.bool()
        key = self.key
        if isinstance(key, Tensor) and has_autocast(key.device.type) and torch.is_autocast_enabled(key.device.type):
            self.query, self.value = _cast(self.query, dtype), _cast(self.value, dtype)
            self.key = self.key.to(dtype) if self.key.is_floating_point() else self.key


def _cast(part: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return part.to(dtype) if isinstance(part, Tensor) and part.is_floating_point() else part


class LayerCall:
    """Lives as long as one layer's part of a call; holds what its steps share.

    Attributes:
        state: the layer and what all layers share.
        query, key, value: the new tokens.
        tokens: how many, padding included.
        mask: bool ``[B, T]``, None where nothing is known to be padding.
        position: int32 ``[B, T]``, -1 at padding.
        scale: softmax scale.
        attend: the attention is wanted as well.
        features: what changes the softmax, by the names of attention's arguments.
        compiling: a graph is being traced, or fake tensors pass.
        on_host: looking at values waits for no device.
        before: int32 ``[B, Hkv]``, the last layer's lengths before the call; None where nothing has been compressed,
            and in the other layers.
    """

    def __init__(self, state: CallState, new: NewTokens, compiling: bool) -> None:
        self.state = state
        self.query, self.key, self.value = new.query, new.key, new.value
        self.attend = new.attend
        self.features = new.features
        self.tokens = new.key.shape[2]
        scale = fixed(new.scale) if compiling and new.scale is not None else new.scale
        self.scale = resolve_scale(scale, state.layer.spec.head_dim)
        self.compiling = compiling
        self.on_host = new.key.device.type == "cpu" and not compiling
        self.before: Tensor | None = None
        self.mask = new.attention_mask
        if self.mask is not None and self.on_host and bool(self.mask.all()):
            self.mask = None
        self.position = self._positions(new.position_ids)

    def _positions(self, position_ids: Tensor | None) -> Tensor:
        if position_ids is None:
            position_ids = self.state.tokens_seen[:, None]
            if self.mask is not None:
                position_ids = position_ids + (self.mask.cumsum(1) - 1)
            elif self.tokens > 1:
                position_ids = position_ids + torch.arange(self.tokens, device=self.key.device)
        rows = self.key.shape[0]
        if position_ids.shape[0] != rows:
            position_ids = position_ids.expand(rows, -1)
        position = position_ids.to(torch.int32)
        return position if self.mask is None else position.masked_fill(~self.mask, -1)

    def real_tokens(self) -> Tensor:
        """Real tokens of each row, int64 ``[B]``."""
        return (self.position >= 0).sum(1)

    def brings_tokens(self) -> Tensor:
        """Whether a row has a real token in this call, bool ``[B, 1]``."""
        return (self.position >= 0).any(1, keepdim=True)

    @property
    def is_step(self) -> bool:
        """The call counts as a decode step."""
        return self.tokens <= self.state.layer.spec.max_step

    def mark_rewritten(self) -> None:
        """From here on, until the call is over, a failure cannot be undone: what is not appended to is rewritten."""
        if not self.compiling:
            self.state.progress.rewritten = True
