"""Models, calls and caches that cannot be served: each is refused, says why, and leaves the model as it was."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fastattn.integrations.transformers import compressed_cache, prefill
from tests._helpers.hf_models import make_causal_lm, make_model, ragged_prompt

pytestmark = [pytest.mark.transformers, pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")]

LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}

MODELS = {
    "frequencies that grow": ("Llama", {"rope_parameters": DYNAMIC_ROPE}, '"dynamic"'),
    "two sets of frequencies": ("Llama", {"rope_parameters": LONG_ROPE}, '"longrope"'),
    "windows only": ("Mistral", {"sliding_window": 16}, "sliding-window layers only"),
    "convolutions": ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "layers of type conv"),
    "both directions": ("Gemma3", {"head_dim": 16, "use_bidirectional_attention": True}, "bidirectional"),
    "layers that share a cache": ("Llama", {"num_kv_shared_layers": 1}, "share a cache"),
    "another implementation": ("Llama", {"attn_implementation": "flex_attention"}, "set_attn_implementation"),
}


@pytest.mark.parametrize("case", MODELS)
def test_models_that_cannot_be_served(case):
    architecture, options, reason = MODELS[case]
    refused(make_causal_lm(architecture, **options), reason)


def test_a_bidirectional_llama():
    model = make_model("llama")
    model.config.is_causal = False
    refused(model, "bidirectional")


def test_an_encoder_decoder():
    config = transformers.T5Config(vocab_size=100, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    refused(transformers.T5ForConditionalGeneration(config), "encoder-decoder")


def test_layers_that_use_the_mask_themselves():
    config = transformers.FalconConfig(vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    refused(transformers.FalconForCausalLM(config).eval(), "a forward pass of FalconModel over four tokens .* failed")


def test_layers_with_other_heads():
    model, other = make_model("llama"), make_model("llama", num_key_value_heads=4)
    model.model.layers[1].self_attn = other.model.layers[1].self_attn
    other.model.layers[1].self_attn.config = model.config
    refused(model, "layers of LlamaModel differ")


def test_a_layer_that_drops_keyword_arguments():
    model = make_model("llama")
    layer = model.model.layers[0].self_attn
    forward = layer.forward

    def deaf(*args, fastattn_cache=None, **kwargs):
        return forward(*args, **kwargs)

    layer.forward = deaf
    refused(model, "was not handed the argument 'fastattn_cache'")


def test_a_layer_that_goes_around_the_interface():
    model = make_model("llama")
    layer = model.model.layers[1].self_attn
    layer.forward = lambda hidden_states, **kwargs: (torch.zeros_like(hidden_states), None)
    refused(model, "layer 1 of LlamaModel made 0 calls")


def test_not_a_model():
    with pytest.raises(TypeError, match="model must be a transformers model with a decoder, got Linear"):
        compressed_cache(torch.nn.Linear(2, 2))


def refused(model, reason):
    implementation = model.config._attn_implementation
    training = [module.training for module in model.modules()]
    with pytest.raises(ValueError, match=reason):
        compressed_cache(model)
    assert model.config._attn_implementation == implementation
    assert [module.training for module in model.modules()] == training
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"policy": "newest"}, "expected_attention.*knorm"),
        ({"budget": 0}, "budget must be at least 1, got 0"),
        ({"policy": "streaming_llm", "budget": 2}, "budget"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"max_step": 0}, "max_step must be at least 1"),
    ],
)
def test_arguments_out_of_range(arguments, reason):
    model = make_model("llama")
    ids, _ = ragged_prompt()
    with torch.no_grad():
        before = model(ids).logits
        with pytest.raises(ValueError, match=reason):
            compressed_cache(model, **arguments)
        assert torch.equal(model(ids).logits, before)


CALLS = {
    "attention weights": ({"output_attentions": True}, "output_attentions=True is not supported"),
    "a prepared mask": ({"attention_mask": torch.zeros(3, 1, 40, 40)}, "got a prepared mask"),
    "a prepared boolean mask": ({"attention_mask": torch.ones(3, 1, 40, 40) > 0}, "got a prepared mask"),
    "a short mask": ({"attention_mask": torch.ones(3, 20)}, "with at least the 40 new columns"),
    "packed sequences": ({"cu_seq_lens_q": torch.tensor([0, 20, 40])}, "packed batch of sequences"),
    "restarting positions": ({"position_ids": (torch.arange(40) % 20).expand(3, -1)}, "position_ids must rise"),
    "both directions": ({"is_causal": False}, "is_causal must be True"),
}


@pytest.mark.parametrize("case", CALLS)
def test_calls_that_cannot_be_served(case):
    arguments, reason = CALLS[case]
    model = make_model("llama")
    ids, mask = ragged_prompt((40, 40, 40))
    cache = compressed_cache(model, "key_diff", 64, batch_size=3)
    with torch.no_grad(), pytest.raises(ValueError, match=reason):
        model(ids, past_key_values=cache, **arguments)
    assert int(cache.kv.columns) == 0
    assert int(cache.kv.lengths(0).max()) == 0
    with torch.no_grad():  # and the cache is as good as new
        expected = model(ids, attention_mask=mask, use_cache=False).logits[:, -1]
        found = model(ids, attention_mask=mask, past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_dropout_in_training():
    model = make_model("llama", attention_dropout=0.5)
    ids, _ = ragged_prompt()
    cache = compressed_cache(model, batch_size=3)
    with torch.no_grad(), pytest.raises(ValueError, match=r"dropout must be 0 .* call model\.eval\(\)"):
        model.train()(ids, past_key_values=cache)


def test_gradient_checkpointing():
    model = make_model("llama")
    ids, _ = ragged_prompt()
    cache = compressed_cache(model, batch_size=3)
    model.gradient_checkpointing_enable()
    with torch.no_grad(), pytest.raises(ValueError, match="gradient checkpointing"):
        model.train()(ids, past_key_values=cache)


def test_gradients():
    model = make_model("llama")
    ids, _ = ragged_prompt()
    with pytest.raises(ValueError, match="has no gradient"):
        model(ids, past_key_values=compressed_cache(model, batch_size=3))


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_a_batch_of_another_size(batch_size):
    model = make_model("llama")
    ids, mask = ragged_prompt()
    cache = compressed_cache(model, batch_size=batch_size)
    with pytest.raises(ValueError, match=rf"this cache has {batch_size}, got a call of 3\. Pass .*batch_size=3"):
        model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=2)


def test_beams_count_as_rows():
    model = make_model("llama")
    ids, mask = ragged_prompt()
    with pytest.raises(ValueError, match="this cache has 3, got a call of 6"):
        model.generate(
            ids,
            attention_mask=mask,
            past_key_values=compressed_cache(model, batch_size=3),
            max_new_tokens=2,
            num_beams=2,
        )


@pytest.mark.parametrize("options", [{"num_hidden_layers": 3}, {"num_key_value_heads": 4}, {"hidden_size": 128}])
def test_a_cache_from_another_model(options):
    model, other = make_model("llama"), make_model("llama", **options)
    ids, _ = ragged_prompt()
    cache = compressed_cache(other)
    compressed_cache(model)
    with torch.no_grad(), pytest.raises(ValueError, match="made for another model"):
        model(ids[:1], past_key_values=cache)


def test_a_cache_on_a_model_that_was_never_switched():
    model, other = make_model("llama"), make_model("llama")
    ids, _ = ragged_prompt()
    cache = compressed_cache(other)
    prefill(other, ids[:1], cache)
    for prompt in (ids[:1], ids[:1, :1]):
        with torch.no_grad(), pytest.raises(ValueError, match="made for another model"):
            model(prompt, past_key_values=cache)


def test_a_cache_on_a_model_that_was_switched_back():
    model = make_model("llama")
    ids, _ = ragged_prompt()
    cache = compressed_cache(model)
    model.set_attn_implementation("eager")
    with torch.no_grad(), pytest.raises(ValueError, match="call compressed_cache again"):
        model(ids[:1], past_key_values=cache)
    prefill(model, ids[:1], compressed_cache(model))
    assert model.config._attn_implementation == "fastattn"


def test_a_history_passed_again():
    model = make_model("llama")
    ids, mask = ragged_prompt()
    cache = compressed_cache(model, "key_diff", 64, batch_size=3)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
        with pytest.raises(ValueError, match="must go on after the cached tokens, got 0 in row 0 after 39"):
            model(ids, attention_mask=mask.repeat(1, 2), position_ids=positions, past_key_values=cache)
    assert cache.kv.tokens_seen.tolist() == [40, 27, 14]


def test_prefill_arguments():
    model = make_model("qwen2_windows")
    ids, mask = ragged_prompt()
    cache = compressed_cache(model, batch_size=3)
    with pytest.raises(TypeError, match="cache must come from compressed_cache, got NoneType"):
        prefill(model, ids, None)
    with pytest.raises(ValueError, match="input_ids must be"):
        prefill(model, ids[:, :0], cache)
    with pytest.raises(ValueError, match="chunk_size must be at least 1"):
        prefill(model, ids, cache, chunk_size=0)
    with pytest.raises(ValueError, match="this cache has 3, got a call of 1"):
        prefill(model, ids[:1], cache)
    with pytest.raises(ValueError, match="attention_mask must be"):
        prefill(model, ids, cache, attention_mask=mask[:, :7])
    prefill(model, ids, cache, attention_mask=mask)
    with pytest.raises(ValueError, match="held padding"):
        prefill(model, ids, cache, attention_mask=mask)


def test_cropping_beyond_a_window_changes_nothing():
    model = make_model("qwen2_windows")
    ids, _ = ragged_prompt()
    cache = compressed_cache(model, "key_diff", 64)
    prefill(model, ids[:1], cache)
    with pytest.raises(ValueError, match="sliding-window layer"):
        cache.crop(-3)
    assert int(cache.kv.columns) == 40
    assert cache.kv.lengths(0).tolist() == [[40, 40]]


def test_cropping_after_an_eviction_changes_nothing():
    model = make_model("llama")
    ids, _ = ragged_prompt()
    cache = compressed_cache(model, "key_diff", 16, max_step=4)
    prefill(model, ids[:1], cache)
    with pytest.raises(ValueError, match="no compression since"):
        cache.crop(-3)
    assert int(cache.kv.columns) == 40


def test_functions_that_wrap_every_registered_attention_function():
    """kvpress does that when imported: dropout then comes by position, whatever the function calls its arguments."""
    model = make_model("llama_eager")
    ids, mask = ragged_prompt()
    with torch.no_grad():
        plain = model(ids, attention_mask=mask).logits
        expected = prefill(model, ids, compressed_cache(model, batch_size=3), attention_mask=mask)
    calls = []

    def wrapped(function):
        def wrapper(module, query, key, value, attention_mask, dropout, **kwargs):
            calls.append(function)
            return function(module, query, key, value, attention_mask, dropout, **kwargs)

        return wrapper

    before = dict(ALL_ATTENTION_FUNCTIONS._local_mapping)
    try:
        for name, function in dict(ALL_ATTENTION_FUNCTIONS.items()).items():
            ALL_ATTENTION_FUNCTIONS[name] = wrapped(function)
        with torch.no_grad():
            assert torch.equal(model(ids, attention_mask=mask).logits, plain)
            found = prefill(model, ids, compressed_cache(model, batch_size=3), attention_mask=mask)
        assert torch.equal(found, expected)
        assert len(calls) == 4
    finally:
        ALL_ATTENTION_FUNCTIONS._local_mapping.clear()
        ALL_ATTENTION_FUNCTIONS._local_mapping.update(before)


def test_a_copied_model_is_served_and_a_saved_configuration_is_clean(tmp_path):
    model = make_model("llama")
    ids, mask = ragged_prompt()
    cache = compressed_cache(model, batch_size=3)
    expected = prefill(model, ids, cache, attention_mask=mask)
    with torch.no_grad():
        plain = model(ids, attention_mask=mask).logits
        twin = copy.deepcopy(model)
        del model
        assert torch.equal(twin(ids, attention_mask=mask).logits, plain)
    assert torch.equal(prefill(twin, ids, compressed_cache(twin, batch_size=3), attention_mask=mask), expected)
    twin.config.save_pretrained(tmp_path)
    assert "fastattn" not in (tmp_path / "config.json").read_text()


def test_an_implementation_set_by_hand():
    model = make_model("llama")
    model.config._attn_implementation = "fastattn"
    with pytest.raises(ValueError, match="set by compressed_cache"):
        model(ragged_prompt()[0])


def test_four_first_caches_at_once():
    """One thread's failed examination must not undo another's: examinations take turns."""
    from concurrent.futures import ThreadPoolExecutor

    model = make_model("llama")
    ids, mask = ragged_prompt((12, 12, 12))
    with ThreadPoolExecutor(4) as pool:
        caches = list(pool.map(lambda _: compressed_cache(model, "knorm", 64, batch_size=3), range(4)))
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, use_cache=False).logits
        for cache in caches:
            found = model(ids, attention_mask=mask, past_key_values=cache).logits
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_second_prompt_without_reset():
    model = make_model("llama")
    ids, mask = ragged_prompt((12, 12, 12))
    cache = compressed_cache(model, "knorm", 64, batch_size=3)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        with pytest.raises(ValueError, match=r"at least one new token, got none: .* cache\.reset\(\)"):
            model(ids[:, :0], attention_mask=mask, past_key_values=cache)
    assert int(cache.kv.columns) == ids.shape[1]
