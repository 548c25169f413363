"""Whole DeepSeek models whose attention was replaced give the tokens they gave before."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastattn import LowRankAttention
from fastattn.modules import policy_names

transformers = pytest.importorskip("transformers")
from fastattn.integrations.transformers import compressed_cache, replace_attention_  # noqa: E402

pytestmark = pytest.mark.transformers

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}


def small_model(version: int, **options: Any) -> Any:
    torch.manual_seed(0)
    family = {2: "DeepseekV2", 3: "DeepseekV3"}[version]
    config = getattr(transformers, f"{family}Config")(
        **{
            "vocab_size": 97,
            "hidden_size": 48,
            "intermediate_size": 64,
            "moe_intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "kv_lora_rank": 24,
            "q_lora_rank": 20,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "max_position_embeddings": 256,
            "initializer_range": 0.2,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": None,
            **options,
        }
    )
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def prompt(rows: int = 1, tokens: int = 12) -> Tensor:
    return torch.randint(3, 97, (rows, tokens), generator=torch.Generator().manual_seed(rows))


def left_padded(real: list[int], tokens: int = 12) -> dict[str, Tensor]:
    mask = (torch.arange(tokens) >= tokens - torch.tensor(real)[:, None]).long()
    return {"input_ids": prompt(len(real), tokens) * mask, "attention_mask": mask}


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("options", [{}, {"q_lora_rank": None}, {"rope_parameters": YARN}], ids=["v", "full-q", "yarn"])
@pytest.mark.parametrize("version", [2, 3])
def test_logits_and_greedy_tokens_stay(version: int, options: dict[str, Any], implementation: str) -> None:
    before = small_model(version, **options)
    before.set_attn_implementation(implementation)
    after = replace_attention_(copy.deepcopy(before))
    assert all(isinstance(layer.self_attn, LowRankAttention) for layer in after.model.layers)
    assert set(after.state_dict()) == set(before.state_dict())
    padded = left_padded([12, 7, 1])
    right_padded = {name: value.flip(1) for name, value in padded.items()}
    for inputs in ({"input_ids": prompt(2)}, padded, right_padded):
        real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
        with torch.no_grad():
            expected, actual = (model(**inputs).logits[real] for model in (before, after))
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    for inputs in ({"input_ids": prompt(2)}, padded):
        expected, actual = (model.generate(**inputs, max_new_tokens=12, do_sample=False) for model in (before, after))
        assert torch.equal(actual, expected)


def test_decoding_over_a_growing_cache_holds_latents_and_is_absorbed(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastattn.modules.low_rank import paths

    taken = []
    for name in ("absorbed", "expanded"):
        original = getattr(paths, name)
        monkeypatch.setattr(paths, name, lambda *a, name=name, f=original: taken.append(name) or f(*a))
    model = replace_attention_(small_model(3))
    out = model.generate(prompt(), max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    assert taken == ["expanded"] * 2 + ["absorbed"] * 8
    layer = out.past_key_values.layers[0] if hasattr(out, "past_key_values") else out.cache.layers[0]
    assert layer.keys.shape == (1, 1, 16, 24)
    assert layer.values.shape == (1, 1, 16, 8)


POLICIES = policy_names()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("version", [2, 3])
def test_generate_over_a_compressed_cache_within_budget_gives_the_same_tokens(version: int, policy: str) -> None:
    before = small_model(version, rope_parameters=YARN)
    after = replace_attention_(copy.deepcopy(before))
    for inputs in ({"input_ids": prompt()}, left_padded([12, 7, 3])):
        cache = compressed_cache(after, policy, budget=64, batch_size=inputs["input_ids"].shape[0])
        assert (cache.kv.latent_rank, cache.kv.head_dim, cache.kv.num_kv_heads) == (24, 32, 1)
        settings = {"max_new_tokens": 12, "do_sample": False}
        expected = before.generate(**inputs, **settings)
        assert torch.equal(after.generate(**inputs, **settings, past_key_values=cache), expected)
        assert torch.equal(after.generate(**inputs, **settings), expected)  # the model is not bound to the cache
        assert cache.kv.tokens_seen.tolist() == [
            int(real) + 11 for real in inputs.get("attention_mask", torch.ones(1, 12)).sum(1)
        ]


def test_a_long_prompt_is_prefilled_expanded_and_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastattn.modules.low_rank import paths

    taken = []
    for name in ("absorbed_over_cache", "expanded_over_cache"):
        original = getattr(paths, name)
        monkeypatch.setattr(paths, name, lambda *a, name=name, f=original: taken.append(name) or f(*a))
    model = replace_attention_(small_model(3))  # break-even: T (2 * 24 - 22) <= 24 * 22, that is T <= 20
    cache = compressed_cache(model, "key_diff", budget=16, interval=4)
    out = model.generate(prompt(1, 40), max_new_tokens=10, do_sample=False, past_key_values=cache)
    assert out.shape == (1, 50)
    assert taken == ["expanded_over_cache"] * 2 + ["absorbed_over_cache"] * 18
    assert (cache.kv.lengths(0) < 20).all()


def test_eviction_in_generate_is_the_modules_own() -> None:
    model = replace_attention_(small_model(3))
    tokens = prompt(1, 30)
    cache = compressed_cache(model, "key_diff", budget=12, interval=4)
    attention = model.model.layers[0].self_attn
    own = attention.make_cache("key_diff", 12, interval=4)
    with torch.no_grad():
        model(input_ids=tokens, past_key_values=cache)
        hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(tokens))
        LowRankAttention.forward(attention, hidden, cache=own)
    assert torch.equal(cache.kv.positions(0), own.positions(0))
    torch.testing.assert_close(cache.kv.keys(0)[:, :, :12], own.keys(0)[:, :, :12])


def test_projections_are_the_same_modules_with_their_hooks() -> None:
    model = small_model(3)
    old = model.model.layers[0].self_attn
    calls: list[str] = []
    old.kv_b_proj.register_forward_hook(lambda *_: calls.append("kv_b_proj"))
    replace_attention_(model)
    new = model.model.layers[0].self_attn
    assert new.q_a_proj is old.q_a_proj
    assert new.kv_a_layernorm is old.kv_a_layernorm
    model.generate(prompt(), max_new_tokens=4, do_sample=False)
    assert len(calls) == 4  # absorbed decoding asks the projection too


def test_training_through_a_replaced_model_gives_the_same_gradients() -> None:
    before = small_model(3).train()
    after = replace_attention_(copy.deepcopy(before))
    for model in (before, after):
        model(input_ids=prompt(2), labels=prompt(2)).loss.backward()
    for (name, one), other in zip(before.named_parameters(), after.parameters(), strict=True):
        if one.grad is not None:
            torch.testing.assert_close(other.grad, one.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_what_cannot_be_replaced_is_refused_and_nothing_changes() -> None:
    with pytest.raises(ValueError, match=r"DeepseekV2Attention or DeepseekV3Attention, got Linear with no attention"):
        replace_attention_(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"torch.nn.Module, got str"):
        replace_attention_("model")
    hooked = small_model(3)
    hooked.model.layers[1].self_attn.register_forward_hook(lambda *_: None)
    dropping = small_model(3, attention_dropout=0.1)
    dynamic = small_model(3)
    dynamic.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    for model, message in [
        (hooked, "must carry no hooks of its own"),
        (dropping, "attention_dropout 0, got 0.1"),
        (dynamic, "got 'dynamic'"),
    ]:
        with pytest.raises(ValueError, match=message):
            replace_attention_(model)
        assert not any(isinstance(module, LowRankAttention) for module in model.modules())


def test_masks_and_arguments_that_are_not_supported_are_refused() -> None:
    model = replace_attention_(small_model(3))
    packed = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    packed[..., 3:, :3] = False
    with torch.no_grad(), pytest.raises(ValueError, match="causal with padding at either end"):
        model(input_ids=prompt(1, 6), attention_mask=packed)
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    with torch.no_grad(), pytest.raises(ValueError, match="needs a DynamicCache or fastattn's compressed_cache"):
        model(input_ids=prompt(1, 6), past_key_values=cache)
