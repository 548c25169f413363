"""The peer's half of :mod:`benchmarks.kvpress_parity`, run in an environment that has kvpress and lacks fastattn.

``python -m benchmarks.peers.kvpress_scores MODEL_FOLDER TOKENS.pt OUT.pt``: one prefill of the tokens per press and
ratio; saves what attention saw and the indices that each press kept of every layer and head.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import transformers
from kvpress import ExpectedAttentionPress, KeyDiffPress, KnormPress, SnapKVPress, StreamingLLMPress, TOVAPress
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from tests._helpers.recorded import record_prefill

PRESSES = {
    "knorm": KnormPress,
    "streaming_llm": StreamingLLMPress,
    "key_diff": KeyDiffPress,
    "expected_attention": ExpectedAttentionPress,
    "snap_kv": SnapKVPress,
    "tova": TOVAPress,
}


def prefill(model: Any, input_ids: Tensor, press: Any = None) -> list[tuple[Tensor, Tensor]]:
    """Keys and values ``[Hkv, T, D]`` of every layer's cache after one prefill."""
    cache = DynamicCache()
    with torch.inference_mode():
        if press is None:
            model(input_ids, past_key_values=cache)
        else:
            with press(model):
                model(input_ids, past_key_values=cache)
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def kept_indices(full: tuple[Tensor, Tensor], pruned: tuple[Tensor, Tensor]) -> list[list[int]]:
    """Which tokens are left per head, by looking their key and value up among all. Ascending."""
    heads = []
    for h in range(full[0].shape[0]):
        rows = torch.cat([full[0][h], full[1][h]], -1)
        left = torch.cat([pruned[0][h], pruned[1][h]], -1)
        where: dict[bytes, list[int]] = {}
        for index, row in enumerate(rows.numpy()):
            where.setdefault(row.tobytes(), []).append(index)
        heads.append(sorted(where[row.tobytes()].pop() for row in left.numpy()))
    return heads


def main() -> None:
    folder, tokens, out = sys.argv[1:]
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    request = torch.load(tokens)
    input_ids = request["input_ids"]
    full = prefill(model, input_ids)
    kept = {}
    for name in request["policies"]:
        press = PRESSES[name]
        for ratio in request["ratios"]:
            pruned = prefill(model, input_ids, press(compression_ratio=ratio))
            kept[name, ratio] = [kept_indices(f, p) for f, p in zip(full, pruned, strict=True)]
            print(f"kvpress: {name} at ratio {ratio} done", flush=True)
    recorded = [vars(layer) for layer in record_prefill(model, input_ids)]
    versions = {"transformers": str(transformers.__version__), "torch": str(torch.__version__)}
    torch.save({"kept": kept, "recorded": recorded, "versions": versions}, out)


if __name__ == "__main__":
    main()
