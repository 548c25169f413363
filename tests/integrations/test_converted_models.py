"""Converted models over compressed caches: what is cached and evicted are their latents."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
from fastattn import ExpectedAttention, KeyDiff, LowRankAttention, LowRankConfig, Policy, StreamingLLM, to_low_rank_
from fastattn.integrations.transformers import compressed_cache, prefill
from tests._helpers.compiling import counting
from tests._helpers.tiny_models import tiny_model, token_ids

pytestmark = pytest.mark.transformers


def converted(**options: object) -> torch.nn.Module:
    model = tiny_model("llama")
    config = LowRankConfig(**{"kv_lora_rank": 24, "qk_rope_head_dim": 16, **options})
    to_low_rank_(model, config, token_ids(4, 64), progress=False)
    return model


@pytest.mark.parametrize("policy", ["knorm", "streaming_llm", "key_diff"])
def test_within_budget_generate_gives_the_same_tokens(policy: str) -> None:
    model, tokens = converted(), token_ids(2, 12, seed=3).clamp(min=3)
    cache = compressed_cache(model, policy, budget=64, batch_size=2)
    settings = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    expected = model.generate(tokens, **settings)
    assert torch.equal(model.generate(tokens, **settings, past_key_values=cache), expected)
    assert cache.kv.latent_rank == 24
    assert cache.kv.keys(0).shape[3] == 24 + 16


def test_beyond_the_budget_latents_are_evicted() -> None:
    model, tokens = converted(), token_ids(1, 40, seed=4).clamp(min=3)
    cache = compressed_cache(model, "key_diff", budget=12, interval=4)
    out = model.generate(tokens, max_new_tokens=10, do_sample=False, eos_token_id=None, past_key_values=cache)
    assert out.shape == (1, 50)
    assert all(int(cache.kv.lengths(layer).max()) < 16 for layer in range(2))
    assert cache.kv.tokens_seen.tolist() == [49]


def differing(**options: object) -> torch.nn.Module:
    """Ranks, rope dims and frequencies of every layer's own."""
    model = tiny_model("llama")
    choice = {"kv_lora_rank": 20, "qk_rope_head_dim": 12, "method": "curvature", "rank_allocation": "global"}
    to_low_rank_(model, LowRankConfig(**{**choice, **options}), token_ids(4, 64), progress=False)
    ranks, rope = zip(
        *((layer.self_attn.kv_lora_rank, layer.self_attn.qk_rope_head_dim) for layer in model.model.layers), strict=True
    )
    assert len(set(ranks)) > 1
    assert len(set(rope)) > 1
    return model


@pytest.mark.parametrize("policy", ["key_diff", "expected_attention", "snap_kv"])
def test_layers_with_ranks_and_rotations_of_their_own_decode_over_one_cache(policy: str) -> None:
    model, tokens = differing(), token_ids(2, 12, seed=3).clamp(min=3)
    cache = compressed_cache(model, policy, budget=64, batch_size=2)
    settings = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    expected = model.generate(tokens, **settings)
    assert torch.equal(model.generate(tokens, **settings, past_key_values=cache), expected)
    widths = [(a.self_attn.kv_lora_rank, a.self_attn.qk_rope_head_dim) for a in model.model.layers]
    assert cache.kv.latent_rank == tuple(rank for rank, _ in widths)
    assert [cache.kv.keys(layer).shape[3] for layer in range(2)] == [sum(width) for width in widths]


