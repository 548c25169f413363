"""Calls of transformers models that failed, or failed with a misleading message, in the field."""

from __future__ import annotations

import copy
import threading

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from torch._subclasses.fake_tensor import FakeTensorMode

from fastattn import LowRankConfig, to_low_rank_
from fastattn.integrations.deepseek import replace_attention_
from fastattn.integrations.transformers import compressed_cache, prefill
from tests._helpers.hf_models import make_model, ragged_prompt
from tests._helpers.tiny_models import tiny_model, token_ids
from tests.integrations.test_deepseek_models import small_model

pytestmark = [pytest.mark.transformers, pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")]
GREEDY = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 12}
NO_ROTATION = ("knorm", "key_diff", "streaming_llm")


def gpt2():
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=100, n_embd=64, n_layer=2, n_head=4, n_positions=256)
    ).eval()


def opt():
    torch.manual_seed(0)
    config = transformers.OPTConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64, word_embed_proj_dim=64
    )
    return transformers.OPTForCausalLM(config).eval()


def two_rotary_embeddings():
    model = make_model("llama")
    second = copy.deepcopy(model.model.rotary_emb)
    second.inv_freq.mul_(0.5)
    model.model.layers[1].rotary_emb = second
    return model


UNROTATED = {
    "gpt2": (gpt2, "no rotary embedding"),
    "opt": (opt, "no rotary embedding"),
    "two rotary embeddings": (two_rotary_embeddings, "several rotary embeddings"),
}


@pytest.mark.parametrize("policy", NO_ROTATION)
@pytest.mark.parametrize("case", UNROTATED)
@pytest.mark.parametrize("rows", [(40,), (40, 25, 9)], ids=["one row", "left-padded"])
def test_policies_that_need_no_rotation_serve_models_that_have_none_or_several(case, policy, rows):
    model = UNROTATED[case][0]()
    ids, mask = ragged_prompt(rows)
    cache = compressed_cache(model, policy, 64)
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(model.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY), expected)
    assert cache.kv.tokens_seen.tolist() == [length + 11 for length in rows]
    small = compressed_cache(model, policy, 8, interval=4)
    model.generate(ids, attention_mask=mask, past_key_values=small, **GREEDY)
    assert int(small.kv.lengths(0).max()) <= 12


@pytest.mark.parametrize("case", UNROTATED)
def test_policies_that_look_ahead_say_why_such_a_model_cannot_have_them(case):
    make, reason = UNROTATED[case]
    with pytest.raises(ValueError, match=f"policy must do without the model's rotation, .*{reason}"):
        compressed_cache(make(), "expected_attention", 8)


def test_a_cache_takes_the_batch_size_of_its_first_call():
    model = make_model("llama")
    ids, mask = ragged_prompt()
    sized = compressed_cache(model, "key_diff", 16, batch_size=6)
    expected = model.generate(ids, attention_mask=mask, num_beams=2, past_key_values=sized, **GREEDY)
    cache = compressed_cache(model, "key_diff", 16)
    assert torch.equal(model.generate(ids, attention_mask=mask, num_beams=2, past_key_values=cache, **GREEDY), expected)
    assert cache.batch_size == 6
    with pytest.raises(ValueError, match=r"this cache has 6, got a call of 1\. Pass compressed_cache"):
        model(ids[:1], past_key_values=cache)
    cache.reset()
    with torch.no_grad():
        model(ids[:2], past_key_values=cache)
    assert cache.batch_size == 2


@pytest.mark.parametrize("name", ["llama", "qwen2_windows"])
def test_a_second_prompt_without_reset_is_told_to_reset(name):
    model = make_model(name)
    ids, mask = ragged_prompt()
    cache = compressed_cache(model, "key_diff", 64)
    model.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)
    with pytest.raises(ValueError, match=r"at least one new token, got none: .* call cache\.reset\(\)"):
        model(ids[:, :0], past_key_values=cache)
    cache.reset()
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(model.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY), expected)


