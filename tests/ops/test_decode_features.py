"""``decode_attention`` and ``latent_decode`` with windows, sinks, soft caps, ALiBi and gaps, against dense float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from fastattn import ops
from fastattn.ops import reference
from tests._helpers import draw
from tests._helpers.budget import assert_lse, assert_within_budget, plain_dtype
from tests._helpers.decode_features import Call, decode_calls, dense_decode
from tests._helpers.features import cast
from tests.ops.test_attention import largest_score


@draw.cases(120)
@given(decode_calls())
def test_decoding_equals_the_dense_computation(call: Call) -> None:
    query, key, value, lengths, options = call
    out, lse = ops.decode_attention(query, key, value, lengths, return_lse=True, **options)
    clean = query, key.nan_to_num(), value.nan_to_num()
    wide = [t.double() for t in clean]
    exact, exact_lse = dense_decode(*wide, lengths, options)
    usual, _ = dense_decode(*(t.to(plain_dtype(query.dtype)) for t in clean), lengths, options)
    assert_within_budget(out, exact, usual, "out")
    largest = largest_score(query, key, None) + 200 * ("alibi_slopes" in options) + 8 * ("sinks" in options)
    assert_lse(lse, exact_lse, query.dtype, largest)
    assert out.is_contiguous()
    assert lse.is_contiguous()
    defined = reference.decode_attention(
        query.double(), key.double(), value.double(), lengths, return_lse=True, **cast(options, torch.float64)
    )
    torch.testing.assert_close(defined[0], exact, rtol=0, atol=1e-12)
    torch.testing.assert_close(defined[1], exact_lse, rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_a_cache_with_gaps_gives_what_attention_gives_without_what_is_gone(causal: bool) -> None:
    """Fault class: windows counted in slots."""
    tokens, kept = 30, [0, 1, 5, 12, 13, 20, 26, 27, 28, 29]
    query, key, value = (draw.normal(1, 2, tokens, 8, dtype=torch.float64, seed=seed) for seed in range(3))
    slopes = torch.tensor([0.3, 0.05])
    positions = torch.tensor(kept, dtype=torch.int32).expand(1, 2, -1)
    lengths = torch.full((1, 2), len(kept), dtype=torch.int32)
    out = ops.decode_attention(
        query[:, :, -1:], key[:, :, kept], value[:, :, kept], lengths, causal=causal, window=12, positions=positions,
        alibi_slopes=slopes,
    )  # fmt: skip
    position = 29 if causal else 30
    seen = [t for t in kept if position - t < 12]
    scores = query[:, :, -1:] @ key[:, :, seen].mT / 8**0.5
    scores = scores - slopes.double().view(1, 2, 1, 1) * (position - torch.tensor(seen))
    torch.testing.assert_close(out, torch.softmax(scores, -1) @ value[:, :, seen], rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(
    "options",
    [{"window": 4}, {"softcap": 2.0}, {"sinks": torch.tensor([0.0, 2.0, -1.0])}, {"window": 1, "softcap": 9.0}],
    ids=str,
)
def test_latent_decoding_equals_the_dense_computation(
    dtype: torch.dtype, queries: int, options: dict[str, Any]
) -> None:
    latent, rope = (
        draw.normal(2, 3, queries, 12, dtype=dtype, seed=1),
        draw.normal(2, 3, queries, 4, dtype=dtype, seed=2),
    )
    cache, lengths = draw.normal(2, 9, 16, dtype=dtype, seed=3), torch.tensor([9, 4], dtype=torch.int32)
    query, key = torch.cat([latent, rope], dim=3), cache.clone()[:, None]
    draw.poison_slots_(cache, lengths)
    out, lse = ops.latent_decode(latent, rope, cache, lengths, scale=0.3, return_lse=True, **options)

    def densely(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return dense_decode(query, key, key[..., :12], lengths[:, None], options | {"causal": True}, scale=0.3)

    exact, exact_lse = densely(query.double(), key.double())
    assert_within_budget(out, exact, densely(query.to(plain_dtype(dtype)), key.to(plain_dtype(dtype)))[0], "out")
    # documented: scores of bfloat16 inputs may be rounded
    assert_lse(lse, exact_lse, dtype, 20.0, rounding=1e-2 if dtype == torch.bfloat16 else 0.0)
    defined = reference.latent_decode(
        latent.double(), rope.double(), cache.double(), lengths, scale=0.3, **cast(options, torch.float64)
    )
    torch.testing.assert_close(defined, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"window": 0}, ValueError, "window must be at least 1, got 0"),
        ({"softcap": 0}, ValueError, "softcap must be positive and finite, got 0"),
        ({"sinks": torch.zeros(3)}, ValueError, "sinks must have size 4 in dim 0"),
        ({"sinks": torch.zeros(4, requires_grad=True)}, ValueError, "decode_attention has no gradient, but sinks"),
        ({"alibi_slopes": torch.zeros(4).int()}, TypeError, "alibi_slopes must be float16"),
        ({"positions": torch.zeros(1, 2, 5)}, TypeError, "positions must be int32"),
        ({"positions": torch.zeros(1, 4, 5).int()}, ValueError, r"positions must have shape \[B Hkv C\] = \[1, 2, 5\]"),
    ],
    ids=str,
)
def test_wrong_features_are_named(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    query, key, lengths = torch.zeros(1, 4, 1, 8), torch.zeros(1, 2, 5, 8), torch.tensor([[5, 5]], dtype=torch.int32)
    with pytest.raises(error, match=message):
        ops.decode_attention(query, key, key, lengths, **wrong)


def test_wrong_latent_features_are_named() -> None:
    query, cache, lengths = torch.zeros(1, 4, 1, 8), torch.zeros(1, 5, 12), torch.tensor([5], dtype=torch.int32)
    with pytest.raises(ValueError, match="sinks must have size 4 in dim 0 \\(query_latent's heads\\)"):
        ops.latent_decode(query, query[..., :4], cache, lengths, scale=1.0, sinks=torch.zeros(2))
    with pytest.raises(ValueError, match="window must be at least 1"):
        ops.latent_decode(query, query[..., :4], cache, lengths, scale=1.0, window=-3)
