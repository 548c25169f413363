"""``with compressed(model, ...)``: a cache for code that makes its own calls (tried by a new user, row 16)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

import fastattn
from fastattn.integrations.transformers import CompressedCache, compressed, compressed_cache
from tests._helpers.hf_models import make_model
from tests._helpers.tiny_models import token_ids

pytestmark = [pytest.mark.transformers, pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")]
OPTIONS = {"budget": 16, "interval": 4}


def greedy(model, ids, tokens, **options):
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, **options)


@pytest.fixture(scope="module")
def model():
    return make_model("llama")


@pytest.mark.parametrize("rows", [1, 3])
def test_generate_inside_is_generate_with_a_cache(model, rows):
    ids = token_ids(rows, 24)
    expected = greedy(model, ids, 20, past_key_values=compressed_cache(model, "knorm", batch_size=rows, **OPTIONS))
    plain = greedy(model, ids, 20)
    assert not torch.equal(expected, plain)  # else this test could not fail
    with compressed(model, "knorm", **OPTIONS):
        first, second = (greedy(model, ids, 20) for _ in range(2))
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)
    assert torch.equal(greedy(model, ids, 20), plain)
    assert "generate" not in vars(model)


def test_every_call_inside_gets_a_cache_of_its_own(model):
    ids = token_ids(2, 24)
    with torch.no_grad(), compressed(model, "knorm", **OPTIONS):
        calls = [model(ids), model(ids), model(ids, None, None, None)]  # the last one's cache by position
        caches = [out.past_key_values for out in calls]
        step = model(ids[:, :1], past_key_values=caches[0])
    assert all(isinstance(cache, CompressedCache) for cache in caches)
    assert len(set(map(id, caches))) == 3
    assert step.past_key_values is caches[0]
    assert int(caches[0].kv.columns) == 25
    assert int(caches[1].kv.lengths(0).max()) == 16
    for out in calls[1:]:
        torch.testing.assert_close(out.logits, calls[0].logits, rtol=0, atol=0)


def test_drafts_are_verified_over_the_cache(model):
    ids = token_ids(1, 24)
    with compressed(model, "knorm", max_step=4, **OPTIONS):
        plain = greedy(model, ids, 24, eos_token_id=1)
        drafted = greedy(model, ids, 24, eos_token_id=1, prompt_lookup_num_tokens=3)
    assert torch.equal(plain, drafted)


def test_beams_size_the_cache(model):
    ids = token_ids(2, 24)
    cache = compressed_cache(model, "streaming_llm", batch_size=6, **OPTIONS)
    expected = greedy(model, ids, 12, num_beams=3, past_key_values=cache)
    with compressed(model, "streaming_llm", **OPTIONS):
        assert torch.equal(greedy(model, ids, 12, num_beams=3), expected)


def test_no_policy_is_the_models_own_cache(model):
    ids = token_ids(1, 24)
    plain = greedy(model, ids, 12)
    with compressed(model, None):
        assert torch.equal(greedy(model, ids, 12), plain)
        assert not isinstance(model(ids).past_key_values, CompressedCache)


def test_it_is_a_public_name_of_the_package():
    assert fastattn.compressed is compressed


def test_what_cannot_be_served_inside_is_refused(model):
    ids = token_ids(1, 24)
    full = model(ids).past_key_values
    with pytest.raises(ValueError, match="budget"), compressed(model, budget=0):
        pass
    with pytest.raises(TypeError, match="batch_size must not be given"), compressed(model, batch_size=2):
        pass
    with compressed(model, **OPTIONS):
        with pytest.raises(ValueError, match="leave that one first"), compressed(model, **OPTIONS):
            pass
        with pytest.raises(ValueError, match="use_cache must not be False"):
            model(ids, use_cache=False)
        with pytest.raises(ValueError, match="must come from compressed_cache inside compressed"):
            model(ids[:, :1], past_key_values=full)
    hooks = [type(hook).__name__ for hook in model._forward_pre_hooks.values()]
    assert hooks == []
    with pytest.raises(RuntimeError, match="from inside"), compressed(model, **OPTIONS):
        raise RuntimeError("from inside")
    assert "generate" not in vars(model)
    assert len(model._forward_pre_hooks) == 0
