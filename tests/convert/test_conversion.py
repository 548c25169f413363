"""Whole models: exact at full rank, what the options do, the report, and an old model kept where anything fails."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from fastattn import LowRankAttention, LowRankConfig, to_low_rank_
from fastattn.convert import calibrate, held_out_loss

pytest.importorskip("transformers")
pytestmark = pytest.mark.transformers

from tests._helpers.tiny_models import FAMILIES, logits, tiny_model, token_ids  # noqa: E402

FULL = LowRankConfig(kv_lora_rank=None, qk_rope_head_dim=None)
SMALL = LowRankConfig(kv_lora_rank=12, q_lora_rank=24, qk_rope_head_dim=8)


def convert(model, config, calibration=None, **options):
    calibration = token_ids(3, 60) if calibration is None else calibration
    return to_low_rank_(model, config, calibration, progress=False, **options)


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


def attention_types(model) -> list[type]:
    return [type(layer.self_attn) for layer in model.model.layers]


@pytest.mark.parametrize("statistics", ["sequential", "parallel"])
@pytest.mark.parametrize("family", FAMILIES)
def test_full_rank_and_all_rope_dims_give_the_originals_logits(family, statistics):
    model, ids = tiny_model(family), token_ids(2, 100, seed=1)
    expected = logits(model, ids)
    convert(model, LowRankConfig(kv_lora_rank=None, qk_rope_head_dim=None, statistics=statistics))
    assert all(issubclass(kind, LowRankAttention) for kind in attention_types(model))
    assert relative(logits(model, ids), expected) < 1e-4


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_full_rank_query_factors_give_the_originals_logits(family):
    model, ids = tiny_model(family), token_ids(2, 40, seed=1)
    expected = logits(model, ids)
    report = convert(model, LowRankConfig(kv_lora_rank=None, q_lora_rank=64, qk_rope_head_dim=None))
    assert relative(logits(model, ids), expected) < 1e-4
    assert report.layers[0].query_error < 1e-6


def test_padding_positions_and_growing_caches_are_served_like_the_original():
    model, converted = tiny_model("qwen2"), tiny_model("qwen2")
    convert(converted, FULL)
    ids, mask = token_ids(3, 20, seed=2), torch.ones(3, 20, dtype=torch.long)
    mask[1, :7] = 0
    mask[2, :1] = 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    assert torch.equal(converted.generate(ids, **options), model.generate(ids, **options))
    right = mask.flip(1)
    expected, got = logits(model, ids, attention_mask=right), logits(converted, ids, attention_mask=right)
    assert relative(got[right.bool()], expected[right.bool()]) < 1e-4


def test_a_growing_cache_holds_latents():
    model = tiny_model("llama")
    convert(model, SMALL)
    with torch.no_grad():
        cache = model(token_ids(1, 9)).past_key_values
    shapes = [tuple(cache.layers[0].keys.shape), tuple(cache.layers[0].values.shape)]
    assert shapes == [(1, 1, 9, 12), (1, 1, 9, 8)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"output_attentions": True, "use_cache": False}, "output_attentions"),
        ({"attention_mask": torch.ones(1, 1, 6, 6, dtype=torch.bool), "use_cache": False}, "causal with padding"),
    ],
)
def test_calls_that_low_rank_attention_cannot_serve_raise(arguments, message):
    model = tiny_model("llama", attn_implementation="eager")
    convert(model, SMALL)
    with pytest.raises(ValueError, match=message):
        model(token_ids(1, 6), **arguments)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_padding_between_the_turns_of_a_growing_cache_is_refused_and_nothing_stored(implementation):
    model = tiny_model("llama", attn_implementation=implementation)
    convert(model, SMALL)
    ids, mask = token_ids(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[1, 4:7] = 0  # the first turn padded on the right
    with torch.no_grad():
        cache = model(ids[:, :7], attention_mask=mask[:, :7]).past_key_values
        with pytest.raises(ValueError, match="padding between the tokens of row 1"):
            model(ids[:, 7:], attention_mask=mask, past_key_values=cache)
        assert cache.get_seq_length() == 7
        banded = torch.zeros(2, 1, 5, 12).masked_fill(torch.ones(5, 12).tril(7).triu(5) == 0, -torch.inf)
        with pytest.raises(ValueError, match="causal with padding"):
            model(ids[:, 7:], attention_mask=banded, past_key_values=cache)
        assert cache.get_seq_length() == 7


def test_static_cache_is_refused_by_name():
    model = tiny_model("llama")
    convert(model, SMALL)
    with pytest.raises(ValueError, match="DynamicCache"):
        model.generate(token_ids(1, 6), max_new_tokens=3, cache_implementation="static", disable_compile=True)


def test_float16_and_bfloat16_models_keep_their_dtype():
    for dtype in (torch.float16, torch.bfloat16):
        model, ids = tiny_model("llama", dtype=dtype), token_ids(1, 30, seed=1)
        expected = logits(model, ids)
        convert(model, FULL)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        assert model.model.layers[0].self_attn.inv_freq.dtype == torch.float32
        assert relative(logits(model, ids).float(), expected.float()) < 0.1


def test_float64_model_is_exact_far_below_float32():
    model, ids = tiny_model("llama", dtype=torch.float64), token_ids(1, 30, seed=1)
    expected = logits(model, ids)
    convert(model, FULL)
    # transformers rotates in float32 tables: the agreement ends there
    assert relative(logits(model, ids), expected) < 2e-6


def test_gradients_and_training_mode_are_left_as_they_were():
    model = tiny_model("llama").train()
    for parameter in model.model.layers[0].self_attn.parameters():
        parameter.requires_grad_(False)
    convert(model, SMALL)
    first, second = (layer.self_attn for layer in model.model.layers)
    assert all(module.training for module in model.modules())
    assert not any(parameter.requires_grad for parameter in first.parameters())
    assert all(parameter.requires_grad for parameter in second.parameters())
    model(token_ids(1, 8), labels=token_ids(1, 8), use_cache=False).loss.backward()
    assert second.kv_b_proj.weight.grad.abs().sum() > 0


def test_filter_converts_only_what_it_names():
    for layers in (r"layers\.1\.", lambda name: ".1." in name):
        model, ids = tiny_model("llama"), token_ids(1, 20, seed=1)
        expected = logits(model, ids)
        report = convert(model, LowRankConfig(kv_lora_rank=None, qk_rope_head_dim=None, layers=layers))
        assert [row.name for row in report.layers] == ["model.layers.1.self_attn"]
        assert [issubclass(kind, LowRankAttention) for kind in attention_types(model)] == [False, True]
        assert relative(logits(model, ids), expected) < 1e-4


def test_budget_is_spent_and_given_to_layers_unevenly():
    model = tiny_model("llama")
    with torch.no_grad():  # a layer whose keys and values have few directions needs few ranks
        first = model.model.layers[0].self_attn
        for projection in (first.k_proj, first.v_proj):
            projection.weight.copy_(projection.weight[:, :3] @ torch.randn(3, 64) * 0.5)
    report = convert(model, LowRankConfig(kv_lora_rank=None, qk_rope_head_dim=8, kv_rank_budget=30))
    ranks = [row.kv_lora_rank for row in report.layers]
    assert sum(ranks) == 30
    assert ranks[0] < ranks[1]


def test_given_statistics_give_what_the_text_gives():
    ids, config = token_ids(3, 60), LowRankConfig(kv_lora_rank=12, qk_rope_head_dim=8, statistics="parallel")
    from_text, from_statistics = tiny_model("qwen2"), tiny_model("qwen2")
    statistics = calibrate(from_statistics, ids, progress=False)
    convert(from_text, config, ids)
    convert(from_statistics, config, statistics)
    assert statistics.tokens == 180
    torch.testing.assert_close(logits(from_statistics, ids), logits(from_text, ids), rtol=1e-3, atol=1e-3)


def test_sequential_statistics_see_the_converted_layers():
    """The second layer's statistics are its inputs in the model whose first layer is converted."""
    ids = token_ids(3, 60)
    model = tiny_model("llama")
    convert(model, LowRankConfig(kv_lora_rank=4, qk_rope_head_dim=8), ids)
    halfway = tiny_model("llama")
    convert(halfway, LowRankConfig(kv_lora_rank=4, qk_rope_head_dim=8, layers=r"\.0\."), ids)
    convert_rest = LowRankConfig(kv_lora_rank=4, qk_rope_head_dim=8, layers=r"\.1\.", statistics="parallel")
    moments = calibrate(halfway, ids, progress=False)
    rest = tiny_model("llama")
    convert(rest, convert_rest, moments)
    got, expected = (m.model.layers[1].self_attn.state_dict() for m in (model, rest))
    weights = [s["kv_b_proj.weight"] @ s["kv_a_proj_with_mqa.weight"][:4] for s in (got, expected)]
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-3, atol=1e-4)


