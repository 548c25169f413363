"""Tiny transformers models over compressed caches, converted, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fastattn
from benchmarks.lib.result_cases._common import POLICIES, Results, draw


def tiny(name: str) -> Any:
    """A tiny transformers model with drawn weights."""
    import transformers

    sizes = {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": None,
        "pad_token_id": 0,
    }  # fmt: skip
    if name == "DeepseekV3":
        sizes |= {
            "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 2, "n_routed_experts": 4,
            "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        }  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes)).eval()
    with torch.no_grad():
        for seed, (_, parameter) in enumerate(sorted(model.named_parameters())):
            parameter.copy_(draw(*parameter.shape, seed=seed) * 0.1 + (parameter.dim() == 1))
    return model


def generation(results: Results, folder: Path, saved: Path) -> None:
    from fastattn.integrations.transformers import replace_attention_

    for name in ("Llama", "Qwen2", "Qwen3", "DeepseekV3"):
        model = tiny(name)
        if name == "DeepseekV3":
            replace_attention_(model)
        for policy in POLICIES:
            results.prefix = f"transformers.{name}.{policy}."
            _over_cache(results, model, POLICIES[policy])


def _over_cache(results: Results, model: Any, policy: Callable[[], Any]) -> None:
    from fastattn.integrations.transformers import compressed_cache, prefill

    tokens = torch.randint(1, 128, (2, 60), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[1, :17] = 0
    cache = compressed_cache(model, policy(), budget=24, batch_size=2, interval=8)
    settings = {"max_new_tokens": 20, "output_logits": True, "return_dict_in_generate": True, "do_sample": False}
    found = model.generate(tokens, attention_mask=mask, past_key_values=cache, **settings)
    results.add("greedy", (found.sequences, torch.stack(found.logits)))
    results.add("greedy.cache", (cache.kv.positions(1), cache.kv.lengths(1), cache.kv.tokens_seen))
    beams = compressed_cache(model, policy(), budget=24, batch_size=4, interval=8)
    found = model.generate(tokens, attention_mask=mask, past_key_values=beams, num_beams=2, **settings)
    results.add("beams", (found.sequences, torch.stack(found.logits)))
    cache.reset()
    results.add("prefill", prefill(model, tokens, cache, chunk_size=16))


def conversion(results: Results, folder: Path, saved: Path) -> None:
    from fastattn.convert import load_low_rank, save_low_rank

    calibration = torch.randint(128, (8, 48), generator=torch.Generator().manual_seed(2))
    methods: dict[str, dict[str, Any]] = {
        "loss_optimal": {"kv_lora_rank": 40, "qk_rope_head_dim": 8},
        "plain_svd": {"kv_lora_rank": 40, "qk_rope_head_dim": 8, "method": "plain_svd", "q_lora_rank": 32},
        "uniform": {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "rope_selection": "uniform", "freq_fold": 2},
        "full": {"kv_lora_rank": None, "qk_rope_head_dim": None},
    }
    for name in ("Llama", "Qwen2"):
        for method, options in methods.items():
            results.prefix = f"convert.{name}.{method}."
            model = tiny(name)
            config = fastattn.LowRankConfig(**options)
            report = fastattn.to_low_rank_(model, config, calibration=calibration, progress=False)
            measured = ("seconds", "peak_memory_bytes")
            results.add("report", {key: value for key, value in report.as_dict().items() if key not in measured})
            results.add("state", model.state_dict())
            with torch.no_grad():
                results.add("logits", model(calibration[:2]).logits)
            save_low_rank(model, folder / f"{name}-{method}")
            loaded = load_low_rank(saved / f"{name}-{method}")
            results.add("loaded", loaded.state_dict())
            for policy in POLICIES if method == "uniform" else ("knorm", "key_diff", "streaming_llm"):
                results.prefix = f"convert.{name}.{method}.{policy}."
                _over_cache(results, loaded, POLICIES[policy])
