"""A real model over compressed caches: memory, speed, loss and a passkey, for every policy at two budgets.

SmolLM2-135M-Instruct reads a text of some 2,000 tokens (Python's documentation) with a passkey hidden in it. Then, over
what the cache kept of it, the model predicts the next 256 tokens one by one, and is asked for the passkey.

    python -m examples.demo          table, and out/demo.png
"""

from __future__ import annotations

import argparse
import copy
import inspect
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from examples import smollm2
from fastattn.modules import policy_names

POLICIES = policy_names()
PASSKEY = "48213"
NEEDLE = f"\n\nThe pass key is {PASSKEY}. Remember it. {PASSKEY} is the pass key.\n\n"
QUESTION = "\n\nWhat is the pass key? The pass key is"
ANSWER_TOKENS = 8


@dataclass
class Material:
    """Token ids ``[1, N]``: the text with the needle in it, what follows the text, and the question."""

    prompt: Tensor
    following: Tensor
    question: Tensor


@dataclass
class Result:
    """One line of the table."""

    name: str
    budget: int | None
    mib: float
    ms_per_token: float
    loss: float
    answer: str

    @property
    def retrieved(self) -> bool:
        return PASSKEY in self.answer.replace(" ", "")


def make_material(tokenizer: Any, prompt_tokens: int, following_tokens: int, depth: float) -> Material:
    """``depth`` in [0, 1]: where in the text the needle stands."""
    text = tokenizer(smollm2.long_text(), verbose=False).input_ids
    needle, question = tokenizer(NEEDLE).input_ids, tokenizer(QUESTION).input_ids
    body = prompt_tokens - len(needle)
    at = int(depth * body)
    prompt = [*text[:at], *needle, *text[at:body]]
    return Material(*(torch.tensor([ids]) for ids in (prompt, text[body : body + following_tokens], question)))


def make_cache(model: Any, policy: str | None, budget: int | None) -> Any:
    """A compressed cache, or the one that the model uses by default."""
    if policy is None or budget is None:
        from transformers import DynamicCache

        return DynamicCache(config=model.config)
    from fastattn.integrations.transformers import compressed_cache

    return compressed_cache(model, policy=policy, budget=budget)


def cache_mib(cache: Any) -> float:
    """Everything that the cache holds, in MiB."""
    if hasattr(cache, "kv"):
        return cache.kv.nbytes / 2**20
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 2**20


@torch.inference_mode()
def measure(
    model: Any, tokenizer: Any, material: Material, policy: str | None, budget: int | None, bar: tqdm
) -> Result:
    """Prefill, ask for the passkey on a copy of the cache, then predict what follows one token at a time."""
    cache = make_cache(model, policy, budget)
    logits = [_feed(model, material.prompt, cache)]
    bar.update(material.prompt.shape[1])
    answer = tokenizer.decode(_answer(model, material.question, copy.deepcopy(cache)))
    start = time.perf_counter()
    for token in material.following[0, :-1]:
        logits.append(_feed(model, token.view(1, 1), cache))
        bar.update()
    seconds = time.perf_counter() - start
    loss = functional.cross_entropy(torch.cat(logits).float(), material.following[0]).item()
    per_token = 1e3 * seconds / (material.following.shape[1] - 1)
    return Result(policy or "full cache", budget, cache_mib(cache), per_token, loss, answer)


def _feed(model: Any, ids: Tensor, cache: Any) -> Tensor:
    """Logits ``[1, vocabulary]`` after the last of ``ids [1, N]``."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # renamed in 5.x
    return model(input_ids=ids, logits_to_keep=1, **{name: cache}).logits[:, -1]


def _answer(model: Any, question: Tensor, cache: Any) -> list[int]:
    answer, ids = [], question
    for _ in range(ANSWER_TOKENS):
        ids = _feed(model, ids, cache).argmax(-1, keepdim=True)
        answer.append(ids.item())
    return answer


def print_table(results: list[Result]) -> None:
    print(f"{'cache':20}{'budget':>8}{'MiB':>9}{'ms/token':>11}{'loss':>9}  passkey {PASSKEY}")
    for r in results:
        found = "retrieved" if r.retrieved else f"lost: {r.answer.strip()!r}"
        print(f"{r.name:20}{r.budget or '':>8}{r.mib:9.1f}{r.ms_per_token:11.1f}{r.loss:9.3f}  {found}")


def plot(results: list[Result], title: str, path: Path) -> None:
    """Loss and time per token against cache size; a filled marker where the passkey was retrieved."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    full, others = results[0], results[1:]
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    palette = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#f0e442", "#000000")
    colors = dict(zip(POLICIES, palette, strict=True))
    for panel, field, label in zip(
        panels, ("loss", "ms_per_token"), ("loss on the next tokens (nats)", "ms per decoded token"), strict=True
    ):
        reference = getattr(full, field)
        panel.axhline(reference, color="black", linewidth=1, linestyle=(0, (4, 3)))
        panel.plot(full.mib, reference, marker="*", markersize=13, color="black", linestyle="none")
        for name in POLICIES:
            line = sorted((r for r in others if r.name == name), key=lambda r: r.mib)
            panel.plot([r.mib for r in line], [getattr(r, field) for r in line], color=colors[name], linewidth=1.5)
            for r in line:
                fill = colors[name] if r.retrieved else "white"
                panel.plot(r.mib, getattr(r, field), "o", color=colors[name], markerfacecolor=fill, markersize=8)
        panel.set_xlabel("cache size (MiB)")
        panel.set_ylabel(label)
        panel.set_xlim(left=0)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[1].set_ylim(bottom=0)
    handles = [Line2D([], [], color="black", marker="*", markersize=12, linestyle=(0, (4, 3)), label="full cache")]
    handles += [Line2D([], [], color=colors[name], marker="o", label=name) for name in POLICIES]
    handles += [
        Line2D([], [], color="gray", marker="o", linestyle="none", label="passkey retrieved"),
        Line2D([], [], color="gray", marker="o", markerfacecolor="white", linestyle="none", label="passkey lost"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> list[Result]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the prompt (default 2048)")
    parser.add_argument("--following", type=int, default=256, help="tokens predicted after it (default 256)")
    parser.add_argument("--budgets", type=int, nargs="+", default=[512, 1024], help="default 512 1024")
    parser.add_argument(
        "--depth", type=float, default=0.5, help="place of the passkey, 0 first to 1 last (default 0.5)"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--out", type=Path, default=Path("out/demo.png"), help="the plot (default out/demo.png)")
    options = parser.parse_args(arguments)

    print("loading SmolLM2-135M-Instruct ...", flush=True)
    model, tokenizer = smollm2.load(getattr(torch, options.dtype))
    material = make_material(tokenizer, options.prompt, options.following, options.depth)
    runs = [(None, None)] + [(policy, budget) for budget in options.budgets for policy in POLICIES]
    results = []
    with tqdm(total=len(runs) * (options.prompt + options.following - 1), unit="tok", smoothing=0.05) as bar:
        for policy, budget in runs:
            bar.set_description(f"{policy} {budget}" if policy else "full cache")
            results.append(measure(model, tokenizer, material, policy, budget, bar))
    print(f"\n{options.prompt} prompt tokens, then {options.following} predicted one by one, {options.dtype}, CPU")
    print_table(results)
    plot(results, f"SmolLM2-135M, {options.prompt} prompt tokens, {options.dtype}, CPU", options.out)
    print(f"plot: {options.out}")
    return results


if __name__ == "__main__":
    main()
