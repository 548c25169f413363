r"""Score against cache size: four policies (Expected Attention, arXiv 2510.00636, Figure 4).

``python -m benchmarks.studies.score_vs_cache_size [--quick] [--out DIR]`` runs anywhere, without downloads: passkey
retrieval at several depths and next-token loss on long text, with SmolLM2-135M-Instruct. A prompt is read once and its
queries, keys and values are handed to a cache of every policy and size: all see exactly the same.

``... --model PATH --problems FILE.jsonl`` is the reasoning study: any transformers model and any file of
``{"problem": ..., "answer": ...}`` lines (AIME 2025, say). Greedy decoding, the cache compressed back to its size
every 512 tokens, a query window of 128, the prompt uncompressed while it is read. Score: exact match of the last
``\boxed{}``.

Means over seeds (or problems) with 95% confidence intervals. Every result is saved as soon as it is known, and a run
goes on where it stopped. Numbers published for MATH-500 are printed apart: another data set.
"""

from __future__ import annotations

import argparse
import inspect
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from benchmarks.studies import _common as common
from benchmarks.studies import problem_sets
from benchmarks.studies.estimates import Estimate, mean_and_interval, share_and_interval
from fastattn import Policy
from fastattn.integrations.transformers import compressed_cache

POLICIES = ("expected_attention", "knorm", "streaming_llm", "key_diff")  # those of the published table
ANSWER_TOKENS, LOSS_TOKENS = 8, 64


class Recorder(Policy):
    """Keeps what a prompt brings to each layer, to feed other caches with it."""

    query_window = 1

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor, Tensor]] = []
        self.scale = 0.0

    def score(self, state: Any) -> Tensor:
        count = int(state.lengths[0, 0])
        self.layers.append((state.call.rotated, state.keys[:, :, :count].clone(), state.values[:, :, :count].clone()))
        self.scale = state.scale
        return state.positions.to(torch.float32)


@dataclass
class Prompt:
    """A text with a passkey in it, what follows the text, the question, and the answer."""

    ids: Tensor
    following: Tensor
    question: Tensor
    passkey: str


