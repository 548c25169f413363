"""Greedy solutions over compressed caches: what is solved at each size, by each policy, by each model.

The published setting (a cut every 512 tokens of up to 32k, a query window of 128, 512 future positions) is scaled down
to this task's lengths by 16 to 32: a cut every 16 steps, a window of 8, 32 future positions. The prompt is read
uncompressed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.studies import _common as common
from benchmarks.studies.reasoning import problems
from benchmarks.studies.reasoning.model import Reasoner
from benchmarks.studies.reasoning.train import HELD_OUT, Setting, length, load
from fastattn import ExpectedAttention, Policy, SnapKV
from fastattn.modules.policies.registry import policy_names

INTERVAL, WINDOW, FUTURE = 16, 8, 32
FULL = "full cache"
FIRST_EVALUATED = HELD_OUT + 1_000_000  # training's own checks use the seeds before
COLUMNS = ("solved", "steps", "words")


@dataclass
class Sweep:
    """What an evaluation covers."""

    kinds: tuple[str, ...]
    policies: tuple[str, ...]
    problems: int
    batch: int
    out: Path


def sizes(longest: int, count: int = 9) -> list[int]:
    """Cache sizes from a sixteenth of the final length to the whole of it, a factor of 16^(1/(count-1)) apart."""
    return sorted({round(longest / 16 ** (1 - index / (count - 1))) for index in range(count)})


def policy_of(name: str) -> Policy | str:
    """The policy at this task's scale."""
    if name == "expected_attention":
        return ExpectedAttention(query_window=WINDOW, n_future_positions=FUTURE)
    return SnapKV(window=WINDOW) if name == "snap_kv" else name


@torch.no_grad()
def solve(
    model: Reasoner, asked: list[problems.Problem], policy: Policy | str, size: int, most: int
) -> list[list[str]]:
    """Words that the model writes for each problem, greedily, up to ``end`` or ``most`` words.

    Raises:
        ValueError: the problems' texts differ in length.
    """
    prompts = [problems.encode(one.words()) for one in asked]
    if len({len(prompt) for prompt in prompts}) != 1:
        raise ValueError(f"asked must be problems of one length, got {sorted({len(p) for p in prompts})} words")
    cache = model.make_cache(policy, size, len(asked), INTERVAL)
    end = problems.INDEX["end"]
    word = model(torch.tensor(prompts), cache, last_only=True)[:, -1].argmax(-1)
    written: list[Tensor] = [word]
    ended = word == end
    while len(written) < most and not bool(ended.all()):
        word = model(word[:, None], cache, last_only=True)[:, -1].argmax(-1)
        written.append(word)
        ended |= word == end
    found = [problems.decode(row) for row in torch.stack(written, 1).tolist()]
    return [row[: row.index("end") + 1] if "end" in row else row for row in found]


def evaluate(sweep: Sweep, folder: Path) -> common.Rows:
    """Fill ``reasoning.csv``: a row per model, policy and size, with a 0 or 1 for every problem; goes on where it
    stopped.
    """
    models: dict[str, tuple[Reasoner, Setting]] = {kind: load(kind, folder) for kind in sweep.kinds}
    setting = next(iter(models.values()))[1]
    note = common.conditions(
        "cpu",
        problems=sweep.problems,
        chain=setting.chain,
        distractors=setting.distractors,
        interval=INTERVAL,
        window=WINDOW,
    )
    rows = common.Rows(sweep.out / "reasoning.csv", ("model", "policy", "size"), COLUMNS, note, False)
    longest = length(setting.chain, setting.distractors)
    points = [(FULL, longest), *((policy, size) for size in sizes(longest) for policy in sweep.policies)]
    work = [(kind, policy, size) for policy, size in points for kind in sweep.kinds]
    for kind, policy, size in tqdm(work, desc="points", mininterval=5):
        if rows.missing(model=kind, policy=policy, size=size):
            rows.add(model=kind, policy=policy, size=size, **_score(models[kind][0], setting, policy, size, sweep))
    return rows


def _score(model: Reasoner, setting: Setting, policy: str, size: int, sweep: Sweep) -> dict[str, Any]:
    solved, share, words = "", 0.0, 0
    longest = length(setting.chain, setting.distractors)
    for first in range(0, sweep.problems, sweep.batch):
        seeds = range(FIRST_EVALUATED + first, FIRST_EVALUATED + min(first + sweep.batch, sweep.problems))
        asked = [problems.draw(seed, setting.chain, setting.distractors) for seed in seeds]
        most = round(1.25 * len(problems.solution(asked[0])))
        chosen = "knorm" if policy == FULL else policy_of(policy)
        for one, written in zip(
            asked, solve(model, asked, chosen, 2 * longest if policy == FULL else size, most), strict=True
        ):
            verdict = problems.verify(one, written)
            solved += str(int(verdict.correct))
            share += verdict.right / verdict.total
            words += len(written)
    return {"solved": solved, "steps": share / sweep.problems, "words": words / sweep.problems}


def all_policies() -> tuple[str, ...]:
    """Every policy that has a name."""
    return policy_names()
