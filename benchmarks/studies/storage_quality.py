"""What quantised storage costs: next-token loss of SmolLM2-135M-Instruct with a whole cache in each format.

``python -m benchmarks.studies.storage_quality [--quick] [--out DIR]``: 8 texts of 4,096 tokens (quick: 2 of 512), fed
in calls that append before they attend, so that every key and value, a token's own too, is read as stored. Nothing is
evicted. Every result is saved as soon as it is known, and a run goes on where it stopped.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch.nn import functional
from tqdm import tqdm

from benchmarks.studies import _common as common
from fastattn.integrations.transformers import compressed_cache

STORAGES = ("none", "int8", "fp8", "int4")
CALL = 512  # tokens of a call


def loss(model: Any, ids: torch.Tensor, storage: str | None) -> float:
    """Nats per token of ``ids [1, T]``."""
    cache = compressed_cache(
        model, "streaming_llm", budget=ids.shape[1], interval=1, max_step=CALL, batch_size=1, storage=storage
    )
    total = 0.0
    with torch.no_grad():
        for first in range(0, ids.shape[1] - 1, CALL):
            call = ids[:, first : first + CALL]
            target = ids[0, first + 1 : first + 1 + call.shape[1]]
            logits = model(input_ids=call, past_key_values=cache).logits[0, : target.shape[0]]
            total += float(functional.cross_entropy(logits.float(), target, reduction="sum"))
    return total / (ids.shape[1] - 1)


def main() -> None:
    from examples import smollm2

    given = common.parser(__doc__ or "").parse_args()
    texts, tokens = (2, 512) if given.quick else (8, 4096)
    note = common.conditions("cpu", model="SmolLM2-135M-Instruct", tokens=tokens, dtype="float32", eviction="none")
    path = given.out / "storage_quality.csv"
    rows = common.Rows(path, ("text", "storage"), ("loss",), note, given.fresh)
    model, tokenizer = smollm2.load()
    ids = torch.tensor(tokenizer(smollm2.long_text(), verbose=False).input_ids)
    step = (ids.shape[0] - tokens) // (texts - 1)
    for text, storage in tqdm([(text, storage) for text in range(texts) for storage in STORAGES]):
        if rows.missing(text=text, storage=storage):
            part = ids[None, text * step : text * step + tokens]
            found = loss(model, part, None if storage == "none" else storage)
            rows.add(text=text, storage=storage, loss=found)
    losses = {(row["text"], row["storage"]): float(row["loss"]) for row in rows}  # type: ignore[attr-defined]
    body = []
    for storage in STORAGES:
        more = [losses[str(text), storage] - losses[str(text), "none"] for text in range(texts)]
        body.append([storage, f"{statistics.fmean(more):+.5f}", f"{min(more):+.5f}", f"{max(more):+.5f}"])
    print(common.table(["storage", "nats per token above none, mean", "smallest", "largest"], body), f"\n\n{note}")


if __name__ == "__main__":
    main()