def test_generate_goes_on_after_prefill():
    model = make_model("llama")
    ids, _ = ragged_prompt((40,))
    cache = compressed_cache(model, "key_diff", 64)
    prefill(model, ids[:, :-1], cache)
    expected = model.generate(ids, **GREEDY)
    assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY), expected)


def test_use_cache_false_with_a_cache_is_named():
    model = make_model("llama")
    with pytest.raises(ValueError, match="use_cache must not be False in a call that brings a compressed cache"):
        model(ragged_prompt((9,))[0], use_cache=False, past_key_values=compressed_cache(model))


def test_weights_that_are_not_here_are_named():
    model = make_model("llama")
    model.model.layers[1].self_attn.k_proj.to("meta")
    with pytest.raises(ValueError, match=r"k_proj\.weight is on the meta device, and no hook .*never loaded"):
        compressed_cache(model)


def test_an_examination_that_fails_says_what_failed():
    model = make_model("llama")

    def broken(*args, **kwargs):
        raise RuntimeError("the moon is in the wrong place")

    model.model.layers[1].mlp.forward = broken
    with pytest.raises(ValueError, match=r"failed \(RuntimeError: the moon is in the wrong place\)"):
        compressed_cache(model)


def test_threads_that_ask_for_their_first_cache_at_once_all_get_one():
    model = make_model("llama")
    ids, mask = ragged_prompt()
    with torch.no_grad():
        plain = model(ids, attention_mask=mask).logits
    caches, errors, barrier = [], [], threading.Barrier(4)

    def ask():
        barrier.wait()
        try:
            caches.append(compressed_cache(model, "key_diff", 64))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    with torch.no_grad():
        for cache in caches:
            logits = model(ids, attention_mask=mask, past_key_values=cache).logits
            torch.testing.assert_close(logits[mask.bool()], plain[mask.bool()], rtol=0, atol=1e-5)


MIXED = {
    "llama": lambda: make_model("llama"),
    "converted": lambda: converted(),
    "deepseek": lambda: replace_attention_(small_model(3)),
}


def converted():
    model = tiny_model("llama")
    config = LowRankConfig(kv_lora_rank=12, q_lora_rank=24, qk_rope_head_dim=8)
    to_low_rank_(model, config, token_ids(3, 60), progress=False)
    return model


@pytest.mark.parametrize("kind", MIXED)
@pytest.mark.parametrize("made_inside", [True, False])
def test_a_cache_of_either_side_of_autocast_has_the_weights_dtype(kind, made_inside):
    model, ids = MIXED[kind](), token_ids(1, 20)
    with torch.autocast("cpu", torch.bfloat16, enabled=made_inside):
        cache = compressed_cache(model, "key_diff", 64)
    assert cache.kv.dtype == torch.float32
    with torch.no_grad():
        exact = model(ids, use_cache=False).logits[:, -4:]
        with torch.autocast("cpu", torch.bfloat16):
            rounded = model(ids, use_cache=False).logits[:, -4:].float()
        for inside in (not made_inside, made_inside):
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                found = [model(part, past_key_values=cache).logits.float() for part in (ids[:, :-4], ids[:, -4:])]
            allowed = 2 * float((rounded - exact).norm()) if inside else 1e-4 * float(exact.norm())
            assert float((found[1] - exact).norm()) <= allowed
            cache.reset()
    assert compressed_cache(model).kv.dtype == torch.float32


def test_an_examination_under_fake_tensors_is_named():
    model = make_model("llama")
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError, match="examined with real tensors"):
        compressed_cache(model)
    compressed_cache(model)


def test_positions_on_several_axes_are_named():
    text = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4}
    config = transformers.Qwen2VLConfig(text_config={**text, **heads, **rope}, vision_config=vision)
    model = transformers.Qwen2VLForConditionalGeneration(config).eval()
    for policy in ("knorm", "expected_attention"):
        with pytest.raises(ValueError, match=r"counts positions on several axes \(mrope_section"):
            compressed_cache(model, policy, 64)
