"""The example that trains with low-rank attention, in small."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples import train_low_rank as example


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "BATCH", 4)
    monkeypatch.setattr(example, "CONTEXT", 32)


@pytest.mark.usefixtures("small")
def test_both_models_learn_and_decode(tmp_path: Path) -> None:
    results = example.run(steps=12, every=6, decoded=6, compiled=False)
    assert [r.name for r in results] == ["multi-head", "low-rank"]
    for result in results:
        assert result.held_out[-1][1] < result.train_losses[0] - 1
        assert result.tokens_per_second > 0
        assert result.sample
    assert results[0].cache_bytes_per_token == 6 * results[1].cache_bytes_per_token
    pytest.importorskip("matplotlib")
    example.plot(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("attend", [example.MultiHeadAttention, example.low_rank_attention])
def test_decoding_gives_the_logits_of_one_pass(attend: type) -> None:
    torch.manual_seed(0)
    model = example.ByteModel(attend).eval()
    tokens = example.text()[1][None, :40]
    cache = model.blocks[0].attention.make_cache("streaming_llm", 48, num_layers=example.LAYERS)
    with torch.no_grad():
        parts = [model(part, cache) for part in tokens.split([32, *[1] * 8], dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(tokens), rtol=1e-4, atol=1e-5)
