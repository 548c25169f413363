"""Keyword arguments that mean nothing to an attention call are passed over; those that change it are refused."""

from __future__ import annotations

import warnings

import pytest
import torch

pytest.importorskip("transformers")

from fastattn import LowRankConfig, to_low_rank_
from fastattn.integrations import _arguments
from fastattn.integrations.transformers import compressed_cache
from tests._helpers.tiny_models import tiny_model, token_ids

pytestmark = [pytest.mark.transformers, pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")]

KINDS = ["original", "converted"]


class Tokenizer:
    """As a tokenizer in a message: far too much to read."""

    def __repr__(self):
        return "the whole vocabulary"


def model_and_cache(kind):
    model = tiny_model("llama")
    if kind == "converted":
        config = LowRankConfig(kv_lora_rank=12, q_lora_rank=24, qk_rope_head_dim=8)
        to_low_rank_(model, config, token_ids(3, 60), progress=False)
    return model, compressed_cache(model, "knorm", 64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compressed", [True, False])
def test_arguments_that_mean_nothing_to_attention_are_passed_over(kind, compressed):
    model, cache = model_and_cache(kind)
    ids = token_ids(1, 12)
    given = {"past_key_values": cache} if compressed else {}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*past_key_values")
        found = model(ids, tokenizer=Tokenizer(), stop_strings=["x"], new_in_a_later_release=7, **given).logits
    torch.testing.assert_close(found, model(ids, use_cache=False).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_tensor_is_named_once_and_not_shown(kind, monkeypatch):
    monkeypatch.setattr(_arguments, "_WARNED", set())
    model, cache = model_and_cache(kind)
    with torch.no_grad(), pytest.warns(UserWarning, match="tensor tilt of an attention call") as seen:
        model(token_ids(1, 12), past_key_values=cache, tilt=torch.full((3,), 77.0))
    ours = [str(w.message) for w in seen if "tilt" in str(w.message)]
    assert len(ours) == 1
    assert "77" not in ours[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted(set(_arguments.CHANGES_ATTENTION) - {"encoder_hidden_states"}))
def test_arguments_that_change_attention_are_refused_without_their_value(kind, name):
    model, cache = model_and_cache(kind)
    with torch.no_grad(), pytest.raises((ValueError, TypeError)) as refusal:
        model(token_ids(1, 12), past_key_values=cache, **{name: Tokenizer()})
    served = _arguments.SERVED_BY_CACHE.get(name, name)  # by its own name, where it is served
    assert name in str(refusal.value) or served in str(refusal.value)
    assert "whole vocabulary" not in str(refusal.value)
    assert int(cache.kv.columns) == 0
