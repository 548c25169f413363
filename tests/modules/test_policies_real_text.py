"""What the policies keep of real text in a real model, against their definitions in float64."""

from __future__ import annotations

import pytest
import torch

from examples import smollm2
from fastattn import CompressedKVCache, Rotary, SnapKV
from tests._helpers import exact_policies
from tests._helpers.recorded import SNAP_KV_WINDOW, Difference, Recorded, record_prefill, scores_of

pytestmark = pytest.mark.transformers

TOKENS, BUDGET = 1024, 512


@pytest.fixture(scope="module")
def prefill() -> tuple[list[Recorded], Rotary]:
    """1,024 tokens of Python's documentation through SmolLM2 in float32."""
    model, tokenizer = smollm2.load()
    ids = tokenizer(smollm2.long_text()[:8000], return_tensors="pt").input_ids[:, :TOKENS]
    assert ids.shape[1] == TOKENS
    return record_prefill(model, ids), Rotary(model.model.rotary_emb.inv_freq)


@pytest.mark.parametrize(
    "policy", ["expected_attention", "knorm", "streaming_llm", "key_diff", "snap_kv", "tova"]
)  # what one prefill's queries and keys define; H2O and Random have tests of their own
def test_kept_positions_of_one_prefill(policy: str, prefill: tuple[list[Recorded], Rotary]) -> None:
    layers, rotary = prefill
    kv_heads, _, dim = layers[0].key.shape
    cache = CompressedKVCache(
        SnapKV(window=SNAP_KV_WINDOW) if policy == "snap_kv" else policy,
        BUDGET,
        num_layers=len(layers),
        num_kv_heads=kv_heads,
        head_dim=dim,
        rotary=rotary,
    )
    difference = Difference()
    for index, layer in enumerate(layers):
        cache.attend(index, layer.query[None], layer.key[None], layer.value[None])
        assert cache.lengths(index).tolist() == [[BUDGET] * kv_heads]
        for head in range(kv_heads):
            kept = cache.positions(index)[0, head, :BUDGET].tolist()
            exact = scores_of(policy, layer, head, rotary.inv_freq, torch.float64)
            expected = exact_policies.keep(exact, BUDGET)
            difference.add(policy, layer, head, rotary.inv_freq, kept, expected)
            assert torch.equal(cache.keys(index)[0, head, :BUDGET], layer.key[head, kept])
            assert torch.equal(cache.values(index)[0, head, :BUDGET], layer.value[head, kept])
    print(
        f"{policy}: {difference.heads} heads, {difference.equal} keep exactly the defined set; {difference.tokens} "
        f"tokens differ, {difference.explained} of them within float32 error of the threshold"
    )
    assert difference.heads == len(layers) * kv_heads
    assert difference.tokens == difference.explained
    assert difference.tokens <= difference.heads, "float32 should rarely matter"
