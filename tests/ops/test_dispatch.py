"""How an operator finds its device."""

from __future__ import annotations

import pytest
import torch

from fastattn import ops
from fastattn.ops import _register
from tests._helpers import draw


@pytest.mark.parametrize("nested", [False, True])
def test_the_device_is_that_of_the_first_tensor_also_inside_a_list(nested: bool) -> None:
    tensor = torch.empty(1, device="meta")
    assert _register._device_of([[tensor] if nested else tensor, 0.5]).type == "meta"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_rounds_no_score_and_no_statistic(dtype: torch.dtype) -> None:
    key, value = (draw.normal(2, 2, 70, dim, dtype=dtype, seed=dim) for dim in (16, 12))
    query = draw.normal(2, 4, 9, 16, dtype=dtype)
    lengths = torch.tensor([[70, 33], [1, 64]], dtype=torch.int32)
    positions = torch.arange(70, dtype=torch.int32).expand(2, 2, 70).contiguous()

    def results() -> list[torch.Tensor]:
        mean, cov = ops.query_moments(query)
        samples = draw.normal(2, 4, 5, 16)
        forms = [(mean, cov, None), (None, None, samples)]
        expected = [ops.score_expected_attention(key, value, lengths, positions, *form, scale=0.25) for form in forms]
        return [mean, cov, *expected, ops.score_knorm(key, lengths), ops.score_key_diff(key, lengths)]

    plain = results()
    with torch.autocast("cpu", torch.bfloat16):
        under = results()
    valid = torch.arange(70) < lengths[..., None]
    for exact, actual in zip(plain, under, strict=True):
        assert actual.dtype == torch.float32
        chosen = valid if exact.shape == valid.shape else torch.ones_like(exact, dtype=torch.bool)
        assert torch.equal(actual[chosen], exact[chosen])