def test_loss_optimal_is_never_worse_than_plain_svd_on_the_same_statistics():
    statistics = calibrate(tiny_model("llama"), token_ids(4, 60), progress=False)
    errors = {}
    for method in ("loss_optimal", "plain_svd"):
        for rank in (2, 8, 20, 40):
            config = LowRankConfig(kv_lora_rank=rank, qk_rope_head_dim=8, method=method, statistics="parallel")
            errors[method, rank] = [row.joint_error for row in convert(tiny_model("llama"), config, statistics).layers]
        for low, high in ((2, 8), (8, 20), (20, 40)):
            assert all(a >= b - 1e-9 for a, b in zip(errors[method, low], errors[method, high], strict=True))
    for rank in (2, 8, 20, 40):
        for optimal, plain in zip(errors["loss_optimal", rank], errors["plain_svd", rank], strict=True):
            assert optimal <= plain + 1e-9


def test_reported_errors_are_those_of_the_projections_on_the_text():
    """Key, value and query errors recomputed from the new weights and the activations, at rope dims 0 of rotation."""
    model, ids = tiny_model("llama"), token_ids(4, 60)
    original = model.model.layers[0].self_attn
    inputs = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids)).detach().double().flatten(0, 1)
    expected = inputs @ original.v_proj.weight.detach().double().T
    report = convert(model, SMALL, ids)
    state = {name: value.double() for name, value in model.model.layers[0].self_attn.state_dict().items()}
    latent = inputs @ state["kv_a_proj_with_mqa.weight"][:12].T
    up = state["kv_b_proj.weight"].view(4, 16 + 16, 12)[::2, 16:].reshape(32, 12)
    error = float((latent @ up.T - expected).norm() / expected.norm())
    assert report.layers[0].value_error == pytest.approx(error, rel=1e-3)


