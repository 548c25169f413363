"""Assisted decoding over a compressed cache: plain decoding's text, over evictions too."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from fastattn.integrations.transformers import compressed_cache
from tests._helpers.tiny_models import tiny_model

pytestmark = [pytest.mark.transformers, pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")]

NEW = 60


def greedy(model: Any, ids: torch.Tensor, tokens: int, **options: Any) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=tokens, do_sample=False, **options)


def settings(policy: str, **changes: Any) -> dict[str, Any]:
    return {"policy": policy, "budget": 64, "interval": 16, "max_step": 5, **changes}


def repeating_prompt(seed: int, tokens: int = 12) -> torch.Tensor:
    return torch.randint(3, 96, (1, tokens), generator=torch.Generator().manual_seed(seed)).repeat(1, 4)


def generate(model: Any, ids: torch.Tensor, options: dict[str, Any], **assisted: Any) -> tuple[torch.Tensor, Any, int]:
    """The text, the cache, and the number of forward passes."""
    calls = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(1))
    cache = compressed_cache(model, **options)
    text = greedy(model, ids, NEW, past_key_values=cache, eos_token_id=1, **assisted)
    handle.remove()
    return text, cache, len(calls)


# Not Knorm: repeated tokens have keys of one norm up to rounding, so that rounding decides which of them is evicted.
@pytest.mark.parametrize("policy", ["key_diff", "streaming_llm", "expected_attention"])
@pytest.mark.parametrize("interval", [3, 8, 16])
def test_prompt_lookup_over_evictions_gives_the_text_of_plain_decoding(policy: str, interval: int) -> None:
    fewest = NEW
    for seed in range(3):
        model, ids = tiny_model("llama", seed=seed), repeating_prompt(seed)
        options = settings(policy, interval=interval)
        plain, _, _ = generate(model, ids, options)
        found, assisted, calls = generate(model, ids, options, prompt_lookup_num_tokens=4)
        assert torch.equal(found, plain)
        if plain.shape[1] > 64 + interval + 1:
            assert int(assisted.kv.lengths(0).max()) < int(assisted.kv.columns), "nothing was evicted"
        fewest = min(fewest, calls)
    assert fewest < 0.8 * NEW, "no draft was taken"


def test_a_prompt_beyond_the_budget_brings_no_draft() -> None:
    """It ends by compressing, after which nothing could be taken back."""
    model, ids = tiny_model("llama"), repeating_prompt(0, 24)
    plain, _, _ = generate(model, ids, settings("key_diff"))
    found, _, _ = generate(model, ids, settings("key_diff"), prompt_lookup_num_tokens=4)
    assert torch.equal(found, plain)


def test_a_draft_model_over_evictions_gives_the_text_of_plain_decoding() -> None:
    model = tiny_model("llama")
    draft, ids = tiny_model("llama", num_hidden_layers=1), repeating_prompt(0)
    plain, _, _ = generate(model, ids, settings("key_diff"))
    found, _, _ = generate(model, ids, settings("key_diff"), assistant_model=draft)
    assert torch.equal(found, plain)


def test_assisted_decoding_without_max_step_is_refused_before_anything_is_fed() -> None:
    model, ids = tiny_model("llama"), repeating_prompt(0)
    cache = compressed_cache(model, **settings("key_diff", max_step=1))
    with pytest.raises(ValueError, match=r"max_step must be at least 2 for assisted decoding.*got 1"):
        greedy(model, ids, NEW, past_key_values=cache, prompt_lookup_num_tokens=4, eos_token_id=1)
    assert int(cache.kv.columns) == 0


def test_a_model_whose_drafts_are_limited_can_be_copied_and_saved() -> None:
    model, ids = tiny_model("llama"), repeating_prompt(0)
    expected = greedy(model, ids, 8, prompt_lookup_num_tokens=4, eos_token_id=1)
    compressed_cache(model, **settings("key_diff"))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert copied._get_candidate_generator.model is copied
        assert torch.equal(greedy(copied, ids, 8, prompt_lookup_num_tokens=4, eos_token_id=1), expected)
