"""LowRankAttention: training and decoding on every path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastattn
from benchmarks.lib.result_cases._common import POLICIES, Results, draw, held, short


def _modules() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "plain", {}
    yield "query-rank", {"q_lora_rank": 40}
    yield "half-rotation", {"rope_interleave": False, "bias": True, "q_bias": True}
    yield "no-norm", {"latent_norm": False, "softmax_scale": 0.21}
    yield "frequencies", {"inv_freq": 100.0 ** (-torch.arange(8) / 8)}
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale_all_dim": 0.7}
    yield "yarn", {"rope_scaling": scaling, "q_lora_rank": 40}


def low_rank(results: Results, folder: Path, saved: Path) -> None:
    left = torch.arange(37) >= torch.tensor([0, 11])[:, None]
    for kind, options in _modules():
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            results.prefix = f"low_rank.{kind}.{short(dtype)}."
            torch.manual_seed(0)
            module = fastattn.LowRankAttention(
                96, 4, kv_lora_rank=48, qk_nope_head_dim=24, qk_rope_head_dim=16, v_head_dim=20, dtype=dtype, **options
            )
            results.add("initial", module.state_dict())
            _fill(module)
            for path in (None, True, False):
                for causal in (True, False):
                    for mask in (None, left):
                        _train(
                            results, f"absorb{path}.causal{causal}.mask{mask is not None}", module, path, causal, mask
                        )
                _generate(results, f"absorb{path}", module, path, left)
            torch.save(module.state_dict(), folder / f"{results.prefix}pt")
            module.load_state_dict(torch.load(saved / f"{results.prefix}pt"))
            results.add("loaded", module(draw(1, 9, 96, seed=4, dtype=dtype)))


def _fill(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for seed, (_, parameter) in enumerate(sorted(module.named_parameters())):
            parameter.copy_(draw(*parameter.shape, seed=seed) * 0.15 + (parameter.dim() == 1))


def _train(results: Results, name: str, module: Any, absorb: bool | None, causal: bool, mask: Tensor | None) -> None:
    dtype = next(module.parameters()).dtype
    hidden = draw(2, 37, 96, seed=3, dtype=dtype).requires_grad_()
    module.zero_grad()
    out = module(hidden, absorb=absorb, causal=causal, attention_mask=mask)
    out = out if mask is None else out.masked_fill(~mask[..., None], 0)
    out.backward(draw(*out.shape, seed=5, dtype=dtype))
    results.add(f"train.{name}", (out, hidden.grad))
    results.add(f"train.{name}.grad", {key: parameter.grad for key, parameter in sorted(module.named_parameters())})


def _generate(results: Results, name: str, module: Any, absorb: bool | None, left: Tensor) -> None:
    dtype = next(module.parameters()).dtype
    for policy in POLICIES:
        if absorb is False and policy == "streaming_llm-rerotate":
            continue  # refused: only the absorbed path rotates again
        cache = module.make_cache(POLICIES[policy](), 20, batch_size=2, interval=6)
        with torch.inference_mode():
            for call, tokens in enumerate((37, 12, *(1,) * 14)):
                mask = left if call == 0 else None
                hidden = draw(2, tokens, 96, seed=50 + call, dtype=dtype)
                out = module(hidden, cache=cache, absorb=absorb, attention_mask=mask)
                out = out if mask is None else out.masked_fill(~mask[..., None], 0)
                results.add(f"decode.{name}.{policy}.{call}", out)
            latents = held([cache.keys(0)], cache.lengths(0))
            kept = cache.positions(0), cache.lengths(0), cache.tokens_seen
            results.add(f"decode.{name}.{policy}.cache", (*latents, *kept))
