"""Attention mass as a device computes it (one query by Expected Attention's kernels) against the definition."""

from __future__ import annotations

import pytest

from fastattn import ops
from fastattn.ops.triton import mass
from tests._helpers.triton_run import interpreted
from tests.ops.test_mass import arguments, check


@pytest.mark.parametrize("queries", [1, 2, 9])
def test_mass_is_the_definition(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mass, "_LOGITS", 1500)  # several blocks
    args = arguments(queries)
    with interpreted():
        check(ops.attention_mass(*args, scale=0.3), args)


def test_rows_below_min_length_are_skipped() -> None:
    args = arguments(1)
    with interpreted():
        full, some = (ops.attention_mass(*args, scale=0.3, min_length=least) for least in (0, 20))
    assert (some[[0, 2]] == full[[0, 2]]).all()
