"""Whatever can't be converted raises before any weight is changed, and says why."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fastattn import LowRankConfig, to_low_rank_
from fastattn.convert import calibrate

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.transformers

from tests._helpers.tiny_models import tiny_model, token_ids  # noqa: E402

OPTIONS = {"kv_lora_rank": 12, "qk_rope_head_dim": 8}


def refuse(model, message, config=None, calibration=None, error=ValueError, **options):
    """The conversion raises, and the model's modules and weights are what they were."""
    modules = dict(model.named_modules())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    training = model.training
    with pytest.raises(error, match=message):
        to_low_rank_(
            model,
            LowRankConfig(**OPTIONS) if config is None else config,
            token_ids(3, 60) if calibration is None else calibration,
            progress=False,
            **options,
        )
    assert dict(model.named_modules()) == modules
    assert model.training == training
    state = model.state_dict()
    assert state.keys() == weights.keys()
    assert all(torch.equal(state[name].nan_to_num(), value.nan_to_num()) for name, value in weights.items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not hasattr(model.config, "fastattn_low_rank")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_lora_rank": 57}, "kv_lora_rank must be at most 56 for this model, got 57"),
        ({"kv_lora_rank": 512}, "kv_lora_rank must be at most 56"),
        ({"q_lora_rank": 65}, "q_lora_rank must be at most 64 for this model, got 65"),
        ({"qk_rope_head_dim": 34}, "qk_rope_head_dim must be at most 32 for this model, got 34"),
        ({"freq_fold": 3}, "freq_fold must divide the 8"),
        ({"layers": "no such layer"}, "layers must match at least one of model.layers.0.self_attn"),
        ({"kv_lora_rank": None, "kv_rank_budget": 1}, "kv_rank_budget must be between 2"),
        ({"kv_lora_rank": None, "kv_rank_budget": 1000}, "kv_rank_budget must be between 2"),
    ],
)
def test_options_that_do_not_fit_the_model(options, message):
    refuse(tiny_model("llama"), message, LowRankConfig(**{**OPTIONS, **options}))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"kv_lora_rank": 0}, ValueError),
        ({"kv_lora_rank": 3.0}, TypeError),
        ({"q_lora_rank": True}, TypeError),
        ({"qk_rope_head_dim": 7}, ValueError),
        ({"qk_rope_head_dim": 0}, ValueError),
        ({"method": "svd"}, ValueError),
        ({"statistics": "both"}, ValueError),
        ({"rope_selection": "best"}, ValueError),
        ({"rope_mixing": "none"}, ValueError),
        ({"freq_fold": 0}, ValueError),
        ({"freq_fold": "all"}, TypeError),
        ({"damping": -0.1}, ValueError),
        ({"damping": float("nan")}, ValueError),
        ({"damping": "0.1"}, TypeError),
        ({"balance": 1}, TypeError),
        ({"layers": 3}, TypeError),
        ({"kv_rank_budget": 10}, ValueError),
    ],
)
def test_configuration_refuses_wrong_options(options, error):
    with pytest.raises(error, match=next(iter(options))):
        LowRankConfig(**options)


@pytest.mark.parametrize(
    ("calibration", "error", "message"),
    [
        (token_ids(1, 11), ValueError, "at least 12 tokens, the largest rank, got 11"),
        (torch.zeros(0, 10, dtype=torch.long), ValueError, "at least one sequence"),
        ([], ValueError, "at least one sequence"),
        (torch.zeros(3, 1, dtype=torch.long), ValueError, "at least two tokens"),
        (torch.zeros(3, 60), TypeError, "int64 or int32"),
        (torch.full((3, 60), 96), ValueError, "ids below 96"),
        (torch.full((3, 60), -1), ValueError, "ids below 96"),
        (torch.zeros(60, dtype=torch.long), ValueError, r"shape \[sequences, tokens\]"),
        ("text", TypeError, "token ids"),
        (["text"], TypeError, "token ids .*, got a list of str"),
    ],
)
def test_calibration_that_is_no_text(calibration, error, message):
    refuse(tiny_model("llama"), message, calibration=calibration, error=error)


def test_a_model_of_another_type():
    with pytest.raises(TypeError, match="model must be a transformers model, got str"):
        to_low_rank_("llama", LowRankConfig(**OPTIONS), token_ids(3, 60), progress=False)
    with pytest.raises(ValueError, match="transformers decoder"):
        to_low_rank_(nn.Identity(), LowRankConfig(**OPTIONS), token_ids(3, 60), progress=False)


def test_ranks_beyond_twice_the_hidden_size_are_refused_before_the_calibration_is_run():
    wide = {"head_dim": 64, "num_key_value_heads": 4}
    for name in ("kv_lora_rank", "q_lora_rank"):
        config = LowRankConfig(**{**OPTIONS, name: 129})
        refuse(tiny_model("llama", **wide), f"{name} must be at most 128 for this model", config)


def test_evaluation_is_checked_before_the_conversion():
    refuse(tiny_model("llama"), "evaluation must hold ids below 96", evaluation=torch.full((1, 9), 100))


def test_calibration_shorter_than_the_query_rank():
    config = LowRankConfig(kv_lora_rank=4, q_lora_rank=50, qk_rope_head_dim=8)
    refuse(tiny_model("llama"), "at least 50 tokens", config, token_ids(1, 49))


def test_nan_in_activations():
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[3] = float("nan")
    refuse(model, "NaN or infinity before model.layers.1.self_attn")
    with pytest.raises(ValueError, match="finite"):
        calibrate(model, token_ids(1, 20), progress=False)


