"""Inductor's freezing packs weights for the processor: what a graph then takes for constant must be so."""

from __future__ import annotations

import pytest
import torch

from tests._helpers.compiling import TinyModel, counting, greedy, no_recompiles

pytestmark = pytest.mark.compile


def feed(model: TinyModel, cache, rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A left-padded prompt of 20 columns, in eager mode; the first token and its positions."""
    tokens = torch.randint(0, 64, (rows, 20), generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(20) >= torch.arange(rows)[:, None] * (1 + seed)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(tokens, positions, cache, mask)
    return logits[:, -1:].argmax(-1), positions[:, -1:] + 1


@pytest.mark.parametrize("policy", ["key_diff", "expected_attention", "streaming_llm"])
def test_frozen_decoding_follows_the_cache(policy):
    """Other prompts, other padding and a reset between them reach the graph, though its weights are constants."""
    torch.manual_seed(0)
    model = TinyModel().eval()
    with counting(), torch.no_grad(), torch._inductor.config.patch(freezing=True):
        step = torch.compile(model, fullgraph=True, options={"freezing": True})
        caches = {run: model.make_cache(policy, batch=3) for run in (model, step)}
        results = {}
        for seed in range(3):
            for run, cache in caches.items():
                cache.reset()
                first, start = feed(model, cache, 3, seed)
                tokens = greedy(run, model, cache, first, start, steps=1)  # compiles, once
                with no_recompiles():
                    rest = greedy(run, model, cache, tokens[:, -1:], start + 1, steps=30)
                results[run] = (rest, cache.positions(0).clone(), cache.lengths(1).clone())
            for ours, expected in zip(results[step], results[model], strict=True):
                assert torch.equal(ours, expected)


def test_another_cache_object_is_not_taken_for_the_first():
    torch.manual_seed(0)
    model = TinyModel().eval()
    with counting(), torch.no_grad(), torch._inductor.config.patch(freezing=True):
        step = torch.compile(model, fullgraph=True, options={"freezing": True})
        for seed in range(2):
            expected, actual = (
                greedy(run, model, cache, *feed(model, cache, 2, seed), steps=12)
                for run in (model, step)
                for cache in [model.make_cache("knorm", batch=2)]
            )
            assert torch.equal(actual, expected)
