"""Multi-head latent attention by its definition, in float64, from a dict of LowRankAttention's parameters."""

from __future__ import annotations

import torch
from torch import Tensor


def latent_attention(state: dict[str, Tensor], arguments: dict, inv_freq: Tensor, hidden: Tensor, heads: int) -> Tensor:
    """Causal attention of one sequence ``[S, hidden]`` from position 0; pairs interleaved, no norms."""
    tokens = hidden.shape[0]
    rank, nope, rope, value = (
        arguments[name] for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )

    def linear(name: str, inputs: Tensor) -> Tensor:
        out = inputs @ state[f"{name}.weight"].T
        return out + state[f"{name}.bias"] if f"{name}.bias" in state else out

    angle = torch.outer(torch.arange(tokens, dtype=torch.float64), inv_freq.double())
    turn = torch.polar(torch.ones_like(angle), angle)

    def rotate(rows: Tensor) -> Tensor:
        pairs = torch.view_as_complex(rows.reshape(*rows.shape[:-1], -1, 2).contiguous())
        shape = (tokens, *[1] * (pairs.dim() - 2), pairs.shape[-1])
        return torch.view_as_real(pairs * turn.view(shape)).flatten(-2)

    low_rank_query = arguments["q_lora_rank"] is not None
    query = linear("q_b_proj", linear("q_a_proj", hidden)) if low_rank_query else linear("q_proj", hidden)
    query_nope, query_rope = query.view(tokens, heads, nope + rope).split([nope, rope], dim=-1)
    latent, key_rope = linear("kv_a_proj_with_mqa", hidden).split([rank, rope], dim=-1)
    key_nope, values = linear("kv_b_proj", latent).view(tokens, heads, nope + value).split([nope, value], dim=-1)
    scores = torch.einsum("qhd,khd->hqk", query_nope, key_nope)
    scores = scores + torch.einsum("qhd,kd->hqk", rotate(query_rope), rotate(key_rope))
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    weights = (scores * (nope + rope) ** -0.5).masked_fill(future, -torch.inf).softmax(-1)
    return linear("o_proj", torch.einsum("hqk,khd->qhd", weights, values).reshape(tokens, -1))
