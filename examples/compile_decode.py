"""Compile a real model's decoding over a compressed cache, and count what the compiler did.

    python -m examples.compile_decode

SmolLM2 reads a prompt, then decodes in one graph while its cache is compressed again and again. Prints the tokens, the
number of graphs, and tokens per second: eager with a full cache, eager and compiled with a compressed one, and the peer
kvpress where its environment is set up (see benchmarks/kvpress_parity.py).
"""

from __future__ import annotations

import argparse
import copy
import inspect

import torch

from benchmarks import decode_step
from examples import smollm2
from fastattn.integrations.transformers import compressed_cache


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)  # no options but --help
    model, tokenizer = smollm2.load(torch.bfloat16)
    keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    ids = tokenizer(smollm2.long_text()[:6000], return_tensors="pt").input_ids[:, :1000]

    cache = compressed_cache(model, policy="key_diff", budget=256, interval=16)
    step = torch.compile(model.__call__, fullgraph=True)  # raises on a graph break
    with torch.no_grad():
        logits = model(ids, **{keyword: cache}).logits
        for mode, run, own in (("eager", model, copy.deepcopy(cache)), ("compiled", step, cache)):
            token, position, out = logits[:, -1:].argmax(-1), torch.tensor([[ids.shape[1]]]), []
            for _ in range(80):  # 5 compressions
                token = run(input_ids=token, position_ids=position, **{keyword: own}).logits[:, -1:].argmax(-1)
                position = position + 1
                out.append(int(token))
            print(f"{mode:9} {tokenizer.decode(out[:24])!r}")
    from torch._dynamo.utils import counters

    print(f"graphs: {counters['stats']['unique_graphs']}, breaks: {sum(counters['graph_break'].values())}")
    decode_step.main(["--prompt", "2048", "--budget", "512", "--rounds", "7"])


if __name__ == "__main__":
    main()