def test_infinity_in_the_last_hidden_states():
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("inf")
    refuse(model, "NaN or infinity in the last hidden states")


@pytest.mark.parametrize("family", ["Qwen3", "Gemma3"])
def test_norm_on_keys_is_named(family):
    changes = {"head_dim": 16}
    name = "Gemma3" if family == "Gemma3" else family
    if family == "Gemma3":
        config = transformers.Gemma3TextConfig(
            vocab_size=96, hidden_size=64, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
        )  # fmt: skip
        model = transformers.Gemma3ForCausalLM(config).eval()
    else:
        model = tiny_model(name, **changes)
    refuse(model, "a norm on queries or keys stands between projection and RoPE")


def test_architectures_without_rotary_decoder_layers():
    config = transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    refuse(transformers.GPT2LMHeadModel(config).eval(), "transformers decoder")


def test_attention_that_is_latent_already():
    model = tiny_model("DeepseekV3", n_routed_experts=4, first_k_dense_replace=2, n_group=1, topk_group=1,
                       num_experts_per_tok=2, q_lora_rank=None)  # fmt: skip
    refuse(model, "model can't be converted")


def test_learned_sinks_are_parameters_that_low_rank_attention_lacks():
    model = tiny_model("llama")
    model.model.layers[0].self_attn.sinks = nn.Parameter(torch.zeros(4))
    refuse(model, r"parameters that LowRankAttention does not: \['sinks'\]")


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mistral", {"sliding_window": 32}, "sliding window of 32"),
        ("phi3", {"sliding_window": 32}, "sliding window of 32"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
    ],
)
def test_behavior_that_low_rank_attention_lacks(family, changes, message):
    refuse(tiny_model(family, **changes), message)


def test_a_window_of_zero_is_no_window():
    """Qwen2-MoE configurations say so where windows are switched off."""
    model = tiny_model("Qwen2Moe")
    assert model.config.sliding_window in (0, None)
    assert len(to_low_rank_(model, LowRankConfig(**OPTIONS), token_ids(3, 60), progress=False).layers) == 2


def test_window_as_long_as_the_longest_text_is_no_window():
    model = tiny_model("mistral", sliding_window=256)
    assert len(to_low_rank_(model, LowRankConfig(**OPTIONS), token_ids(3, 60), progress=False).layers) == 2


def test_wrapped_and_quantized_projections():
    class Adapter(nn.Linear):
        pass

    model = tiny_model("llama")
    model.model.layers[1].self_attn.k_proj = Adapter(64, 32, bias=False)
    refuse(model, "k_proj must be a plain nn.Linear with float weights, neither quantized nor sharded, got .*Adapter")
    model = tiny_model("llama")
    model.model.layers[0].self_attn.v_proj.weight = nn.Parameter(
        torch.zeros(32, 64, dtype=torch.int8), requires_grad=False
    )
    refuse(
        model,
        "v_proj must be a plain nn.Linear with float weights, .*nor sharded, got Linear of torch.int8",
    )


def test_attention_that_computes_something_else_is_found_by_its_output():
    model = tiny_model("llama")
    attention = model.model.layers[1].self_attn
    forward = attention.forward

    def capped(*args, **kwargs):
        output, weights = forward(*args, **kwargs)
        return output.tanh(), weights

    attention.forward = capped
    refuse(model, "model.layers.1.self_attn .* does not compute plain rotary attention")


def test_attention_that_computes_something_else_is_found_with_given_statistics_too():
    model = tiny_model("Cohere")  # its rotation pairs neighbors
    statistics = calibrate(model, token_ids(3, 60), progress=False)
    config = LowRankConfig(**OPTIONS, statistics="parallel")
    refuse(model, "model.layers.0.self_attn .* does not compute plain rotary attention", config, statistics)


def test_converting_twice():
    model = tiny_model("llama")
    to_low_rank_(model, LowRankConfig(**OPTIONS), token_ids(3, 60), progress=False)
    with pytest.raises(ValueError, match="converted already"):
        to_low_rank_(model, LowRankConfig(**OPTIONS), token_ids(3, 60), progress=False)


def test_statistics_of_another_model_or_for_a_sequential_conversion():
    statistics = calibrate(tiny_model("llama"), token_ids(3, 60), progress=False)
    refuse(tiny_model("llama"), 'statistics must be "parallel"', calibration=statistics)
    parallel = LowRankConfig(**OPTIONS, statistics="parallel")
    refuse(tiny_model("llama", num_hidden_layers=3), "statistics of this model", parallel, statistics)
    refuse(tiny_model("llama", hidden_size=32, head_dim=16), "statistics of this model", parallel, statistics)


def test_configuration_of_another_type():
    refuse(tiny_model("llama"), "config must be a LowRankConfig", config={"kv_lora_rank": 3}, error=TypeError)


def test_hooks_that_a_replaced_module_would_lose():
    for path in ("self_attn", "self_attn.k_proj"):
        model = tiny_model("llama")
        handle = model.model.layers[1].get_submodule(path).register_forward_hook(lambda *arguments: None)
        with pytest.raises(ValueError, match=r"model.layers.1.self_attn .*carries hooks"):
            to_low_rank_(model, LowRankConfig(**OPTIONS), token_ids(3, 60), progress=False)
        handle.remove()
        assert type(model.model.layers[0].self_attn).__name__ == "LlamaAttention"
