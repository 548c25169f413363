"""A decode step leaves Python: torch.export and AOTInductor, with the cache as module state."""

from __future__ import annotations

import io

import pytest
import torch
from torch import Tensor, nn

from fastattn import CompressedKVCache
from tests._helpers.compiling import TinyModel, greedy

pytestmark = pytest.mark.compile
STEPS, PROMPT = 24, 10


class Step(nn.Module):
    """One decode step of a model over its own cache."""

    def __init__(self, model: TinyModel, cache: CompressedKVCache) -> None:
        super().__init__()
        self.model, self.cache = model, cache

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        return self.model(tokens, position_ids, self.cache)


def prefilled(policy: str) -> tuple[Step, Tensor]:
    torch.manual_seed(0)
    model = TinyModel().eval()
    cache = model.make_cache(policy)
    logits = model(torch.arange(PROMPT)[None], torch.arange(PROMPT)[None], cache)
    return Step(model, cache), logits[:, -1:].argmax(-1)


def decode(step, first: Tensor) -> Tensor:
    return greedy(lambda t, p, _: step(t, p), None, None, first, torch.tensor([[PROMPT]]), STEPS)


@pytest.mark.parametrize("policy", ["knorm", "expected_attention"])
def test_an_exported_step_gives_the_same_tokens_after_reloading(policy):
    with torch.no_grad():
        step, first = prefilled(policy)
        example = (first, torch.tensor([[PROMPT]]))
        exported = torch.export.export(step, example)
        file = io.BytesIO()
        torch.export.save(exported, file)
        file.seek(0)
        reloaded = torch.export.load(file).module()
        got = decode(reloaded, first)
        expected = decode(step, first)
    assert torch.equal(got, expected)
    assert int(reloaded.cache.tokens_seen) == int(step.cache.tokens_seen) == PROMPT + STEPS
    lengths = reloaded.get_buffer("cache.layers.1.lengths")
    assert torch.equal(lengths, step.cache.lengths(1))  # evicted in the exported program as well
    assert int(lengths.max()) < PROMPT + STEPS


def test_an_ahead_of_time_package_gives_the_same_tokens(tmp_path):
    with torch.no_grad():
        step, first = prefilled("key_diff")
        exported = torch.export.export(step, (first, torch.tensor([[PROMPT]])))
        path = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "step.pt2"))
        package = torch._inductor.aoti_load_package(path)
        got, expected = decode(package, first), decode(step, first)
    assert torch.equal(got, expected)