def test_report_holds_prints_saves_and_plots_the_cost(tmp_path):
    pytest.importorskip("matplotlib")
    model, held_out = tiny_model("llama"), token_ids(2, 40, seed=5)
    before = held_out_loss(model, held_out)
    report = convert(model, SMALL, evaluation=held_out)
    assert (report.loss_before, report.loss_after) == (before, held_out_loss(model, held_out))
    row = report.layers[0]
    assert (row.kv_lora_rank, row.q_lora_rank, row.qk_rope_head_dim) == (12, 24, 8)
    assert (row.cache_bytes_before, row.cache_bytes_after) == (2 * 2 * 16 * 4, (12 + 8) * 4)
    for name in ("key_error", "value_error", "query_error", "joint_error", "rope_error"):
        assert 0 < getattr(row, name) < 1
    assert report.peak_memory_bytes is None or report.peak_memory_bytes > 2**20
    assert report.seconds > 0
    table = str(report)
    assert "model.layers.1.self_attn" in table
    assert "512 -> 160 bytes per token (68.8% less)" in table
    report.save_json(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(json.dumps(report.as_dict()))
    report.plot(tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 1000


def test_interrupted_conversion_goes_on_from_its_finished_layers(tmp_path, monkeypatch):
    from fastattn.convert import conversion

    ids, whole = token_ids(3, 60), tiny_model("llama")
    convert(whole, SMALL, ids)
    model = tiny_model("llama")
    expected = logits(model, ids)
    factor, calls = conversion.build_factors, []

    def fail_on_second(*args, **kwargs):
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return factor(*args, **kwargs)

    monkeypatch.setattr(conversion, "build_factors", fail_on_second)
    with pytest.raises(KeyboardInterrupt):
        convert(model, SMALL, ids, resume_dir=tmp_path)
    assert torch.equal(logits(model, ids), expected)
    assert not hasattr(model.config, "fastattn_low_rank")
    report = convert(model, SMALL, ids, resume_dir=tmp_path)
    assert len(calls) == 3  # the first layer was not factored again
    assert torch.equal(logits(model, ids), logits(whole, ids))
    assert [row.name for row in report.layers] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    with pytest.raises(ValueError, match="resume_dir"):
        convert(tiny_model("llama", seed=1), SMALL, ids, resume_dir=tmp_path)
    with pytest.raises(ValueError, match="resume_dir"):
        convert(tiny_model("llama"), SMALL, token_ids(3, 60, seed=9), resume_dir=tmp_path)


def test_finished_layers_of_other_settings_or_other_layers_are_not_taken_over(tmp_path):
    ids = token_ids(3, 60)
    convert(tiny_model("llama"), SMALL, ids, resume_dir=tmp_path / "rope")
    other = tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    with pytest.raises(ValueError, match="resume_dir"):
        convert(other, SMALL, ids, resume_dir=tmp_path / "rope")
    every, last = (replace(SMALL, layers=chosen) for chosen in (lambda name: True, lambda name: ".1." in name))
    convert(tiny_model("llama"), every, ids, resume_dir=tmp_path / "layers")
    with pytest.raises(ValueError, match="resume_dir"):
        convert(tiny_model("llama"), last, ids, resume_dir=tmp_path / "layers")


def test_resumed_layers_are_as_trainable_as_the_originals(tmp_path):
    for _ in range(2):
        model = tiny_model("llama").requires_grad_(False)
        convert(model, SMALL, resume_dir=tmp_path)
        assert not any(parameter.requires_grad for parameter in model.parameters())


def test_calibration_under_autocast_converts():
    model, ids = tiny_model("llama"), token_ids(3, 60)
    expected = logits(model, ids)
    with torch.autocast("cpu", torch.bfloat16):
        convert(model, FULL, ids)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert relative(logits(model, ids), expected) < 1e-4


@pytest.mark.parametrize("statistics", ["sequential", "parallel"])
def test_the_default_device_does_not_matter(statistics):
    ids = token_ids(3, 60)
    config = LowRankConfig(kv_lora_rank=None, qk_rope_head_dim=8, kv_rank_budget=24, statistics=statistics)
    expected, model = tiny_model("llama"), tiny_model("llama")
    given = calibrate(expected, ids, progress=False) if statistics == "parallel" else ids
    convert(expected, config, given)
    with torch.device("meta"):  # helper tensors that were made there would have no values
        convert(model, config, given)
    assert torch.equal(logits(model, ids), logits(expected, ids))


def test_failure_after_the_swap_puts_the_old_attention_back(monkeypatch):
    from fastattn.convert import conversion

    model, ids = tiny_model("llama"), token_ids(3, 60)
    expected, losses = logits(model, ids), []

    def fail_second_time(*args, **kwargs):
        losses.append(None)
        if len(losses) == 2:
            raise RuntimeError("out of memory")
        return 0.0

    monkeypatch.setattr(conversion, "held_out_loss", fail_second_time)
    with pytest.raises(RuntimeError, match="out of memory"):
        convert(model, SMALL, ids, evaluation=ids)
    assert torch.equal(logits(model, ids), expected)
    assert not hasattr(model.config, "fastattn_low_rank")


def test_uniform_selection_gives_all_layers_one_rotation_so_that_policies_can_look_ahead():
    from fastattn.integrations.transformers import compressed_cache

    model = tiny_model("llama", num_hidden_layers=3)
    convert(model, LowRankConfig(kv_lora_rank=12, qk_rope_head_dim=8, rope_selection="uniform", freq_fold=2))
    first, *others = (layer.self_attn.inv_freq for layer in model.model.layers)
    assert all(torch.equal(first, other) for other in others)
    cache = compressed_cache(model, policy="expected_attention", budget=8, interval=4)
    out = model.generate(token_ids(1, 20), past_key_values=cache, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert out.shape == (1, 26)
    assert int(cache.kv.lengths(0).max()) <= 12
