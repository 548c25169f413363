"""The decode kernel with windows, sinks, soft caps, ALiBi and gaps against a dense float64 computation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from fastattn import ops
from tests._helpers import draw
from tests._helpers.budget import assert_lse, assert_within_budget
from tests._helpers.decode_features import decode_calls, dense_decode
from tests._helpers.features import cast
from tests._helpers.triton_run import examples, interpreted
from tests.ops.test_attention import largest_score


def check(query, key, value, lengths, options, processors=4):
    options = cast(options, torch.float32)  # the interpreter's bfloat16 is wrong
    with interpreted(processors=processors):
        out, lse = ops.decode_attention(query, key, value, lengths, return_lse=True, **options)
    clean = query, key.nan_to_num(), value.nan_to_num()
    exact, exact_lse = dense_decode(*(t.double() for t in clean), lengths, options)
    ways = [dense_decode(*clean, lengths, options)[0]]
    if query.dtype == torch.float32:  # a kernel merges splits and rescales, as the plain way below does
        ways.append(ops.decode_attention(query, key, value, lengths, **options))
    assert_within_budget(out, exact, ways, "out")
    largest = largest_score(query, key, None) + 200 * ("alibi_slopes" in options) + 8 * ("sinks" in options)
    assert_lse(lse, exact_lse, query.dtype, largest)


@examples(12)
@given(decode_calls(slots=64, dtypes=(torch.float32, torch.float16)))
def test_any_cache(call):
    check(*call)


@pytest.mark.parametrize("window", [1, 64, 65, 1000])
@pytest.mark.parametrize("causal", [False, True])
def test_windows_over_splits(window, causal):
    query, key = draw.normal(1, 4, 2, 64), draw.normal(1, 2, 300, 64, seed=1)
    lengths = torch.tensor([[300, 231]], dtype=torch.int32)
    positions = (torch.arange(300, dtype=torch.int32) * 2).expand(1, 2, -1)
    options = {"window": window, "causal": causal, "sinks": torch.zeros(4)}
    check(query, key, key, lengths, options, processors=8)
    check(query, key, key, lengths, options | {"positions": positions}, processors=8)


@pytest.mark.parametrize("causal", [False, True])
def test_latent_windows_sinks_and_soft_caps(causal):
    latent, rope = draw.normal(1, 3, 2, 24, seed=1), draw.normal(1, 3, 2, 8, seed=2)
    cache, lengths = draw.normal(1, 150, 32, seed=3), torch.tensor([131], dtype=torch.int32)
    query, key = torch.cat([latent, rope], dim=3), cache[:, None]
    for window in (1, 40):
        options = {"window": window, "softcap": 3.0, "sinks": torch.tensor([0.0, 2.0, -2.0])}
        with interpreted(processors=8):
            out, lse = ops.latent_decode(
                latent, rope, cache, lengths, scale=0.3, causal=causal, return_lse=True, **options
            )
        options["causal"] = causal

        def densely(query, key, options=options):
            return dense_decode(query, key, key[..., :24], lengths[:, None], options, scale=0.3)

        exact, exact_lse = densely(query.double(), key.double())
        assert_within_budget(out, exact, [densely(query, key)[0], exact.float()], "out")
        assert_lse(lse, exact_lse, torch.float32, 20.0)
