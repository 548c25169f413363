r"""The published reasoning study on any model and problems: exact answers while the cache is cut back as the model
thinks.

A file of ``{"problem": ..., "answer": ...}`` lines, any transformers model. The prompt is read uncompressed; every
``interval`` tokens the cache is compressed to its size. Score: exact match of the last ``\boxed{}``.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.studies import _common as common
from benchmarks.studies.estimates import share_and_interval
from benchmarks.studies.scoring import is_correct
from fastattn import ExpectedAttention, Policy
from fastattn.integrations.transformers import compressed_cache

TEMPLATE = "{problem}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
PUBLISHED_MATH_500 = """\
Published for MATH-500 (arXiv 2510.00636), full cache / 2x / 4x / 12x smaller; another data set than the above:
  DeepSeek-R1-Distill-Qwen-7B   Expected Attention .57/.55/.53/.49  KeyDiff .57/.54/.48/.35
                                StreamingLLM .57/.54/.51/.41        Knorm .57/.47/.32/.12
  OpenMath-Nemotron-14B         Expected Attention .57/.55/.54/.47  KeyDiff .57/.56/.51/.44
                                StreamingLLM .57/.57/.54/.42"""


def read_problems(path: Path) -> list[dict[str, str]]:
    """The problems of a JSONL file.

    Raises:
        SystemExit: a line is no JSON object, lacks a field, or has one that is neither text nor a number (an answer);
        the message
            names file and line.
    """
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            one = json.loads(line)
        except ValueError as error:
            raise SystemExit(f"{path}, line {number}: must be a JSON object, got {line[:40]!r} ({error})") from None
        if not isinstance(one, dict):
            raise SystemExit(f"{path}, line {number}: must be a JSON object, got {line[:40]!r}")
        problem, answer = one.get("problem"), one.get("answer")
        if not isinstance(problem, str) or not problem.strip():
            raise SystemExit(f"{path}, line {number}: 'problem' must be text, got {problem!r}")
        if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
            raise SystemExit(f"{path}, line {number}: 'answer' must be text or a number, got {answer!r}")
        found.append({"problem": problem, "answer": str(answer)})
    if not found:
        raise SystemExit(f"{path}: holds no problem")
    return found


def run_problems(given: argparse.Namespace) -> None:
    """Solve what is not yet solved, and report."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    problems = read_problems(given.problems)
    if "{problem}" not in given.template:
        raise SystemExit(f"--template must have {{problem}} where the problem goes, got {given.template!r}")
    dtype = torch.bfloat16 if given.device.startswith("cuda") else torch.float32
    note = common.conditions(
        given.device,
        model=Path(given.model).name,
        problems=f"{given.problems.name} ({len(problems)})",
        dtype=str(dtype),
        interval=given.interval,
    )
    rows = common.Rows(
        given.out / "score_on_problems.csv",
        ("problem", "seed", "policy", "size"),
        ("correct", "tokens", "answer", "expected"),
        note,
        given.fresh,
    )
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=dtype).to(given.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(given.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    _check_sizes(model, given)
    points = [(seed, policy, size) for policy in given.policies for size in given.sizes for seed in range(given.seeds)]
    with tqdm(total=len(points) * len(problems), desc="problems", mininterval=1) as bar:
        for seed, policy, size in points:
            open_ones = [
                i for i in range(len(problems)) if rows.missing(problem=i, seed=seed, policy=policy, size=size)
            ]
            bar.update(len(problems) - len(open_ones))
            for first in range(0, len(open_ones), given.batch):
                together = open_ones[first : first + given.batch]
                texts = [problems[index]["problem"] for index in together]
                torch.manual_seed(seed * len(problems) + together[0])
                for index, (response, count) in zip(
                    together, solve(model, tokenizer, texts, policy, size, given), strict=True
                ):
                    expected = problems[index]["answer"]
                    rows.add(
                        problem=index,
                        seed=seed,
                        policy=policy,
                        size=size,
                        correct=int(is_correct(response, expected)),
                        tokens=count,
                        answer=" ".join(response.split())[-80:],
                        expected=expected,
                    )
                bar.update(len(together))
    report_problems(given, rows, note)


def _check_sizes(model: Any, given: argparse.Namespace) -> None:
    """Every policy works at every size: known before hours are spent."""
    for name in given.policies:
        for size in given.sizes:
            try:
                compressed_cache(model, policy=_policy(name, given), budget=size, interval=given.interval)
            except (ValueError, TypeError) as error:
                raise SystemExit(f"{name} at {size} tokens: {error}") from error


def _policy(name: str, given: argparse.Namespace) -> Policy | str:
    if name != "expected_attention":
        return name
    return ExpectedAttention(query_window=given.query_window, n_future_positions=given.future)


@torch.no_grad()
def solve(
    model: Any, tokenizer: Any, problems: list[str], policy: str, size: int, given: argparse.Namespace
) -> list[tuple[str, int]]:
    """Responses to several problems at once, and how many tokens each took (all of ``max_new_tokens`` if it never
    ended).

    Greedy; more than one seed samples at temperature 0.6.
    """
    texts = [given.template.format(problem=problem) for problem in problems]
    if tokenizer.chat_template:
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
            for text in texts
        ]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False).to(model.device)
    cache = compressed_cache(
        model, policy=_policy(policy, given), budget=size, interval=given.interval, batch_size=len(texts)
    )
    sampling = {"do_sample": True, "temperature": 0.6} if given.seeds > 1 else {"do_sample": False}
    out = model.generate(
        **inputs,
        past_key_values=cache,
        max_new_tokens=given.max_new_tokens,
        pad_token_id=tokenizer.pad_token_id,
        **sampling,
    )
    return [_response(model, tokenizer, row) for row in out[:, inputs.input_ids.shape[1] :]]


