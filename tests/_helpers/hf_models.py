"""Small random transformers models, one per family, that behave like real ones: attention matters to their tokens."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

_SMALL = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
}

# name -> (architecture, configuration beside _SMALL)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_eager": ("Llama", {"attn_implementation": "eager"}),
    "llama3_rope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "yarn_rope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2_windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "phi3": ("Phi3", {"sliding_window": None, "partial_rotary_factor": 0.5}),
    "phi": ("Phi", {}),
    "gemma3": (
        "Gemma3",
        {"head_dim": 16, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "cohere": ("Cohere", {}),
    "gemma2": (  # soft caps, in two layers of which one has a window
        "Gemma2",
        {"head_dim": 16, "sliding_window": 16, "attn_logit_softcapping": 2.0, "attn_implementation": "eager"},
    ),
    "gpt_oss": (  # learned sinks
        "GptOss",
        {"head_dim": 16, "sliding_window": 16, "num_local_experts": 2, "num_experts_per_tok": 1}
        | {"attn_implementation": "eager"},
    ),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0], "use_sliding_window": False}),  # a layer without rotation
    "cohere2": (  # full attention without rotation
        "Cohere2",
        {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}


def make_model(family: str, **changes: Any) -> Any:
    """A model of ``family`` in evaluation mode, the same every time, whose generation never stops by itself."""
    architecture, own = FAMILIES[family]
    return make_causal_lm(architecture, **{**own, **changes})


def make_causal_lm(architecture: str, **changes: Any) -> Any:
    """A small random ``<architecture>ForCausalLM``."""
    options = {**_SMALL, **changes}
    implementation = options.pop("attn_implementation", None)
    config_name = "Gemma3TextConfig" if architecture == "Gemma3" else f"{architecture}Config"
    config = getattr(transformers, config_name)(**options)
    if implementation is not None:
        config._attn_implementation = implementation
    torch.manual_seed(0)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def distinct_tokens(rows: int, columns: int) -> Tensor:
    """Token ids ``[rows, columns]``; no row holds one twice, so that no two tokens of a layer are alike to a policy."""
    generator = torch.Generator().manual_seed(2)
    return torch.stack([3 + torch.randperm(97, generator=generator)[:columns] for _ in range(rows)])


def ragged_prompt(
    lengths: tuple[int, ...] = (40, 27, 14), columns: int = 40, side: str = "left"
) -> tuple[Tensor, Tensor]:
    """Token ids and mask ``[B, columns]``, rows of ``lengths`` real tokens, padded with token 0."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 100, (len(lengths), columns), generator=generator)
    column = torch.arange(columns)
    length = torch.tensor(lengths)[:, None]
    mask = (column >= columns - length) if side == "left" else (column < length)
    return ids.masked_fill(~mask, 0), mask.long()
