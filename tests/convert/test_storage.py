"""Converted models on disk, and in DeepSeek-V3's layout."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from fastattn import LowRankConfig, to_low_rank_
from fastattn.convert import add_latent_norm_, calibrate, export_deepseek_v3, load_low_rank, save_low_rank
from fastattn.convert.attention import ConvertedAttention
from fastattn.convert.conversion import CONFIG_ENTRY
from fastattn.convert.families import fresh_rotary

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")
pytestmark = pytest.mark.transformers

from safetensors.torch import save_file  # noqa: E402

from tests._helpers.tiny_models import logits, tiny_model, token_ids  # noqa: E402


def converted(family: str, config: LowRankConfig | None = None, **changes):
    model = tiny_model(family, **changes)
    config = config or LowRankConfig(kv_lora_rank=12, q_lora_rank=24, qk_rope_head_dim=8)
    to_low_rank_(model, config, token_ids(3, 60), progress=False)
    return model


def with_latent_norm(model, *, frequencies: bool = True):
    """The model with a norm on its latents, as training would leave it: norm weights that are not one."""
    generator = torch.Generator().manual_seed(7)
    for index, layer in enumerate(model.model.layers):
        old = layer.self_attn
        inv_freq = old.inv_freq if frequencies else torch.rand(old.inv_freq.shape, generator=generator)
        new = ConvertedAttention(**(old.arguments() | {"latent_norm": True}), inv_freq=inv_freq, layer_idx=index)
        new.load_state_dict(old.state_dict() | {"inv_freq": inv_freq}, strict=False)
        for name in ("kv_a_layernorm", "q_a_layernorm"):
            norm = getattr(new, name, None)
            if norm is not None:
                norm.weight.data = 1 + 0.3 * torch.randn(norm.weight.shape, generator=generator)
        layer.self_attn = new.eval()
    return model


EVEN = {"rope_selection": "uniform", "freq_fold": 2, "qk_rope_head_dim": 8}


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3-partial-rotary", "llama-yarn"])
def test_round_trip_gives_the_same_logits_and_tokens(family, tmp_path):
    model, ids = converted(family), token_ids(2, 20, seed=1)
    model.generation_config.eos_token_id = None
    save_low_rank(model, tmp_path / "model")
    loaded = load_low_rank(tmp_path / "model")
    assert type(loaded) is type(model)
    assert not loaded.training
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(loaded.generate(ids, **options), model.generate(ids, **options))


def test_round_trip_of_tied_embeddings_mixed_layers_ranks_and_half_precision(tmp_path):
    config = LowRankConfig(kv_lora_rank=None, qk_rope_head_dim=8, kv_rank_budget=30, layers=r"layers\.[01]\.")
    model = converted("llama", config, tie_word_embeddings=True, num_hidden_layers=3, dtype=torch.bfloat16)
    # a cast rounds the tables that the unconverted layer rotates with; loading makes them anew
    model.model.rotary_emb = fresh_rotary(model.model)
    save_low_rank(model, tmp_path)
    loaded, ids = load_low_rank(tmp_path), token_ids(1, 20, seed=1)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    assert loaded.config.fastattn_low_rank["layers"].keys() == {f"model.layers.{i}.self_attn" for i in (0, 1)}


def test_folder_is_the_old_model_or_the_new_one(tmp_path, monkeypatch):
    first, second = converted("llama"), converted("llama", seed=1)
    save_low_rank(first, tmp_path / "model")
    ids = token_ids(1, 20, seed=1)

    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("safetensors.torch.save_file", fail)
        with pytest.raises(KeyboardInterrupt):
            save_low_rank(second, tmp_path / "model")
    assert torch.equal(logits(load_low_rank(tmp_path / "model"), ids), logits(first, ids))
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
    save_low_rank(second, tmp_path / "model")
    assert torch.equal(logits(load_low_rank(tmp_path / "model"), ids), logits(second, ids))
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_what_cannot_be_loaded_again_is_not_saved_over_what_can(tmp_path):
    model, ids = converted("llama"), token_ids(1, 20, seed=1)
    save_low_rank(model, tmp_path / "model")

    class Wrapper(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.config = model, model.config

    for wrapped in (torch.compile(model), Wrapper()):
        with pytest.raises(ValueError, match="must be of a class of transformers"):
            save_low_rank(wrapped, tmp_path / "model")
    with pytest.raises(ValueError, match="on the meta device"):
        save_low_rank(converted("llama").to("meta"), tmp_path / "model")
    assert torch.equal(logits(load_low_rank(tmp_path / "model"), ids), logits(model, ids))


def test_files_beside_the_model_stay_and_an_older_models_weights_go(tmp_path):
    model, folder = converted("llama"), tmp_path / "model"
    tiny_model("llama").save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "runs").mkdir()
    (folder / "runs" / "log").write_text("1.5")
    link = tmp_path / "link"
    link.symlink_to(folder)
    save_low_rank(model, link)
    assert link.is_symlink()
    assert (folder / "runs" / "log").read_text() == "1.5"
    names = {"config.json", "generation_config.json", "low_rank.safetensors", "runs", "tokenizer.json"}
    names.add("model.safetensors.index.json")  # says what loads the folder
    assert {entry.name for entry in folder.iterdir()} == names
    assert {entry.name for entry in tmp_path.iterdir()} == {"link", "model"}
    with pytest.raises(ValueError, match="must be a folder or new, got the file"):
        save_low_rank(model, folder / "tokenizer.json")
    assert (folder / "tokenizer.json").read_text() == "{}"


def test_what_is_made_under_inference_mode_can_be_trained(tmp_path):
    ids = token_ids(3, 60)
    with torch.inference_mode():
        statistics = calibrate(tiny_model("llama"), ids, progress=False)
    model = tiny_model("llama")
    with torch.inference_mode():
        config = LowRankConfig(kv_lora_rank=12, qk_rope_head_dim=8, statistics="parallel")
        to_low_rank_(model, config, statistics, ids, progress=False)
        add_latent_norm_(model, ids)
        save_low_rank(model, tmp_path)
        loaded = load_low_rank(tmp_path)
    for each in (model, loaded):
        each(ids, labels=ids).loss.backward()
        assert all(parameter.grad is not None for parameter in each.parameters())


def test_from_pretrained_refuses_the_folder_instead_of_filling_in_random_weights(tmp_path):
    save_low_rank(converted("llama"), tmp_path)
    for loader in (transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM, transformers.AutoModel):
        with pytest.raises(OSError, match=r"load-this-folder-with-fastattn\.convert\.load_low_rank"):
            loader.from_pretrained(tmp_path)
    load_low_rank(tmp_path)


def test_saving_an_unconverted_model_and_loading_another_folder(tmp_path):
    with pytest.raises(ValueError, match="must be converted"):
        save_low_rank(tiny_model("llama"), tmp_path / "new")
    assert not (tmp_path / "new").exists()
    tiny_model("llama").save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="written by save_low_rank"):
        load_low_rank(tmp_path / "plain")


def test_loading_weights_that_do_not_fit_the_configuration(tmp_path):
    save_low_rank(converted("llama"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["num_hidden_layers"] = 3
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="weights must fit the configuration"):
        load_low_rank(tmp_path)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"q_lora_rank": 24}),
        ("llama-mha", {}),
        ("mistral", {"tie_word_embeddings": True}),
        ("qwen2", {"q_lora_rank": 40}),
        ("phi3", {}),
    ],
)
def test_export_gives_the_same_tokens_as_deepseek_v3(family, options, tmp_path):
    changes = {name: options.pop(name) for name in ("tie_word_embeddings",) if name in options}
    model = with_latent_norm(converted(family, LowRankConfig(kv_lora_rank=12, **EVEN, **options), **changes))
    export_deepseek_v3(model, tmp_path)
    theirs, info = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = token_ids(2, 30, seed=1)
    torch.testing.assert_close(logits(theirs.eval(), ids), logits(model, ids), rtol=1e-4, atol=1e-4)
    tokens = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    assert torch.equal(theirs.generate(ids, **tokens), model.generate(ids, **tokens))


def test_export_says_what_the_layout_cannot_hold(tmp_path):
    def refuse(model, message):
        with pytest.raises(ValueError, match=message):
            export_deepseek_v3(model, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    even = LowRankConfig(kv_lora_rank=12, **EVEN)
    refuse(tiny_model("llama"), "layer 0 must be LowRankAttention")
    refuse(converted("llama", even), "latent_norm=False: .* untuned converted model")
    refuse(with_latent_norm(converted("llama", even), frequencies=False), "evenly spaced")
    refuse(with_latent_norm(converted("qwen2", even)), "bias on the query's heads")
    budget = LowRankConfig(kv_lora_rank=None, kv_rank_budget=25, **EVEN)
    refuse(with_latent_norm(converted("llama", budget)), 'kv_lora_rank must be one number .*rank_allocation="uniform"')


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("Gemma", {"head_dim": 16}, "differ by"),  # scaled embeddings, norms of 1 + weight
        ("Granite", {"residual_multiplier": 0.5, "logits_scaling": 2.0}, "differ by"),
        ("Arcee", {}, "need .'model.layers.0.mlp.gate_proj.weight'"),
        ("Olmo", {}, "without rms_norm_eps"),
    ],
)
def test_models_that_do_more_than_deepseeks_layers_are_not_exported(family, changes, message, tmp_path):
    model = converted(family, LowRankConfig(kv_lora_rank=12, **EVEN), **changes)
    with pytest.raises(ValueError, match=message):
        export_deepseek_v3(with_latent_norm(model), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_added_norms_start_near_the_converted_model_and_export(tmp_path):
    """The fit undoes the norms where every token's latent has the same size."""
    model, ids = converted("llama", LowRankConfig(kv_lora_rank=12, q_lora_rank=24, **EVEN)), token_ids(3, 60)
    inputs = {}
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.kv_a_proj_with_mqa.register_forward_hook(
            lambda module, args, output, index=index: inputs.__setitem__(index, output[..., :12])
        )
    logits(model, ids)
    plain = dict(inputs)
    add_latent_norm_(model, ids)
    logits(model, ids)
    first = model.model.layers[0].self_attn
    fitted = first.kv_a_layernorm(inputs[0]).detach()
    error = float((fitted - plain[0]).norm() / plain[0].norm())
    unfitted = float((fitted / first.kv_a_layernorm.weight.detach() - plain[0]).norm() / plain[0].norm())
    assert error < 0.5
    assert error < unfitted
    export_deepseek_v3(model, tmp_path)
    theirs = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits(theirs, ids), logits(model, ids), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="without norms"):
        add_latent_norm_(model, ids)