@pytest.mark.parametrize(
    "policy",
    [KeyDiff(), ExpectedAttention(query_window=8), StreamingLLM(rerotate=True)],
    ids=lambda p: type(p).__name__,
)
def test_layers_of_their_own_evict_as_each_would_alone(policy: Policy) -> None:
    """The kept sets, and latents, of the layers are those of one-layer caches that are fed the same."""
    model, tokens = differing(), token_ids(1, 40, seed=4).clamp(min=3)
    cache = compressed_cache(model, policy, budget=12, interval=4)
    fed: list[list[dict[str, torch.Tensor]]] = [[], []]
    layers = [layer.self_attn for layer in model.model.layers]
    for layer, seen in zip(layers, fed, strict=True):

        def note(module, args, kwargs, seen=seen):
            seen.append({"hidden_states": kwargs["hidden_states"], "position_ids": kwargs["position_ids"]})

        layer.register_forward_pre_hook(note, with_kwargs=True)
    model.generate(tokens, max_new_tokens=11, do_sample=False, eos_token_id=None, past_key_values=cache)
    for index, (layer, seen) in enumerate(zip(layers, fed, strict=True)):
        alone = layer.make_cache(policy, 12, interval=4)
        for call in seen:
            with torch.no_grad():
                LowRankAttention.forward(layer, **call, cache=alone)
        assert torch.equal(cache.kv.positions(index), alone.positions(0))
        length = int(alone.lengths(0).max())
        assert 12 <= length < 16
        torch.testing.assert_close(cache.kv.keys(index)[:, :, :length], alone.keys(0)[:, :, :length])


@pytest.mark.compile
def test_layers_of_their_own_decode_in_one_graph() -> None:
    model, tokens = differing(), token_ids(1, 20, seed=4).clamp(min=3)
    expected, got = [], []
    with counting() as counts:
        for step, out in ((model, expected), (torch.compile(model, fullgraph=True, backend="aot_eager"), got)):
            cache = compressed_cache(model, "expected_attention", budget=12, batch_size=1, interval=4)
            with torch.no_grad():
                token = prefill(model, tokens, cache).argmax(-1, keepdim=True)
                for position in range(20, 32):
                    at = torch.tensor([[position]])
                    logits = step(input_ids=token, position_ids=at, past_key_values=cache).logits
                    token = logits[:, -1].argmax(-1, keepdim=True)
                    out.append(int(token))
        assert (counts.read().graphs, counts.breaks) == (1, 0)
    assert got == expected


@pytest.mark.parametrize("given", [False, True], ids=["computed", "given"])
def test_from_pretrained_brings_the_frequencies_of_a_users_own_model(given: bool, tmp_path: Path) -> None:
    """It builds on the meta device, sets tensors by name, and empties buffers that are not saved."""
    import transformers

    class Config(transformers.PretrainedConfig):
        model_type = "fastattn-test"

    class Model(transformers.PreTrainedModel):
        config_class = Config

        def __init__(self, config: Config) -> None:
            super().__init__(config)
            table = torch.tensor([1.0, 0.5, 0.1]) if given else None
            self.attention = LowRankAttention(
                32, 2, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=6, v_head_dim=4, inv_freq=table
            )
            self.post_init()

        def _init_weights(self, module: torch.nn.Module) -> None:
            """Every weight is loaded."""

    model = Model(Config()).eval()
    if given:
        model.attention.inv_freq.copy_(torch.tensor([0.9, 0.2, 0.05]))  # as training it would
    model.save_pretrained(tmp_path)
    loaded = Model.from_pretrained(tmp_path)
    hidden = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded.attention(hidden), model.attention(hidden))
    mine, theirs = (each.attention.make_cache("knorm", 4).rotary for each in (loaded, model))
    assert torch.equal(mine.inv_freq, theirs.inv_freq)


def test_a_history_passed_again_is_not_cached_twice() -> None:
    model, tokens = converted(), token_ids(1, 20, seed=4).clamp(min=3)
    cache = compressed_cache(model, "key_diff", budget=64)
    with torch.no_grad():
        model(tokens, past_key_values=cache)
        with pytest.raises(ValueError, match="must go on after the cached tokens, got 0 in row 0 after 19"):
            model(tokens, position_ids=torch.arange(20)[None], past_key_values=cache)
    assert cache.kv.tokens_seen.tolist() == [20]
