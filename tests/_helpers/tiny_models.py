"""Small random transformers models of every family that can be converted."""

from __future__ import annotations

from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "llama-wide-heads-and-biases": ("Llama", {"head_dim": 24, "attention_bias": True}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "phi3": ("Phi3", {"sliding_window": None}),
    "phi3-partial-rotary": ("Phi3", {"sliding_window": None, "rope_parameters": PARTIAL}),
}


def tiny_model(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model whose attention is far from uniform, biases and norms random too, in evaluation mode."""
    name, options = FAMILIES.get(family, (family, {}))
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **options, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.15 if parameter.dim() > 1 else 1 + 0.2 * noise)
    return model.to(dtype).eval()


def token_ids(sequences: int, tokens: int, *, seed: int = 0, vocabulary: int = 96) -> torch.Tensor:
    """Random ids, the special ones left out."""
    return torch.randint(3, vocabulary, (sequences, tokens), generator=torch.Generator().manual_seed(seed))


def logits(model: Any, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """The model's logits, without a cache."""
    with torch.no_grad():
        return model(ids, use_cache=False, **kwargs).logits
