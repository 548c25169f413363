"""Low-rank attention modules for tests, and the definition of what they compute, written out token by token."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from fastattn import LowRankAttention
from tests._helpers.draw import normal

# Sizes that differ from each other and from powers of two, so that no mixed-up dim fits by chance.
SMALL: dict[str, Any] = {
    "hidden_size": 40,
    "num_heads": 3,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 7,
}


def small_module(
    seed: int = 0, *, dtype: torch.dtype = torch.float64, spread: float = 0.3, **options: Any
) -> LowRankAttention:
    """A module whose every parameter is random (norms and biases too), large enough for attention to be uneven."""
    module = LowRankAttention(**{**SMALL, **options}, dtype=dtype)
    with torch.no_grad():
        for index, (name, parameter) in enumerate(module.named_parameters()):
            values = normal(*parameter.shape, seed=seed + index, dtype=torch.float64, scale=spread)
            parameter.copy_(1 + values if "layernorm" in name else values)
    return module.eval()


def inputs(batch: int, tokens: int, seed: int = 0, dtype: torch.dtype = torch.float64, hidden: int = 40) -> Tensor:
    return normal(batch, tokens, hidden, seed=1000 + seed, dtype=dtype)


def double(module: LowRankAttention) -> LowRankAttention:
    """The same parameters in float64."""
    return copy.deepcopy(module).double()


def _rotated(vector: Tensor, position: int, inv_freq: Tensor, factor: float, interleave: bool) -> Tensor:
    """One vector ``[..., dr]`` rotated to one position, pair by pair."""
    half = vector.shape[-1] // 2
    out = torch.empty_like(vector)
    for pair in range(half):
        first, second = (2 * pair, 2 * pair + 1) if interleave else (pair, pair + half)
        angle = position * inv_freq[pair].double()
        cos, sin = angle.cos() * factor, angle.sin() * factor
        out[..., first] = vector[..., first] * cos - vector[..., second] * sin
        out[..., second] = vector[..., second] * cos + vector[..., first] * sin
    return out


def defined(module: LowRankAttention, hidden: Tensor, positions: list[int], causal: bool = True) -> Tensor:
    """What a module computes for one row ``[T, hidden]`` without padding, in float64, straight from the definition."""
    p = {name: value.double() for name, value in module.state_dict().items()}
    hidden = hidden.double()
    heads, rank = module.num_heads, module.kv_lora_rank
    nope, value_dim = module.qk_nope_head_dim, module.v_head_dim
    factor, interleave = module.rotary.attention_factor, module.rotary.interleave

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ p[f"{name}.weight"].T + p.get(f"{name}.bias", torch.zeros(()))

    def norm(name: str, x: Tensor) -> Tensor:
        if f"{name}.weight" not in p:
            return x
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * p[f"{name}.weight"]

    queries, keys, values = [], [], []
    for x, position in zip(hidden, positions, strict=True):
        if module.q_lora_rank is None:
            query = linear("q_proj", x)
        else:
            query = linear("q_b_proj", norm("q_a_layernorm", linear("q_a_proj", x)))
        query = query.view(heads, -1)
        down = linear("kv_a_proj_with_mqa", x)
        latent = norm("kv_a_layernorm", down[:rank])
        up = linear("kv_b_proj", latent).view(heads, nope + value_dim)
        shared = _rotated(down[rank:], position, module.inv_freq, factor, interleave).expand(heads, -1)
        rotated = _rotated(query[:, nope:], position, module.inv_freq, factor, interleave)
        queries.append(torch.cat([query[:, :nope], rotated], dim=-1))
        keys.append(torch.cat([up[:, :nope], shared], dim=-1))
        values.append(up[:, nope:])
    rows = []
    for index, query in enumerate(queries):
        seen = index + 1 if causal else len(keys)
        logits = torch.stack([(query * key).sum(-1) for key in keys[:seen]], dim=-1) * module.scale  # [H, seen]
        weighted = torch.softmax(logits, dim=-1)[..., None] * torch.stack(values[:seen], dim=1)
        rows.append(linear("o_proj", weighted.sum(1).flatten()))
    return torch.stack(rows)


def plain(module: LowRankAttention, hidden: Tensor, *, absorbed: bool = False) -> Tensor:
    """What a user of plain PyTorch would write for ``[B, T, hidden]`` at positions 0..T-1, in the module's dtype.

    The yardstick of the error budget: matrix products in the dtype, norms, rotation and softmax in float32.
    """
    p = dict(module.state_dict())
    tokens, dtype, heads = hidden.shape[1], hidden.dtype, module.num_heads
    nope, rank = module.qk_nope_head_dim, module.kv_lora_rank

    def linear(name: str, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))

    def norm(name: str, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * p[f"{name}.weight"].float()).to(dtype)

    def turn(x: Tensor) -> Tensor:  # [B, H, T, dr]
        angle = torch.outer(torch.arange(tokens).float(), module.inv_freq)
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2).to(dtype)

    if module.q_lora_rank is None:
        query = linear("q_proj", hidden)
    else:
        query = linear("q_b_proj", norm("q_a_layernorm", linear("q_a_proj", hidden)))
    query = query.unflatten(-1, (heads, -1)).transpose(1, 2)
    query_nope, query_rope = query[..., :nope], turn(query[..., nope:])
    down = linear("kv_a_proj_with_mqa", hidden)
    latent, rope_key = norm("kv_a_layernorm", down[..., :rank])[:, None], turn(down[:, None, :, rank:])
    up = p["kv_b_proj.weight"].view(heads, -1, rank)
    if absorbed:
        query_nope = query_nope @ up[:, :nope]
        key_nope = value = latent
    else:
        key_nope, value = latent @ up[:, :nope].mT, latent @ up[:, nope:].mT
    scores = (query_nope @ key_nope.mT + query_rope @ rope_key.mT).float() * module.scale
    visible = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    out = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1).to(dtype) @ value
    if absorbed:
        out = out @ up[:, nope:].mT
    return linear("o_proj", out.transpose(1, 2).flatten(2))
