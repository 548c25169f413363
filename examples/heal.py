"""Heal a converted SmolLM2: a short training of its attention wins back loss that the conversion cost.

    python -m examples.heal --rank 128 --rope-dims 32 --minutes 30 --output healed
    python -m examples.heal --norm --minutes 30 --output healed --export deepseek   # exports to DeepSeek-V3's layout

The recipe, in plain PyTorch: only attention is trained (the rest of the model is what it was and stays frozen), AdamW,
a short warm-up and a linear decay over the time given, on text disjoint from the held-out text. With ``--distill`` the
loss is the divergence from the original's predictions, mixed with the usual next-token loss. ``--norm`` first puts
RMSNorms on the latents, as DeepSeek-V3's layout requires, and converts with its evenly spaced rotary frequencies.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples import smollm2
from examples.convert_model import split_text
from fastattn import LowRankAttention, LowRankConfig, to_low_rank_
from fastattn.convert import add_latent_norm_, export_deepseek_v3, held_out_loss, save_low_rank


def attention_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Freeze everything but the converted attention, and return its parameters."""
    model.requires_grad_(False)
    chosen = [p for m in model.modules() if isinstance(m, LowRankAttention) for p in m.parameters()]
    for parameter in chosen:
        parameter.requires_grad_(True)
    return chosen


def training_loss(logits: Tensor, ids: Tensor, teacher: Tensor | None, share: float) -> Tensor:
    """Next-token loss, or ``share`` of the divergence from ``teacher``'s predictions and the rest of it."""
    logits = logits.flatten(0, 1).float()
    labels = functional.pad(ids[:, 1:], (0, 1), value=-100).flatten()
    loss = functional.cross_entropy(logits, labels)
    if teacher is None:
        return loss
    target = teacher.flatten(0, 1).float().log_softmax(-1)
    divergence = functional.kl_div(logits.log_softmax(-1), target, log_target=True, reduction="batchmean")
    return share * divergence + (1 - share) * loss


def heal(
    model: Any,
    text: Tensor,
    *,
    minutes: float,
    steps: int | None = None,
    teacher: Any = None,
    distill: float = 0.5,
    rate: float = 3e-4,
    batch_size: int = 2,
    compiled: bool = False,
) -> int:
    """Train ``model``'s attention on ``text [N, S]`` for ``minutes`` or ``steps``; how many were taken."""
    parameters = attention_parameters(model)
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    forward = torch.compile(model) if compiled else model
    generator = torch.Generator().manual_seed(0)
    started, step, warm_up = time.perf_counter(), 0, 5
    model.train()
    while step != steps and (spent := (time.perf_counter() - started) / (60 * minutes)) < 1:
        if steps is not None:
            spent = step / steps
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / warm_up) * (1 - 0.9 * spent)
        ids = text[torch.randint(len(text), (batch_size,), generator=generator)]
        target = None
        if teacher is not None:
            with torch.no_grad():
                target = teacher(input_ids=ids, use_cache=False).logits
        loss = training_loss(forward(input_ids=ids, use_cache=False).logits, ids, target, distill)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        if step % 10 == 1:
            print(f"step {step}: loss {float(loss.detach()):.4f}, {spent * minutes:.1f} min", flush=True)
    model.eval()
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=128, help="kv_lora_rank")
    parser.add_argument("--rope-dims", type=int, default=32, help="qk_rope_head_dim")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--calibration-tokens", type=int, default=8192)
    parser.add_argument("--held-out-tokens", type=int, default=4096)
    parser.add_argument("--distill", type=float, default=0.5, help="share of the distillation loss, 0 for none")
    parser.add_argument("--compile", action="store_true", help="compile the model")
    parser.add_argument("--norm", action="store_true", help="train with norms on the latents")
    parser.add_argument("--output", type=Path, help="save the healed model there")
    parser.add_argument("--export", type=Path, help="write it in DeepSeek-V3's layout there (needs --norm)")
    arguments = parser.parse_args()
    if arguments.export and not arguments.norm:
        parser.error("--export needs --norm")

    original, tokenizer = smollm2.load()
    text, held_out = split_text(tokenizer, 10**9, arguments.held_out_tokens, arguments.length)
    spread = max(1, arguments.calibration_tokens // arguments.length)
    calibration = text[torch.linspace(0, len(text) - 1, spread).round().long()]
    model = copy.deepcopy(original)
    even = {"rope_selection": "uniform", "freq_fold": model.config.head_dim // arguments.rope_dims}
    config = LowRankConfig(
        kv_lora_rank=arguments.rank,
        qk_rope_head_dim=arguments.rope_dims,
        statistics="parallel",
        **(even if arguments.norm else {}),
    )
    report = to_low_rank_(model, config, calibration, held_out)
    print(report)
    before, start = report.loss_before, report.loss_after
    if arguments.norm:
        add_latent_norm_(model, calibration)
        start = held_out_loss(model, held_out)
        print(f"held-out loss with norms on the latents: {start:.4f}")
    steps = heal(
        model,
        text,
        minutes=arguments.minutes,
        teacher=original if arguments.distill else None,
        distill=arguments.distill,
        rate=arguments.rate,
        batch_size=arguments.batch_size,
        compiled=arguments.compile,
    )
    after = held_out_loss(model, held_out)
    regained = (start - after) / (start - before)
    print(f"original {before:.4f}, converted {start:.4f}, healed {after:.4f}: {regained:.0%} won back in {steps} steps")
    if arguments.output:
        save_low_rank(model, arguments.output)
    if arguments.export:
        export_deepseek_v3(model, arguments.export)


if __name__ == "__main__":
    main()
