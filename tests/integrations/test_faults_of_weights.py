"""Faults around weights: quantized, offloaded, sharded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from fastattn import LowRankAttention, LowRankConfig, to_low_rank_  # noqa: E402
from fastattn.integrations.deepseek import replace_attention_  # noqa: E402
from fastattn.integrations.transformers import compressed_cache  # noqa: E402
from tests._helpers.hf_models import make_model  # noqa: E402
from tests._helpers.latent import inputs, small_module  # noqa: E402
from tests._helpers.tiny_models import tiny_model, token_ids  # noqa: E402
from tests._helpers.weights import dynamically_quantized, offload_, with_linear_only_weights_  # noqa: E402
from tests.integrations.test_deepseek_models import small_model  # noqa: E402

pytestmark = [pytest.mark.transformers, pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")]
CONFIG = LowRankConfig(kv_lora_rank=12, q_lora_rank=24, qk_rope_head_dim=8)


def converted() -> Any:
    model = tiny_model("llama")
    to_low_rank_(model, CONFIG, token_ids(3, 60), progress=False)
    return model


def steps(model: Any, cache: Any) -> Tensor:
    """Logits of a prompt and three tokens after it, over ``cache``."""
    ids, logits = token_ids(1, 12), []
    with torch.no_grad():
        for here in (slice(0, 9), *[slice(i, i + 1) for i in range(9, 12)]):
            logits.append(model(ids[:, here], past_key_values=cache, use_cache=True).logits)
    return torch.cat(logits, dim=1)


def growing(model: Any) -> Any:
    return transformers.DynamicCache(config=model.config)


# -- quantized -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("options", [{}, {"q_lora_rank": None}], ids=["low-rank query", "full-rank query"])
@pytest.mark.parametrize("order", ["quantized first", "replaced first"])
def test_quantized_layers_without_parameters_are_asked_for_their_output(version, options, order):
    plain = small_model(version, first_k_dense_replace=2, **options)  # some releases' routers read weights themselves
    exact, quantized = steps(plain, growing(plain)), dynamically_quantized(plain)
    theirs = steps(quantized, growing(quantized))
    if order == "quantized first":
        ours = replace_attention_(quantized)
    else:  # the projections are the same modules
        ours = dynamically_quantized(replace_attention_(copy.deepcopy(plain)))
    allowed = 2 * float((theirs - exact).norm())  # what quantized activations cost
    for cache in (growing(ours), compressed_cache(ours, "expected_attention", 64)):
        found = steps(ours, cache)
        assert float((found - exact).norm()) <= allowed
        assert float((found - theirs).norm()) <= allowed


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("first", [True, False], ids=["quantized first", "replaced first"])
def test_weights_that_only_a_linear_layer_reads_are_served(version, first):
    theirs = with_linear_only_weights_(small_model(version))
    expected = steps(theirs, growing(theirs))
    ours = replace_attention_(theirs if first else small_model(version))
    if not first:
        with_linear_only_weights_(ours)
    for cache in (growing(ours), compressed_cache(ours, "snap_kv", 64)):
        torch.testing.assert_close(steps(ours, cache), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("absorb", [True, False])
def test_a_module_of_such_weights_decodes_as_it_computes_without_a_cache(absorb):
    module: LowRankAttention = with_linear_only_weights_(small_module(dtype=torch.float32))  # type: ignore[assignment]
    hidden, cache = inputs(1, 8, dtype=torch.float32), module.make_cache("knorm", 16)
    with torch.no_grad():
        expected = module(hidden)
        found = [module(hidden[:, here], cache=cache, absorb=absorb) for here in (slice(0, 6), slice(6, 8))]
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "phi3"])
@pytest.mark.parametrize(
    ("quantize", "named"),
    [
        (dynamically_quantized, r"torch\.ao\.nn\.quantized\.dynamic\.modules\.linear\.Linear"),
        (with_linear_only_weights_, r"Linear whose weight is a tests\._helpers\.weights\.LinearOnly"),
        (lambda model: model.to(torch.float8_e4m3fn), r"Linear of torch\.float8_e4m3fn"),
    ],
)
def test_a_conversion_names_the_layer_and_the_class_that_it_cannot_read(family, quantize, named):
    model = quantize(tiny_model(family))
    with pytest.raises(ValueError, match=rf"layers\.0\.self_attn .*_proj must be a plain nn\.Linear .* got {named}"):
        to_low_rank_(model, CONFIG, token_ids(3, 60), progress=False)


# -- offloaded -------------------------------------------------------------------------------------------------------

MODELS = {
    "llama": lambda: make_model("llama"),
    "deepseek": lambda: replace_attention_(small_model(3)),
    "converted": converted,
}


@pytest.mark.parametrize("kind", MODELS)
def test_offloaded_weights_are_fetched_for_a_compressed_cache(kind):
    model = MODELS[kind]()
    expected = steps(model, growing(model))
    offload_(model)
    assert next(model.parameters()).is_meta
    cache = compressed_cache(model, "expected_attention" if kind != "converted" else "knorm", 64)
    torch.testing.assert_close(steps(model, cache), expected, rtol=1e-4, atol=1e-4)
    assert cache.kv.device.type == "cpu"


def test_offloaded_attention_is_replaced_with_its_hooks_and_keeps_its_frequencies():
    model = small_model(3)
    expected = steps(model, growing(model))
    replace_attention_(offload_(model))
    assert not any(module.inv_freq.is_meta for module in model.modules() if isinstance(module, LowRankAttention))
    for cache in (growing(model), compressed_cache(model, "expected_attention", 64)):
        torch.testing.assert_close(steps(model, cache), expected, rtol=1e-4, atol=1e-4)


def test_offloaded_or_missing_frequencies_are_named():
    llama = make_model("llama")
    llama.model.rotary_emb.inv_freq = llama.model.rotary_emb.inv_freq.to("meta")
    for model in (llama, offload_(converted(), buffers=True)):
        with pytest.raises(ValueError, match=r"rotary frequencies must be on a device.*offload_buffers=True"):
            compressed_cache(model, "knorm", 64)


def test_a_conversion_of_offloaded_weights_names_offloading():
    with pytest.raises(ValueError, match="weights are offloaded by accelerate, load the model whole"):
        to_low_rank_(offload_(tiny_model("llama")), CONFIG, token_ids(3, 60), progress=False)


# -- sharded ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def mesh(tmp_path: Path) -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_sharded_weights_are_named_and_a_cache_made_before_sharding_serves(mesh):
    from torch.distributed.fsdp import fully_shard

    def sharded(model: Any) -> Any:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    for call in (
        lambda: compressed_cache(sharded(make_model("llama")), "knorm", 64),
        lambda: compressed_cache(sharded(converted()), "knorm", 64),
    ):
        with pytest.raises(ValueError, match=r"must be whole on every rank, .* is sharded otherwise \(fully_shard\)"):
            call()
    with pytest.raises(ValueError, match=r"neither quantized nor sharded, got Linear whose weight is a .*\.DTensor"):
        to_low_rank_(sharded(tiny_model("llama")), CONFIG, token_ids(3, 60), progress=False)
    model = make_model("llama")
    expected, cache = steps(model, growing(model)), compressed_cache(model, "knorm", 64)
    torch.testing.assert_close(steps(sharded(model), cache), expected, rtol=1e-4, atol=1e-4)


def test_weights_split_between_ranks_are_named_where_heads_are_counted():
    model = replace_attention_(small_model(3))
    for layer in model.model.layers:
        for name, dim in (("q_b_proj", 0), ("kv_b_proj", 0), ("o_proj", 1)):  # a rank's half of the heads
            projection = getattr(layer.self_attn, name)
            projection.weight = torch.nn.Parameter(projection.weight.chunk(2, dim)[0].contiguous())
    for call in (lambda: model(token_ids(1, 9)), lambda: compressed_cache(model, "knorm", 64)):
        with pytest.raises(ValueError, match=r"heads of 20 dims, got 40 numbers .* split between ranks"):
            call()


# -- layers that read raw memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", ["converted", "deepseek"])
@pytest.mark.parametrize("kind", ["growing", "compressed", "none"])
def test_every_projection_of_a_replaced_or_converted_model_is_handed_contiguous_inputs(made, kind):
    model = MODELS[made]()
    attention = [module for module in model.modules() if isinstance(module, LowRankAttention)]
    wrapped = {part for module in attention for part in module.children() if list(part.parameters())}
    seen = set()

    def check(part: Any, args: tuple[Any, ...]) -> None:
        seen.add(part)
        assert all(each.is_contiguous() for each in args if isinstance(each, Tensor)), f"{part} was handed a view"

    cache = {"growing": lambda: growing(model), "compressed": lambda: compressed_cache(model, "knorm", 8)}
    given = None if kind == "none" else cache[kind]()
    for part in wrapped:
        part.register_forward_pre_hook(check)
    if given is None:
        model(token_ids(2, 9))
    else:
        steps(model, given)
    assert seen == wrapped


def test_other_classes_of_a_replaced_name_are_left_alone():
    model = small_model(3)
    for layer in model.model.layers:
        layer.self_attn.__class__ = type("DeepseekV3Attention", (type(layer.self_attn),), {"__module__": "remote"})
    with pytest.raises(ValueError, match=r"got DeepseekV3ForCausalLM with \['DeepseekV3Attention'\]"):
        replace_attention_(model)
