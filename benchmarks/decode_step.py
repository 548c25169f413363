"""One decode step of SmolLM2 over a long prompt: compressed and compiled against what else there is.

``python -m benchmarks.decode_step [--prompt 4096] [--budget 1024] [--policy key_diff]``

In one run, in turns: compressed and compiled (one graph), the same with weights packed for the processor (Inductor's
``freezing``: weights become constants of the graph), compressed in eager mode, transformers' full cache, kvpress's
``DecodingPress`` with the same policy, budget and interval (in its own environment, see
:mod:`benchmarks.kvpress_parity`; left out with a word if that is missing), and the model's linear layers alone. The
compiled models' logits are compared with eager ones before anything is timed. Medians of rounds, ratios round by round.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.lib.timing import Spread, speedup, take_turns
from examples import smollm2
from fastattn.integrations.transformers import compressed_cache

ROOT = Path(__file__).resolve().parent.parent
PACKED, COMPILED, EAGER, FULL, PEER, LINEAR = (
    "compressed, compiled, packed",
    "compressed, compiled",
    "compressed, eager",
    "full cache, eager",
    "kvpress DecodingPress",
    "linear layers alone",
)


class Decoder:
    """Greedy decoding, some tokens at a time."""

    def __init__(self, step: Callable[..., Any], model: Any, cache: Any, token: Tensor, position: int) -> None:
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # since 5.x
        self.step, self.cache, self.token, self.position = step, {name: cache}, token, torch.tensor([[position]])
        self.logits: Tensor | None = None

    def run(self, tokens: int) -> None:
        with torch.no_grad():
            for _ in range(tokens):
                out = self.step(input_ids=self.token, position_ids=self.position, logits_to_keep=1, **self.cache)
                self.logits = out.logits
                self.token = out.logits[:, -1:].argmax(-1)
                self.position = self.position + 1


class Peer:
    """kvpress in a process of its own."""

    def __init__(self, python: str, setting: dict[str, Any]) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [python, "-m", "benchmarks.peers.kvpress_decode"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.cached = self._ask(setting)["cached"]

    def _ask(self, what: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"kvpress stopped with exit status {self.process.wait()}")
        return json.loads(answer)

    def run(self, tokens: int) -> None:
        self.cached = self._ask(tokens)["cached"]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def linear_layers(model: Any) -> Callable[[int], None]:
    """Every linear layer of the model once per token, on inputs of its own size."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    inputs = {n: torch.randn(1, 1, n).to(model.dtype) for n in {layer.in_features for layer in layers}}

    @torch.no_grad()
    def run(tokens: int) -> None:
        for _ in range(tokens):
            for layer in layers:
                layer(inputs[layer.in_features])

    return run


def decoders(model: Any, ids: Tensor, given: argparse.Namespace) -> dict[str, Decoder]:
    """The prompt read once per kind of cache, the compiled step checked against the eager one."""
    from transformers import DynamicCache

    count = ids.shape[1]
    built = compressed_cache(model, policy=given.policy, budget=given.budget, interval=given.interval)
    found = {}
    for name, cache in ((EAGER, built), (FULL, DynamicCache(config=model.config))):
        reader = Decoder(model, model, cache, ids, 0)
        reader.position = torch.arange(count)[None]
        reader.run(1)
        found[name] = Decoder(model, model, cache, reader.token, count)
    start, check = found[EAGER], Decoder(model, model, copy.deepcopy(built), found[EAGER].token, count)
    check.run(1)
    for name in (COMPILED, PACKED):
        found[name] = Decoder(model, model, copy.deepcopy(built), start.token, count)
        compile_step(found[name], packed=name == PACKED)
        error = relative_difference(found[name].logits, check.logits)
        if not error < (0.05 if model.dtype == torch.bfloat16 else 1e-4):
            raise SystemExit(f"the step {name!r} is wrong: its logits differ by {error:.1e} of the largest")
    return found


