"""Attention mass on a CPU against the definition in float64. A device's: triton/interpreter/test_mass.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastattn import ops
from fastattn.ops import reference
from fastattn.ops.cpu import mass as cpu_mass
from tests._helpers import draw
from tests._helpers.budget import assert_within_budget


def arguments(queries: int, dtype: torch.dtype = torch.float32, slots: int = 40) -> tuple[Tensor, ...]:
    """Ragged lengths, NaN beyond them, queries among the newest positions, one row's first query missing."""
    lengths = torch.tensor([[slots, slots - 7], [3, 0], [slots - 1, slots]], dtype=torch.int32)
    key = draw.poison_slots_(draw.normal(3, 2, slots, 16, dtype=dtype), lengths)
    positions = (3 * torch.arange(slots, dtype=torch.int32)).expand(3, 2, slots).contiguous()
    positions = positions.masked_fill(torch.arange(slots) >= lengths[..., None], -1)
    query = draw.normal(3, 4, queries, 16, dtype=dtype, seed=1)
    at = (3 * torch.arange(slots - queries, slots, dtype=torch.int32)).expand(3, queries).clone()
    at[2, 0] = -1
    query[2, :, 0] = float("nan")
    return key, lengths, positions, query, at


@pytest.mark.parametrize("queries", [1, 2, 9])
def test_mass_is_the_definition(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_mass, "_LOGITS", 200)  # several blocks
    args = arguments(queries)
    check(ops.attention_mass(*args, scale=0.3), args)


def check(actual: Tensor, args: tuple[Tensor, ...]) -> None:
    exact, plain = (
        reference.attention_mass(*(wide(a) for a in args), scale=0.3),
        reference.attention_mass(*args, scale=0.3),
    )
    assert actual.dtype == torch.float32
    assert_within_budget(actual, exact, plain, "mass")
    assert (actual[1, 1] == 0).all(), "an empty head"


def wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def test_rows_below_min_length_are_skipped_and_the_others_are_not() -> None:
    args = arguments(3)
    full, some = (ops.attention_mass(*args, scale=0.3, min_length=least) for least in (0, 20))
    assert torch.equal(some[[0, 2]], full[[0, 2]])
    assert (some[1] == 0).all()


@pytest.mark.parametrize(
    ("index", "value", "error", "words"),
    [
        (0, [1.0], TypeError, "key must be a tensor"),
        (1, torch.ones(3, 2), TypeError, "lengths must be int32"),
        (2, torch.zeros(3, 2, 41, dtype=torch.int32), ValueError, "positions must have shape"),
        (3, torch.zeros(3, 3, 1, 16), ValueError, "query must have a multiple of key's 2 heads"),
        (3, torch.zeros(3, 4, 1, 16).half(), TypeError, "query must have key's dtype"),
        (4, torch.zeros(3, 2, dtype=torch.int32), ValueError, "query_positions must have shape"),
    ],
)
def test_bad_arguments(index: int, value: Any, error: type[Exception], words: str) -> None:
    args: list[Any] = list(arguments(1))
    args[index] = value
    with pytest.raises(error, match=words):
        ops.attention_mass(*args, scale=0.3)


def test_bad_options() -> None:
    args = arguments(1)
    with pytest.raises(TypeError, match="scale must be a float, got None"):
        ops.attention_mass(*args, scale=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="min_length must be at least 0, got -1"):
        ops.attention_mass(*args, scale=0.3, min_length=-1)
