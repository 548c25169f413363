"""Training a :class:`~benchmarks.studies.reasoning.model.Reasoner` from scratch, compiled and resumable."""

from __future__ import annotations

import csv
import math
import os
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from benchmarks.studies.reasoning import problems
from benchmarks.studies.reasoning.model import Reasoner

Optimizers = tuple[torch.optim.Optimizer, torch.optim.Optimizer]
HELD_OUT = 1_000_000_000  # seeds from here on are never trained on


@dataclass(frozen=True)
class Setting:
    """What is trained: difficulty, length of the run, and everything that is drawn."""

    steps: int = 3000
    chain: int = 16
    distractors: int = 16
    tokens_per_step: int = 8192
    learning_rate: float = 0.02  # of matrices, by Muon
    adam_learning_rate: float = 3e-3  # of embeddings, the last projection and norms
    layers: int = 4
    seed: int = 0
    compiled: bool = True


QUICK = Setting(steps=200, chain=3, distractors=3, tokens_per_step=2048, layers=2, compiled=False)


def length(chain: int, distractors: int) -> int:
    """Tokens of the longest problem with its solution."""
    one = problems.draw(0, chain, distractors)
    return len(one.words()) + len(problems.solution(one))


def widths(setting: Setting) -> list[int]:
    """Lengths that batches are padded to: thirds of the longest, so that three graphs serve all."""
    longest = length(setting.chain, setting.distractors)
    return [-(-longest * third // (3 * 32)) * 32 for third in (1, 2, 3)]


def draw_batch(setting: Setting, step: int) -> tuple[Tensor, Tensor]:
    """Token ids ``[B, T]`` and targets, -100 where nothing is to be learned: problem and padding. Made by seed and
    step.

    Short problems come first: the hardest allowed grows over the first 40% of the steps.
    """
    source = random.Random(f"{setting.seed} {step}")
    reach = min(1.0, 0.2 + 2 * step / setting.steps)
    share = reach * (source.random() if source.random() < 0.6 else 1.0)
    chain = max(2, round(share * setting.chain))
    most = round(share * setting.distractors)
    need = length(chain, most)
    width = next(width for width in widths(setting) if width >= need)
    rows = max(1, setting.tokens_per_step // width)
    ids = torch.zeros(rows, width + 1, dtype=torch.long)
    targets = torch.full((rows, width), -100)
    for row in range(rows):
        one = problems.draw(
            source.randrange(HELD_OUT), max(2, chain - source.randrange(2)), max(0, most - source.randrange(3))
        )
        asked, written = problems.encode(one.words()), problems.encode(problems.solution(one))
        ids[row, : len(asked) + len(written)] = torch.tensor([*asked, *written])
        targets[row, len(asked) - 1 : len(asked) + len(written) - 1] = torch.tensor(written)
    return ids[:, :-1], targets


def train(kind: str, setting: Setting, folder: Path, every: int = 250) -> Reasoner:
    """Train, or go on where a run of the same setting in ``folder`` stopped; a finished one is loaded.

    Writes ``KIND.pt`` (weights, optimizer, step) and ``KIND.csv`` (step, loss, share of held-out problems solved,
    seconds).
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, curve = folder / f"{kind}.pt", folder / f"{kind}.csv"
    torch.manual_seed(setting.seed)
    model = Reasoner(kind, setting.layers)
    optimizers = _optimizers(model, setting)
    done, spent = _resume(path, model, optimizers, setting), 0.0
    if done == 0:
        curve.write_text("step,loss,solved,seconds\n")
    else:
        spent = _spent(curve, done)
    run: Any = torch.compile(model, fullgraph=True) if setting.compiled else model
    start, losses = time.perf_counter(), []
    for step in tqdm(range(done, setting.steps), desc=kind, mininterval=5):
        for optimizer, rate in zip(optimizers, (setting.learning_rate, setting.adam_learning_rate), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * _rate(step, setting.steps)
        ids, targets = draw_batch(setting, step)
        loss = functional.cross_entropy(run(ids).flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % every == 0 or step + 1 == setting.steps:
            solved = solved_share(model, setting, 32)
            seconds = spent + time.perf_counter() - start
            with curve.open("a", newline="") as file:
                csv.writer(file).writerow(
                    [step + 1, f"{sum(losses) / len(losses):.5f}", f"{solved:.4f}", f"{seconds:.0f}"]
                )
            losses = []
            _save(path, model, optimizers, setting, step + 1)
    return model.eval()


def load(kind: str, folder: Path) -> tuple[Reasoner, Setting]:
    """A trained model and its setting.

    Raises:
        SystemExit: it was never trained here, or its training is not done.
    """
    path = folder / f"{kind}.pt"
    if not path.exists():
        raise SystemExit(f"no model in {path}: run python -m benchmarks.studies.reasoning --train --out {folder}")
    state = torch.load(path, weights_only=True)
    setting = Setting(**state["setting"])
    if state["step"] < setting.steps:
        raise SystemExit(
            f"{path} has had {state['step']} of {setting.steps} steps: run --train again, it goes on there"
        )
    model = Reasoner(kind, setting.layers)
    model.load_state_dict(state["model"])
    return model.eval(), setting


@torch.no_grad()
def solved_share(model: nn.Module, setting: Setting, count: int) -> float:
    """Share of held-out problems of full difficulty whose every word has the highest logit: what greedy decoding
    solves.
    """
    solved = 0
    for seed in range(HELD_OUT, HELD_OUT + count):
        one = problems.draw(seed, setting.chain, setting.distractors)
        asked, written = problems.encode(one.words()), problems.encode(problems.solution(one))
        logits = model(torch.tensor([[*asked, *written]]))[0, len(asked) - 1 : -1]
        solved += bool((logits.argmax(-1) == torch.tensor(written)).all())
    return solved / count


def _optimizers(model: nn.Module, setting: Setting) -> Optimizers:
    """Muon for the matrices inside the layers, AdamW for the rest.

    Muon found the look-ups into the problem within 700 steps of 4,096 tokens where AdamW alone had not after 1,500
    (chains of 8 among 8 distractors, 3 layers).
    """
    inside = [p for name, p in model.named_parameters() if p.dim() == 2 and name.startswith("layers.")]
    rest = [p for name, p in model.named_parameters() if not (p.dim() == 2 and name.startswith("layers."))]
    return (
        torch.optim.Muon(inside, lr=setting.learning_rate, weight_decay=0.01),
        torch.optim.AdamW(rest, lr=setting.adam_learning_rate, betas=(0.9, 0.98), weight_decay=0.01),
    )


def _rate(step: int, steps: int) -> float:
    warmup = max(1, steps // 40)
    return min((step + 1) / warmup, 0.51 + 0.49 * math.cos(math.pi * step / steps))


def _save(path: Path, model: nn.Module, optimizers: Optimizers, setting: Setting, step: int) -> None:
    state = {
        "setting": asdict(setting),
        "step": step,
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
    }
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def _resume(path: Path, model: nn.Module, optimizers: Optimizers, setting: Setting) -> int:
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    if state["setting"] != asdict(setting):
        raise SystemExit(
            f"{path} holds a run of another setting: {state['setting']}; move it away or take another --out"
        )
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return int(state["step"])


def _spent(curve: Path, done: int) -> float:
    """Seconds of the steps that are done; lines of steps after the last saved state are dropped."""
    lines = list(csv.DictReader(curve.read_text().splitlines()))
    kept = [line for line in lines if int(line["step"]) <= done]
    with curve.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["step", "loss", "solved", "seconds"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept)
    return float(kept[-1]["seconds"]) if kept else 0.0