def compile_step(decoder: Decoder, packed: bool) -> None:
    """Decodes one token, which compiles the step."""
    options = {"freezing": True} if packed else None
    decoder.step = torch.compile(decoder.step.__call__, fullgraph=True, options=options)
    with torch._inductor.config.patch(freezing=packed):  # Dynamo looks here, Inductor at the options
        decoder.run(1)


def relative_difference(logits: Tensor | None, expected: Tensor | None) -> float:
    assert logits is not None
    assert expected is not None
    return float((expected - logits).abs().max() / expected.abs().max())


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prompt", type=int, default=4096, help="tokens")
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--interval", type=int, default=128)
    parser.add_argument("--policy", default="key_diff", choices=("key_diff", "knorm"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rounds", type=int, default=17)
    parser.add_argument("--tokens", type=int, default=16, help="decoded per round")
    parser.add_argument("--peer", default=os.environ.get("FASTATTN_KVPRESS_PYTHON"), help="interpreter with kvpress")
    given = parser.parse_args(arguments)
    model, tokenizer = smollm2.load(getattr(torch, given.dtype))
    ids = tokenizer(smollm2.long_text()[: 8 * given.prompt], return_tensors="pt").input_ids[:, : given.prompt]
    found = decoders(model, ids, given)
    peer = start_peer(given, ids)
    runs: dict[str, Callable[[int], None]] = {name: decoder.run for name, decoder in found.items()}
    runs[LINEAR] = linear_layers(model)
    if peer is not None:
        runs[PEER] = peer.run
    bar = tqdm(total=(given.rounds + 1) * len(runs), desc="rounds")

    def call(run: Callable[[int], None]) -> None:
        run(given.tokens)
        bar.update()

    seconds = take_turns({name: lambda run=run: call(run) for name, run in runs.items()}, rounds=given.rounds, warmup=1)
    bar.close()
    if peer is not None:
        peer.close()
    return report(seconds, given)


def start_peer(given: argparse.Namespace, ids: Tensor) -> Peer | None:
    python = given.peer or str(ROOT / ".venv-kvpress" / "bin" / "python")
    if not Path(python).exists():
        print("kvpress is left out: run python -m benchmarks.kvpress_parity once to set its environment up, or --peer")
        return None
    setting = {name: getattr(given, name) for name in ("budget", "interval", "policy", "dtype")}
    setting |= {"model": str(smollm2.folder()), "prompt": ids[0].tolist(), "threads": torch.get_num_threads()}
    return Peer(python, setting)


def report(seconds: dict[str, list[float]], given: argparse.Namespace) -> dict[str, Any]:
    print(f"\n{given.prompt}-token prompt, budget {given.budget}, {given.policy}, {given.dtype}, 1 row, CPU")
    print(f"{'':30}{'ms/token':>10}{'tokens/s':>10}   packed is faster by (quartiles)   compiled by")
    figures: dict[str, Any] = {}
    for name, values in seconds.items():
        per_token = Spread.of([1e3 * value / given.tokens for value in values])
        gain, plain = speedup(values, seconds[PACKED]), speedup(values, seconds[COMPILED])
        figures[name] = {
            "ms_per_token": per_token.median,
            "packed_speedup": gain.median,
            "compiled_speedup": plain.median,
        }
        print(
            f"{name:30}{per_token.median:10.1f}{1e3 / per_token.median:10.1f}   "
            f"{f'{gain.median:.2f}x ({gain.low:.2f} to {gain.high:.2f})':33} {plain.median:.2f}x"
        )
    for name in (PACKED, COMPILED):
        share = speedup(seconds[name], seconds[LINEAR])
        share_text = f"{share.median:.2f} ({share.low:.2f} to {share.high:.2f})"
        print(f"The whole step, {name}, takes {share_text} times as long as the linear layers in eager mode.")
        figures[name]["over_linear_layers"] = share.median
    print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads(), **figures}))
    return figures


if __name__ == "__main__":
    main()
