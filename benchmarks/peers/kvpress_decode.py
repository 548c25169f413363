"""Decoding with kvpress, on request: run by :mod:`benchmarks.decode_step` in the peer's own environment.

Reads one JSON object per line from standard input, answers with one on standard output: the first is the setting, the
others say how many tokens to decode and are answered with the seconds that took.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from kvpress import DecodingPress, KeyDiffPress, KnormPress, PrefillDecodingPress
from transformers import AutoModelForCausalLM, DynamicCache

PRESSES = {"key_diff": KeyDiffPress, "knorm": KnormPress}


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # nothing that a library prints may be taken for an answer
    setting = json.loads(sys.stdin.readline())
    torch.set_num_threads(setting["threads"])
    model = AutoModelForCausalLM.from_pretrained(setting["model"], dtype=getattr(torch, setting["dtype"])).eval()
    ids = torch.tensor([setting["prompt"]])
    ratio = max(0.0, 1 - setting["budget"] / ids.shape[1])
    press = PrefillDecodingPress(
        PRESSES[setting["policy"]](ratio),
        DecodingPress(
            PRESSES[setting["policy"]](), setting["interval"], setting["budget"], hidden_states_buffer_size=0
        ),
    )
    cache = DynamicCache(config=model.config)
    position = ids.shape[1]
    with torch.inference_mode(), press(model):
        token = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
        print(json.dumps({"cached": cache.layers[0].keys.shape[2]}), file=answers, flush=True)
        for line in sys.stdin:
            start = time.perf_counter()
            for _ in range(json.loads(line)):
                at = torch.tensor([position])
                token = (
                    model(token, past_key_values=cache, cache_position=at, position_ids=at[None], logits_to_keep=1)
                    .logits[:, -1:]
                    .argmax(-1)
                )
                position += 1
            seconds = time.perf_counter() - start
            print(json.dumps({"seconds": seconds, "cached": cache.layers[0].keys.shape[2]}), file=answers, flush=True)


if __name__ == "__main__":
    main()