def test_norms_are_not_fitted_to_latents_that_are_not_finite():
    model = converted("llama")
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[3] = float("nan")
    with pytest.raises(ValueError, match="finite latents"):
        add_latent_norm_(model, token_ids(3, 60))
    assert all(layer.self_attn.kv_a_layernorm is None for layer in model.model.layers)


def test_loaded_model_generates_over_a_compressed_cache_within_budget_and_beyond(tmp_path):
    from fastattn.integrations.transformers import compressed_cache

    model, ids = converted("qwen2"), token_ids(2, 20, seed=1)
    save_low_rank(model, tmp_path)
    loaded = load_low_rank(tmp_path)
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **options)
    roomy = compressed_cache(loaded, policy="key_diff", budget=64, batch_size=2)
    assert torch.equal(loaded.generate(ids, past_key_values=roomy, **options), expected)
    tight = compressed_cache(loaded, policy="key_diff", budget=8, batch_size=2, interval=4)
    assert loaded.generate(ids, past_key_values=tight, **options).shape == expected.shape
    assert int(tight.kv.lengths(0).max()) <= 12
    assert tight.kv.keys(0).shape == (2, 1, 12, 12 + 8)


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_from_pretrained_fails_on_what_save_pretrained_wrote_and_names_the_loader(family, tmp_path, monkeypatch):
    model, shown = converted(family), []
    model.save_pretrained(tmp_path)
    handler = logging.Handler()
    handler.emit = lambda record: shown.append(record.getMessage())
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [handler])
    for loader in (transformers.AutoModelForCausalLM, type(model), transformers.AutoModel):
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            loader.from_pretrained(tmp_path)
        assert "load_with_fastattn_convert_load_low_rank" in "".join(shown)
        shown.clear()
    assert torch.equal(logits(load_low_rank(tmp_path), token_ids(1, 9)), logits(model, token_ids(1, 9)))