def _response(model: Any, tokenizer: Any, row: torch.Tensor) -> tuple[str, int]:
    """Up to the end of the text, where it has one: what follows is padding."""
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    ended = torch.isin(row, torch.tensor([end for end in ends if end is not None], device=row.device)).nonzero()
    row = row[: int(ended[0]) + 1] if len(ended) else row
    return tokenizer.decode(row, skip_special_tokens=True), len(row)


def report_problems(given: argparse.Namespace, rows: common.Rows, note: str) -> None:
    """The table and the figure of what was solved."""
    scores: dict[tuple[str, int], list[float]] = {}
    for row in rows:  # type: ignore[attr-defined]
        scores.setdefault((row["policy"], int(row["size"])), []).append(float(row["correct"]))
    body = [
        [*key, "{:.3f} ({:.3f} to {:.3f})".format(*share_and_interval([int(x) for x in v])), len(v)]
        for key, v in scores.items()
    ]
    text = common.table(["policy", "tokens kept", "score", "runs"], body) + f"\n\n{PUBLISHED_MATH_500}"
    shown, (axis,) = common.figure(1)
    ends = []
    for policy, color in zip(given.policies, common.COLORS, strict=False):
        line = sorted((n, statistics.fmean(v)) for (p, n), v in scores.items() if p == policy)
        axis.plot(*zip(*line, strict=True), color=color, marker="o")
        ends.append((*line[-1], policy.replace("_", " "), color))
    axis.set(xscale="log", xlabel="tokens kept per layer and head", ylabel="score (exact match)", ylim=(0, 1))
    common.label_ends(axis, ends)
    common.finish(given.out, "score_on_problems", text, shown, note)


def add_options(options: argparse.ArgumentParser) -> None:
    """What the study on problems takes beside what all studies take."""
    options.add_argument("--model", help="transformers path of the model that solves --problems")
    options.add_argument("--problems", type=Path, help='JSONL of {"problem": ..., "answer": ...}')
    options.add_argument("--sizes", nargs="+", type=int, default=[2048, 4096, 8192, 16384], help="for --problems")
    options.add_argument("--interval", type=int, default=512, help="tokens between two compressions")
    options.add_argument("--query-window", type=int, default=128, help="of Expected Attention")
    options.add_argument("--future", type=int, default=512, help="positions that Expected Attention looks ahead")
    options.add_argument("--batch", type=int, default=1, help="problems solved at once")
    options.add_argument("--template", default=TEMPLATE, help="the prompt, with {problem} in it")
    options.add_argument("--max-new-tokens", type=int, default=32768)