def make_prompt(tokenizer: Any, tokens: int, depth: float, seed: int) -> Prompt:
    from examples import smollm2

    draw = random.Random(seed)
    passkey = str(draw.randint(10000, 99999))
    text = smollm2.long_text()
    start = draw.randrange(len(text) // 2)
    body = tokenizer(text[start : start + 8 * (tokens + LOSS_TOKENS)], verbose=False).input_ids
    needle = tokenizer(f"\n\nThe pass key is {passkey}. Remember it. {passkey} is the pass key.\n\n").input_ids
    question = tokenizer("\n\nWhat is the pass key? The pass key is").input_ids
    count = tokens - len(needle)
    at = int(depth * count)
    ids = [*body[:at], *needle, *body[at:count]]
    following = body[count : count + LOSS_TOKENS]
    return Prompt(*(torch.tensor([part]) for part in (ids, following, question)), passkey)


def _forward(model: Any, ids: Tensor, cache: Any, last_only: bool) -> Tensor:
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # renamed in 5.x
    return model(input_ids=ids, logits_to_keep=1 if last_only else 0, **{name: cache}).logits


def run_without_downloads(given: argparse.Namespace) -> None:
    from examples import smollm2

    tokens = 512 if given.quick else 1536
    sizes = (32, 64, 128, 256) if given.quick else (64, 128, 256, 512)
    depths = (0.5,) if given.quick else (0.1, 0.5, 0.9)
    seeds = range(given.seeds)
    note = common.conditions(
        "cpu", model="SmolLM2-135M-Instruct", prompt=f"{tokens} tokens", dtype="float32", mode="eager", batch=1
    )
    rows = common.Rows(
        given.out / "score_vs_cache_size.csv",
        ("seed", "depth", "policy", "size"),
        ("passkey", "loss"),
        note,
        given.fresh,
    )
    torch.manual_seed(0)
    model = tokenizer = None
    work = [(seed, depth) for seed in seeds for depth in depths]
    for seed, depth in tqdm(work, desc="prompts"):
        caches = [("full cache", tokens), *((policy, size) for policy in POLICIES for size in sizes)]
        caches = [(p, s) for p, s in caches if rows.missing(seed=seed, depth=depth, policy=p, size=s)]
        if not caches:
            continue
        if model is None:
            model, tokenizer = smollm2.load()
        prompt = make_prompt(tokenizer, tokens, depth, seed)
        for (policy, size), passkey, loss in evaluate(model, tokenizer, prompt, caches):
            rows.add(seed=seed, depth=depth, policy=policy, size=size, passkey=int(passkey), loss=loss)
    report_without_downloads(rows, given, sizes, note)


@torch.no_grad()
def evaluate(
    model: Any, tokenizer: Any, prompt: Prompt, caches: list[tuple[str, int]]
) -> Iterator[tuple[tuple[str, int], bool, float]]:
    """Read the prompt once; then, for each policy and size: was the passkey retrieved, and the loss on what follows."""
    recorder, count = Recorder(), prompt.ids.shape[1]
    last = _forward(model, prompt.ids, compressed_cache(model, policy=recorder, budget=count - 1), last_only=True)
    for policy, size in caches:
        built = "knorm" if policy == "full cache" else policy
        answered, followed = (
            _filled(model, recorder, built, size, room=max(LOSS_TOKENS, prompt.question.shape[1])) for _ in range(2)
        )
        logits = torch.cat([last, _forward(model, prompt.following[:, :-1], followed, last_only=False)], dim=1)
        loss = functional.cross_entropy(logits[0].float(), prompt.following[0]).item()
        ids, answer = prompt.question, []
        for _ in range(ANSWER_TOKENS):
            ids = _forward(model, ids, answered, last_only=True)[:, -1].argmax(-1, keepdim=True)
            answer.append(int(ids))
        yield (policy, size), prompt.passkey in tokenizer.decode(answer).replace(" ", ""), loss


def _filled(model: Any, recorder: Recorder, policy: str, size: int, room: int) -> Any:
    """A cache that has taken in the recorded prompt; question and text are steps, which compress nothing."""
    cache = compressed_cache(model, policy=policy, budget=size, max_step=room, interval=room + ANSWER_TOKENS)
    for layer, (query, key, value) in enumerate(recorder.layers):
        cache.kv.update(layer, query, key, value, scale=recorder.scale)
    return cache


def report_without_downloads(rows: common.Rows, given: argparse.Namespace, sizes: tuple[int, ...], note: str) -> None:
    runs: dict[tuple[str, int], dict[tuple[str, str], dict[str, str]]] = {}
    for row in rows:  # type: ignore[attr-defined]
        runs.setdefault((row["policy"], int(row["size"])), {})[row["seed"], row["depth"]] = row
    full = next(key for key in runs if key[0] == "full cache")
    summary = {
        key: {
            "passkey": share_and_interval([int(row["passkey"]) for row in found.values()]),
            "loss": mean_and_interval([float(row["loss"]) for row in found.values()]),
            "excess": difference(runs, key, full),
        }
        for key, found in runs.items()
    }
    body = [
        [
            *key,
            "{:.3f} ({:.2f} to {:.2f})".format(*values["passkey"]),
            f"{values['loss'].mean:.3f}",
            "{:.3f} ({:.2f} to {:.2f})".format(*values["excess"]),
            len(runs[key]),
        ]
        for key, values in summary.items()
    ]
    header = ["policy", "tokens kept", "passkey retrieved", "loss (nats)", "loss above the full cache's", "runs"]
    text = (
        common.table(header, body) + "\n\nIn brackets: 95% confidence intervals, of a difference on the same texts.\n\n"
    )
    text += "Who wins where (several: their intervals do not tell them apart)\n"
    text += common.table(["tokens kept", "passkey", "loss"], [[s, *winners(runs, summary, s)] for s in sizes])
    text += f"\n\n{problem_sets.PUBLISHED_MATH_500}"
    plot(summary, sizes, given, text, note)


def difference(runs: dict[tuple[str, int], dict[Any, dict[str, str]]], key: Any, other: Any) -> Estimate:
    """How much more loss: text by text, since texts differ more than policies; the depths of one text are one value."""
    texts: dict[str, list[float]] = {}
    for (seed, depth), row in runs[key].items():
        texts.setdefault(seed, []).append(float(row["loss"]) - float(runs[other][seed, depth]["loss"]))
    return mean_and_interval([statistics.fmean(found) for found in texts.values()])


def winners(runs: Any, summary: dict[tuple[str, int], dict[str, Estimate]], size: int) -> list[str]:
    """For the passkey and the loss: the best policy and those that cannot be told from it."""
    shares = {policy: summary[policy, size]["passkey"] for policy in POLICIES}
    first = max(shares.values(), key=lambda share: share.mean)
    retrieving = [policy for policy, share in shares.items() if share.high >= first.low]
    best = min(POLICIES, key=lambda policy: summary[policy, size]["loss"].mean)
    near = [p for p in POLICIES if p == best or not difference(runs, (p, size), (best, size)).low > 0]
    return ["all" if len(names) == len(POLICIES) else ", ".join(names) for names in (retrieving, near)]


def plot(
    summary: dict[tuple[str, int], dict[str, Estimate]],
    sizes: tuple[int, ...],
    given: argparse.Namespace,
    text: str,
    note: str,
) -> None:
    shown, axes = common.figure(2)
    full = next(values for (policy, _), values in summary.items() if policy == "full cache")
    labels = ("passkey retrieved (share of runs)", "loss above the full cache's (nats per token)")
    for axis, metric, label in zip(axes, ("passkey", "excess"), labels, strict=True):
        ends = []
        for index, (policy, color) in enumerate(zip(POLICIES, common.COLORS, strict=False)):
            found = [summary[policy, size][metric] for size in sizes]
            aside = [size * 1.03 ** (index - 1.5) for size in sizes]  # so that intervals do not hide each other
            spread = [[max(e.mean - e.low, 0.0) for e in found], [max(e.high - e.mean, 0.0) for e in found]]
            axis.errorbar(aside, [e.mean for e in found], spread, color=color, marker="o", markersize=4, capsize=3)
            ends.append((sizes[-1], found[-1].mean, policy.replace("_", " "), color))
        axis.axhline(full[metric].mean, color="#777777", linestyle="--", linewidth=1)
        ends.append((sizes[-1], full[metric].mean, "full cache", "#777777"))
        axis.set(xscale="log", xlabel="tokens kept per layer and head", ylabel=label)
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.minorticks_off()
        axis.set_xlim(sizes[0] * 0.85, sizes[-1] * 2.4)
        axis.set_ylim((-0.03, 1.08) if metric == "passkey" else (min(0.0, axis.get_ylim()[0]), axis.get_ylim()[1]))
        common.label_ends(axis, ends)
    axes[0].set_title("Passkey retrieval")
    axes[1].set_title("Next-token loss on the text that follows")
    common.finish(given.out, "score_vs_cache_size", text, shown, note)


def main(arguments: list[str] | None = None) -> None:
    options = common.parser(__doc__.splitlines()[0])
    options.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    options.add_argument("--seeds", type=int, help="default: 10 texts (5 with --quick), or 1 run of each problem")
    problem_sets.add_options(options)
    given = options.parse_args(arguments)
    if (given.model is None) != (given.problems is None):
        raise SystemExit("give both --model and --problems, or neither")
    given.seeds = given.seeds or ((5 if given.quick else 10) if given.problems is None else 1)
    (run_without_downloads if given.problems is None else problem_sets.run_problems)(given)


if __name__ == "__main__":
    main()
