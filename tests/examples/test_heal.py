"""The healing loop: it trains the attention and nothing else, and wins loss back."""

from __future__ import annotations

import copy

import pytest
import torch

from fastattn import LowRankConfig, to_low_rank_
from fastattn.convert import add_latent_norm_, held_out_loss

pytest.importorskip("transformers")
pytestmark = pytest.mark.transformers

from examples.heal import heal, training_loss  # noqa: E402
from tests._helpers.tiny_models import tiny_model, token_ids  # noqa: E402


def test_distillation_is_zero_for_the_teachers_own_predictions():
    logits, ids = torch.randn(2, 5, 7), token_ids(2, 5, vocabulary=7)
    assert float(training_loss(logits, ids, logits, 1.0)) == pytest.approx(0.0, abs=1e-6)
    plain = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert float(training_loss(logits, ids, None, 1.0)) == pytest.approx(float(plain), rel=1e-5)
    assert float(training_loss(logits, ids, logits, 0.25)) == pytest.approx(0.75 * float(plain), rel=1e-5)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("distill", [0.0, 0.5])
def test_healing_lowers_the_loss_and_trains_only_attention(norm, distill):
    original, text = tiny_model("llama"), token_ids(3, 60)
    model = copy.deepcopy(original)
    to_low_rank_(model, LowRankConfig(kv_lora_rank=4, qk_rope_head_dim=8), text, progress=False)
    if norm:
        add_latent_norm_(model, text)
    before, start = held_out_loss(original, text), held_out_loss(model, text)
    kept = {name: value.clone() for name, value in model.state_dict().items() if "self_attn" not in name}
    teacher = original if distill else None
    taken = heal(model, text, minutes=5, steps=25, teacher=teacher, distill=distill, rate=3e-3)
    assert taken == 25
    assert held_out_loss(model, text) < start
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in kept.items())
    assert before == held_out_loss(original, text)