def test_states_of_converted_models_from_before_the_marker_load(tmp_path):
    model = converted("llama")
    old = {name: value for name, value in model.state_dict().items() if ".k_proj." not in name}
    assert len(old) == len(model.state_dict()) - 2 * len(model.model.layers)
    converted("llama").load_state_dict(old)  # strict
    save_low_rank(model, tmp_path)
    entry = json.loads((tmp_path / "config.json").read_text())
    for layer in entry[CONFIG_ENTRY]["layers"].values():
        assert layer.pop("replaces") == "k_proj"
    (tmp_path / "config.json").write_text(json.dumps(entry))
    save_file(old, tmp_path / "low_rank.safetensors")
    assert torch.equal(logits(load_low_rank(tmp_path), token_ids(1, 9)), logits(model, token_ids(1, 9)))


@pytest.mark.parametrize("shards", ["50GB", "20KB"])
def test_a_folder_of_save_pretrained_is_loaded(shards, tmp_path):
    model, ids = converted("llama"), token_ids(2, 20, seed=1)
    model.save_pretrained(tmp_path / "checkpoint", max_shard_size=shards)
    assert (tmp_path / "checkpoint" / "model.safetensors").exists() == (shards == "50GB")
    assert torch.equal(logits(load_low_rank(tmp_path / "checkpoint"), ids), logits(model, ids))


@pytest.mark.parametrize("shards", ["50GB", "20KB"])
def test_a_folder_of_two_models_is_not_guessed_about(shards, tmp_path):
    model = converted("llama")
    save_low_rank(model, tmp_path)
    model.save_pretrained(tmp_path, max_shard_size=shards)
    with pytest.raises(ValueError, match=r"one model, got .* both low_rank\.safetensors and model.*: delete the older"):
        load_low_rank(tmp_path)
    save_low_rank(model, tmp_path)  # takes the whole place
    load_low_rank(tmp_path)


def test_loading_in_another_dtype_keeps_the_frequencies(tmp_path):
    model = converted("llama")
    save_low_rank(model, tmp_path / "model")
    loaded = load_low_rank(tmp_path / "model", dtype=torch.bfloat16, device="cpu")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    for layer, original in zip(loaded.model.layers, model.model.layers, strict=True):
        assert torch.equal(layer.self_attn.inv_freq, original.self_attn.inv_freq)
    with pytest.raises(TypeError, match="dtype must be a floating-point"):
        load_low_rank(tmp_path / "model", dtype=torch.int8)
