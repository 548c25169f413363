"""A user's file over the public names, which ``make lint`` holds to mypy's strict mode (a new user, row 10)."""

from __future__ import annotations

from torch import Tensor, nn
from typing_extensions import assert_type

import fastattn
from fastattn import CompressedKVCache, LowRankAttention, ops
from fastattn.integrations.transformers import CompressedCache


class Newest(fastattn.Policy):
    """A policy of a user's own."""

    def score(self, state: fastattn.CacheState) -> Tensor:
        return state.positions.float()


def operators(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, flag: bool) -> None:
    assert_type(ops.attention(query, key, value, causal=True), Tensor)
    assert_type(ops.attention(query, key, value, return_lse=True), tuple[Tensor, Tensor])
    assert_type(ops.attention(query, key, value, return_lse=flag), Tensor | tuple[Tensor, Tensor])
    out, lse = ops.decode_attention(query, key, value, lengths, return_lse=True)
    assert_type(out.shape[0] + lse.shape[0], int)
    assert_type(ops.decode_attention(query, key, value, lengths), Tensor)
    assert_type(ops.latent_decode(query, query, key, lengths, scale=0.1), Tensor)
    assert_type(ops.latent_decode(query, query, key, lengths, scale=0.1, return_lse=True), tuple[Tensor, Tensor])
    assert_type(ops.merge_attention([out], [lse]), tuple[Tensor, Tensor])
    assert_type(ops.qk_scores(query, key), Tensor)
    assert_type(ops.score_knorm(key, lengths), Tensor)
    assert_type(ops.score_key_diff(key, lengths), Tensor)
    mean, cov = ops.query_moments(query)
    assert_type(ops.score_expected_attention(key, value, lengths, mean, cov, scale=0.1), Tensor)
    assert_type(ops.attention_mass(key, lengths, lengths, query, lengths, scale=0.1), Tensor)
    codes, scale = ops.quantize(key, "int8")
    assert_type(ops.dequantize(codes, scale), Tensor)
    ops.cache_append_(key, value, lengths, lengths, key, value, lengths)
    ops.cache_compact_(key, value, lengths, lengths, mean, 4)


def modules(hidden: Tensor, key: Tensor) -> nn.Module:
    cache = CompressedKVCache(Newest(), budget=16, num_layers=2, num_kv_heads=2, head_dim=8)
    assert_type(cache.attend(0, hidden, key, key), Tensor)
    assert_type(cache.lengths(0), Tensor)
    assert_type(cache.select(key), CompressedKVCache)
    assert_type(fastattn.pyramid_budgets(16, 4), tuple[int, ...])
    layer = LowRankAttention(64, 4, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
    assert_type(layer.make_cache("key_diff", 32), CompressedKVCache)
    policies: list[fastattn.Policy] = [
        fastattn.ExpectedAttention(),
        fastattn.H2O(),
        fastattn.KeyDiff(),
        fastattn.Knorm(),
    ]
    policies += [fastattn.Protect(fastattn.Knorm()), fastattn.Random(), fastattn.SnapKV(), fastattn.StreamingLLM()]
    for policy in [*policies, fastattn.TOVA()]:
        CompressedKVCache(policy, 64, num_layers=1, num_kv_heads=2, head_dim=8, rotary=fastattn.Rotary(key))
    assert_type(fastattn.advise(768, 12, 1024), fastattn.Advice)
    return layer


def integrations(model: nn.Module, ids: Tensor) -> None:
    cache = fastattn.compressed_cache(model, budget=32)
    assert_type(cache, CompressedCache)
    assert_type(fastattn.prefill(model, ids, cache), Tensor)
    fastattn.save_prefix(cache, "file")
    assert_type(fastattn.load_prefix(model, "file"), CompressedCache)
    scores = fastattn.score_continuations(model, cache, [[1, 2], ids[0]])
    assert_type(scores[0].log_likelihood, float)
    with fastattn.compressed(model, "key_diff", budget=32):
        model(ids)
    report = fastattn.to_low_rank_(model, fastattn.LowRankConfig(kv_lora_rank=16), calibration=ids)
    assert_type(report, fastattn.convert.ConversionReport)
    fastattn.convert.save_low_rank(model, "folder")
    fastattn.convert.load_low_rank("folder")
