"""Small rotary decoders over the task's words: grouped-query attention, or low-rank attention with either kind of
query.

Plain PyTorch, of the library's own parts; the one with grouped queries has the layout of transformers' Llama and is
exported as such (:func:`export`), so that the study's harness for any model runs on it too.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.studies.reasoning import problems
from fastattn import CompressedKVCache, LowRankAttention, Policy, Rotary
from fastattn.ops import attention

KINDS = ("gqa", "low_rank", "low_rank_query")
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP = 4, 128, 4, 2, 32, 384
RANK, ROPE_DIM, QUERY_RANK = 48, 16, 64
THETA = 10000.0


class GroupedQueryAttention(nn.Module):
    """Causal attention of ``HEADS`` query heads over ``KV_HEADS``, rotated."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.rotary = Rotary(THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))

    def forward(self, x: Tensor, cache: CompressedKVCache | None, layer: int) -> Tensor:
        batch, tokens, _ = x.shape
        position = torch.arange(tokens).expand(batch, tokens)
        if cache is not None:
            position = position + cache.tokens_seen[:, None]
        query, key, value = (
            proj(x).view(batch, tokens, -1, HEAD_DIM).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = self.rotary.rotate(query, position), self.rotary.rotate(key, position)
        out = attention(query, key, value, causal=True) if cache is None else cache.attend(layer, query, key, value)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class LatentAttention(nn.Module):
    """:class:`fastattn.LowRankAttention` at this model's size."""

    def __init__(self, query_rank: int | None) -> None:
        super().__init__()
        self.inner = LowRankAttention(
            HIDDEN,
            HEADS,
            q_lora_rank=query_rank,
            kv_lora_rank=RANK,
            qk_nope_head_dim=HEAD_DIM,
            qk_rope_head_dim=ROPE_DIM,
            v_head_dim=HEAD_DIM,
        )

    def forward(self, x: Tensor, cache: CompressedKVCache | None, layer: int) -> Tensor:
        return self.inner(x, cache=cache, layer=layer)


class Block(nn.Module):
    """Attention and a gated MLP, each behind a norm."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(HIDDEN, 1e-6), nn.RMSNorm(HIDDEN, 1e-6)
        query_rank = QUERY_RANK if kind == "low_rank_query" else None
        self.self_attn = GroupedQueryAttention() if kind == "gqa" else LatentAttention(query_rank)
        self.gate_proj, self.up_proj = nn.Linear(HIDDEN, MLP, bias=False), nn.Linear(HIDDEN, MLP, bias=False)
        self.down_proj = nn.Linear(MLP, HIDDEN, bias=False)

    def forward(self, x: Tensor, cache: CompressedKVCache | None, layer: int) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cache, layer)
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(functional.silu(self.gate_proj(y)) * self.up_proj(y))


class Reasoner(nn.Module):
    """A decoder over the words of :mod:`problems`; ``forward`` gives logits ``[B, T, words]``."""

    def __init__(self, kind: str, layers: int = LAYERS) -> None:
        super().__init__()
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
        self.kind = kind
        self.embed_tokens = nn.Embedding(len(problems.WORDS), HIDDEN)
        self.layers = nn.ModuleList(Block(kind) for _ in range(layers))
        self.norm = nn.RMSNorm(HIDDEN, 1e-6)
        self.lm_head = nn.Linear(HIDDEN, len(problems.WORDS), bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2 and "inner" not in name:
                nn.init.normal_(parameter, std=0.02 if "embed" in name else parameter.shape[1] ** -0.5)

    def forward(self, ids: Tensor, cache: CompressedKVCache | None = None, last_only: bool = False) -> Tensor:
        x = self.embed_tokens(ids)
        for layer, block in enumerate(self.layers):
            x = block(x, cache, layer)
        return self.lm_head(self.norm(x[:, -1:] if last_only else x))

    def make_cache(self, policy: str | Policy, budget: int, batch_size: int, interval: int) -> CompressedKVCache:
        """A cache of all layers, for this model's kind of attention."""
        first = self.layers[0].self_attn
        settings = {"num_layers": len(self.layers), "batch_size": batch_size, "interval": interval}
        if isinstance(first, LatentAttention):
            return first.inner.make_cache(policy, budget, **settings)
        return CompressedKVCache(
            policy, budget, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, rotary=first.rotary, **settings
        )


def export(model: Reasoner, folder: Path) -> None:
    """Save the grouped-query model as transformers' ``LlamaForCausalLM``, with a tokenizer of one token per word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    if model.kind != "gqa":
        raise ValueError(f"model must be of kind 'gqa' to be exported as a Llama, got {model.kind!r}")
    config = LlamaConfig(
        vocab_size=len(problems.WORDS),
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=len(model.layers),
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=4096,
        rope_theta=THETA,
        tie_word_embeddings=False,
        rms_norm_eps=1e-6,
        bos_token_id=None,
        eos_token_id=problems.INDEX["end"],
        pad_token_id=problems.INDEX["pad"],
    )
    llama = LlamaForCausalLM(config)
    weights = {}
    for name, value in model.state_dict().items():
        if "rotary" in name:
            continue
        for part in ("gate_proj", "up_proj", "down_proj"):
            name = name.replace(f".{part}", f".mlp.{part}")
        weights[name if name.startswith("lm_head") else f"model.{name}"] = value
    llama.load_state_dict(weights)
    llama.save_pretrained(folder)
    words = Tokenizer(models.WordLevel(dict(problems.INDEX), unk_token="pad"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="end", pad_token="pad", unk_token="pad").save_pretrained(
        folder
    )
