"""One attention layer as plain float64 matrices, whatever the model it came from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor


@dataclass(frozen=True)
class AttentionWeights:
    """Projections of a rotary attention layer; the last column of each matrix is its bias (zeros without one).

    ``query [H d, hidden+1]``, ``key [Hkv d, hidden+1]``, ``value [Hkv dv, hidden+1]``, ``output [hidden, H dv + 1]``,
    all float64 on one device. RoPE rotates the pairs ``(i, i + F)`` of each head, ``i < F = len(inv_freq)``, by
    ``position * inv_freq[i]`` and multiplies them by ``attention_factor``; further dims carry no position. Scores are
    multiplied by ``scale``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    inv_freq: Tensor
    scale: float
    attention_factor: float = 1.0
    query_bias: bool = False
    kv_bias: bool = False
    output_bias: bool = False

    @property
    def hidden_size(self) -> int:
        return self.output.shape[0]

    @property
    def max_rope_dim(self) -> int:
        """Rope dims of all key heads side by side."""
        return 2 * self.num_kv_heads * self.inv_freq.numel()

    @property
    def cached_values(self) -> int:
        """Values cached per token by the original."""
        return self.num_kv_heads * (self.head_dim + self.v_head_dim)

    def attend(self, hidden_states: Tensor) -> Tensor:
        """Causal attention of one sequence ``[S, hidden]`` from position 0, by the definition, in float64."""
        tokens = hidden_states.shape[0]
        inputs = torch.cat([hidden_states.to(self.query), self.query.new_ones(tokens, 1)], dim=1)
        query = self._rotate(rearrange(inputs @ self.query.T, "s (h d) -> s h d", h=self.num_heads))
        key = self._rotate(rearrange(inputs @ self.key.T, "s (h d) -> s h d", h=self.num_kv_heads))
        value = rearrange(inputs @ self.value.T, "s (h d) -> s h d", h=self.num_kv_heads)
        group = self.num_heads // self.num_kv_heads
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * self.scale
        future = torch.ones(tokens, tokens, dtype=torch.bool, device=scores.device).triu(1)
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), value)
        return rearrange(mixed, "s h d -> s (h d)") @ self.output[:, :-1].T + self.output[:, -1]

    def _rotate(self, heads: Tensor) -> Tensor:
        count = self.inv_freq.numel()
        position = torch.arange(heads.shape[0], dtype=torch.float64, device=heads.device)
        angle = torch.outer(position, self.inv_freq.double())[:, None, :]
        cos, sin = angle.cos() * self.attention_factor, angle.sin() * self.attention_factor
        first, second, rest = heads.split([count, count, self.head_dim - 2 * count], dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
