"""Faults that conversions had, each by its name."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.transformers

from fastattn import LowRankConfig, to_low_rank_  # noqa: E402
from tests._helpers.tiny_models import tiny_model, token_ids  # noqa: E402

CONFIG = LowRankConfig(kv_lora_rank=12, q_lora_rank=24, qk_rope_head_dim=8)


def test_a_clip_by_configuration_is_refused_whatever_the_text_reaches():
    model = tiny_model("Olmo", clip_qkv=1e6)
    with pytest.raises(ValueError, match=r"clip_qkv 1000000\.0: projections clipped before the rotation"):
        to_low_rank_(model, CONFIG, token_ids(3, 60), progress=False)


@pytest.mark.parametrize("parts", [("q_proj", "k_proj"), ("v_proj",), ("q_proj", "k_proj", "v_proj")])
def test_a_clip_beyond_the_text_is_found_by_probing(parts):
    model, ids = tiny_model("llama"), token_ids(3, 60)
    with torch.no_grad():
        hooks = [
            getattr(layer.self_attn, part).register_forward_hook(lambda m, a, out: seen.append(float(out.abs().max())))
            for layer in model.model.layers
            for part in parts
        ]
        seen: list[float] = []
        model(ids)
        largest = max(seen)
        for hook in hooks:
            hook.remove()

    def clipped(projection):
        plain = projection.forward
        return lambda x: plain(x).clamp(-1.01 * largest, 1.01 * largest)

    for layer in model.model.layers:
        for part in parts:
            projection = getattr(layer.self_attn, part)
            projection.forward = clipped(projection)
    with pytest.raises(ValueError, match=r"does not compute plain rotary attention.* inputs scaled far from"):
        to_low_rank_(model, CONFIG, ids, progress=False)


def test_the_global_random_state_is_left_as_it_was():
    model = tiny_model("llama")
    before = torch.get_rng_state()
    to_low_rank_(model, CONFIG, token_ids(3, 60), progress=False)
    assert torch.equal(torch.get_rng_state(), before)
