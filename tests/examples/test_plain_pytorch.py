"""A model of plain PyTorch over ``CompressedKVCache.attend``."""

from __future__ import annotations

import pytest
import torch

from examples import plain_pytorch


@pytest.fixture(scope="module")
def model() -> plain_pytorch.Model:
    torch.manual_seed(0)
    return plain_pytorch.Model().eval()


@torch.inference_mode()
@pytest.mark.parametrize("policy", plain_pytorch.POLICIES)
def test_within_budget_the_logits_are_those_of_full_attention(model: plain_pytorch.Model, policy: str) -> None:
    tokens = torch.randint(256, (2, 60))
    cache = model.make_cache(policy, budget=64, batch_size=2)
    parts = [model(part, cache) for part in tokens.split([40, 1, 1, 5, *[1] * 13], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens), rtol=1e-4, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("policy", plain_pytorch.POLICIES)
def test_beyond_the_budget_the_cache_stays_bounded(model: plain_pytorch.Model, policy: str) -> None:
    tokens = torch.randint(256, (2, 120))
    cache = model.make_cache(policy, budget=32, batch_size=2, interval=8)
    full = model(tokens)
    before = cache.nbytes
    prompt = model(tokens[:, :80], cache)
    torch.testing.assert_close(prompt, full[:, :80], rtol=1e-4, atol=1e-5)  # a prompt is attended in full
    assert (cache.lengths(0) == 32).all()
    after = torch.cat([model(tokens[:, i : i + 1], cache) for i in range(80, 120)], dim=1)
    assert after.isfinite().all()
    assert (after - full[:, 80:]).abs().max() > 1e-3  # something was evicted
    assert cache.nbytes == before
    assert all(cache.keys(layer).shape[2] == 40 for layer in range(plain_pytorch.LAYERS))
    assert cache.tokens_seen.tolist() == [120, 120]


def test_the_command_prints_a_row_for_every_cache(capsys: pytest.CaptureFixture[str]) -> None:
    plain_pytorch.main(["--steps", "2", "--tokens", "90", "--budget", "40"])
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["full", *plain_pytorch.POLICIES]
    assert all(5.0 < float(row.split()[2]) < 12.0 for row in rows)
