"""Faults that conversions had, each by its name."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.transformers

from fastattn import LowRankConfig, to_low_rank_  # noqa: E402
from fastattn.convert import calibrate  # noqa: E402
from fastattn.integrations.transformers import compressed_cache, prefill  # noqa: E402
from tests._helpers.hf_models import ragged_prompt  # noqa: E402
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


GREEDY = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 8}


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
def test_layers_that_pass_on_only_what_they_name_are_served():
    model = tiny_model("StableLm")  # its layers hand no further keywords to their attention, nor positions
    to_low_rank_(model, CONFIG, token_ids(3, 60), progress=False)
    ids, mask = ragged_prompt((30, 20), columns=30)
    ids = ids.clamp(max=95)
    plain = model.generate(ids, attention_mask=mask, use_cache=False, **GREEDY)
    cache = compressed_cache(model, "knorm", 64)
    assert torch.equal(model.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY), plain)
    assert cache.kv.tokens_seen.tolist() == [37, 27]
    small = compressed_cache(model, "expected_attention" if cache.kv.rotary is not None else "knorm", 8, interval=4)
    model.generate(ids, attention_mask=mask, past_key_values=small, **GREEDY)
    assert int(small.kv.lengths(0).max()) <= 12


def adapted(model):
    """As peft wraps a model: the model is two attributes down, and attributes are looked up there."""

    class Adapted(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.base_model = torch.nn.Module()
            self.base_model.model = inner

        def merge_and_unload(self):
            return self.base_model.model

        def get_input_embeddings(self):
            return self.base_model.model.get_input_embeddings()

    return Adapted(model)


def test_a_model_with_adapters_around_it_is_told_to_merge_them():
    model = adapted(tiny_model("llama"))
    for call in (lambda: to_low_rank_(model, CONFIG, token_ids(3, 60)), lambda: calibrate(model, token_ids(3, 60))):
        with pytest.raises(ValueError, match=r"got Adapted with adapters around one: call its merge_and_unload\(\)"):
            call()
    to_low_rank_(model.merge_and_unload(), CONFIG, token_ids(3, 60), progress=False)


@pytest.mark.parametrize("kind", [transformers.BatchEncoding, dict])
def test_what_a_tokenizer_returns_is_told_to_be_taken_apart(kind):
    model, text = tiny_model("llama"), kind({"input_ids": token_ids(3, 60), "attention_mask": torch.ones(3, 60)})
    said = rf'must be token ids, got {kind.__name__}: pass its \["input_ids"\]'
    with pytest.raises(TypeError, match=f"calibration {said}"):
        to_low_rank_(model, CONFIG, text, progress=False)
    with pytest.raises(TypeError, match=f"calibration {said}"):
        calibrate(model, text, progress=False)
    with pytest.raises(TypeError, match=f"input_ids {said}"):
        prefill(model, text, compressed_cache(model, "knorm", 64))
