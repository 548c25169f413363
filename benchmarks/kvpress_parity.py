"""Do the policies keep what kvpress keeps? ``python -m benchmarks.kvpress_parity``

One prefill of 1,024 tokens of Python's documentation through SmolLM2 in float32, all layers and heads, default
arguments, budgets of a half and a quarter. kvpress 0.5.5 runs in an environment of its own, ``.venv-kvpress``, set up
on first use from ``constraints-kvpress.txt`` (``--python`` or FASTATTN_KVPRESS_PYTHON names another interpreter that
has kvpress). It hands back the tokens that each press kept and what attention saw; the caches here are fed that very
prefill, so that only the policies differ, not two versions of transformers.

kvpress prunes to ``int(T * (1 - ratio))`` tokens with ``topk`` over scores into which it has written its sinks: +1
above the best for Expected Attention, one against zero for StreamingLLM. Ties go wherever topk puts them. SnapKV has
kvpress's default window of 64 queries; H2O and Random have no deterministic counterpart of one prefill there.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from examples import smollm2
from fastattn import (
    TOVA,
    CompressedKVCache,
    ExpectedAttention,
    KeyDiff,
    Knorm,
    Policy,
    Rotary,
    SnapKV,
    StreamingLLM,
)
from tests._helpers.recorded import SNAP_KV_WINDOW, Difference, Recorded

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv-kvpress"
PACKAGES = ("kvpress==0.5.5", "transformers==5.2.0", "torch==2.13.0")
POLICIES: dict[str, Policy] = {
    "knorm": Knorm(),
    "streaming_llm": StreamingLLM(),
    "key_diff": KeyDiff(),
    "expected_attention": ExpectedAttention(),
    "snap_kv": SnapKV(window=SNAP_KV_WINDOW),
    "tova": TOVA(),
}
TOKENS = 1024
RATIOS = (0.5, 0.75)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", help="interpreter that has kvpress; by default .venv-kvpress, set up if missing")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    arguments = parser.parse_args()
    python = arguments.python or os.environ.get("FASTATTN_KVPRESS_PYTHON") or set_up()
    model, tokenizer = smollm2.load()
    input_ids = tokenizer(smollm2.long_text()[:8000], return_tensors="pt").input_ids[:, :TOKENS]
    rotary = Rotary(model.model.rotary_emb.inv_freq)
    peer = run_peer(python, input_ids, arguments.policies)
    layers = [Recorded(**layer) for layer in peer["recorded"]]
    versions = ", ".join(f"{name} {version}" for name, version in peer["versions"].items())
    print(f"\n{TOKENS} tokens, {len(layers)} layers x {layers[0].key.shape[0]} heads; peer: {versions}")
    print(f"{'policy':<20}{'budget':>8}{'heads':>8}{'equal sets':>12}{'differing tokens':>18}{'within float32':>16}")
    unexplained = 0
    for policy in arguments.policies:
        for ratio in RATIOS:
            difference = compare(policy, layers, rotary, peer["kept"][policy, ratio])
            unexplained += difference.tokens - difference.explained
            budget = len(peer["kept"][policy, ratio][0][0])
            print(
                f"{policy:<20}{budget:>8}{difference.heads:>8}{difference.equal:>12}{difference.tokens:>18}"
                f"{difference.explained:>16}"
            )
    print("\nDiffering tokens count on both sides. 'Within float32' are those whose score lies so near the threshold")
    print("that float32 decides; all others would be a difference between the two definitions.")
    return 1 if unexplained else 0


def compare(policy: str, layers: list[Recorded], rotary: Rotary, peer: list[list[list[int]]]) -> Difference:
    """What a cache keeps of every head against what the peer kept."""
    kv_heads, _, dim = layers[0].key.shape
    budget = len(peer[0][0])
    cache = CompressedKVCache(
        POLICIES[policy], budget, num_layers=len(layers), num_kv_heads=kv_heads, head_dim=dim, rotary=rotary
    )
    difference = Difference()
    for index, layer in enumerate(layers):
        cache.attend(index, layer.query[None], layer.key[None], layer.value[None])
        for head in range(kv_heads):
            kept = cache.positions(index)[0, head, : int(cache.lengths(index)[0, head])].tolist()
            difference.add(policy, layer, head, rotary.inv_freq, kept, peer[index][head])
    return difference


def run_peer(python: str | Path, input_ids: torch.Tensor, policies: list[str]) -> dict[str, Any]:
    """The peer's answer, computed in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        request, answer = Path(folder) / "request.pt", Path(folder) / "answer.pt"
        torch.save({"input_ids": input_ids, "ratios": RATIOS, "policies": policies}, request)
        command = [python, "-m", "benchmarks.peers.kvpress_scores", smollm2.folder(), request, answer]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        subprocess.run([str(part) for part in command], cwd=ROOT, env=environment, check=True)
        result: dict[str, Any] = torch.load(answer)
        return result


def set_up() -> Path:
    """The interpreter of ``.venv-kvpress``, which is made if it is missing or was left half made."""
    python, done = ENVIRONMENT / "bin" / "python", ENVIRONMENT / ".stamp"
    if not done.exists():
        print(f"Setting up {ENVIRONMENT.name}: some minutes, once", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
        pip = [str(python), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints-kvpress.txt")]
        subprocess.run([*pip, "torch==2.13.0"], check=True)
        subprocess.run([*pip, *PACKAGES], check=True)
        done.touch()
    return python


if __name__ == "__main__":
    sys.exit(main())
