"""Scores and moments: what is asked of their arguments, and that autocast changes no result."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fastattn import ops
from fastattn.ops import reference
from tests._helpers import draw
from tests.ops.test_scores import KEY_OPERATORS, expected_attention_arguments, statistics


def arguments(name: str) -> dict[str, Any]:
    key, value, lengths, positions = expected_attention_arguments(torch.float32)
    if name == "query_moments":
        return {"query": key, "valid": torch.ones(2, 12, dtype=torch.bool)}
    if name != "score_expected_attention":
        return {"key": key, "lengths": lengths}
    statistic = statistics("moments", draw.normal(2, 4, 5, 16))
    return {"key": key, "value": value, "lengths": lengths, "positions": positions, **statistic, "scale": 0.25}


EA = "score_expected_attention"
SCORES = [*KEY_OPERATORS, EA]
ALL = [*SCORES, "query_moments"]
FLAT = torch.ones(2, 12, 16)
INTS = torch.ones(2, 2, 12, 16, dtype=torch.int8)
GRAD = torch.ones(2, 2, 12, 16, requires_grad=True)
ELSEWHERE = torch.ones(2, 2, dtype=torch.int32, device="meta")
BAD = [
    *((name, "key", [[1.0]], TypeError, ["[B Hkv C D]", "list"]) for name in SCORES),
    *((name, "key", FLAT, ValueError, ["[B Hkv C D]", "[2, 12, 16]"]) for name in KEY_OPERATORS),
    *((name, "key", INTS, TypeError, ["float16", "int8"]) for name in SCORES),
    *((name, "lengths", torch.ones(2, 2), TypeError, ["int32", "float32"]) for name in SCORES),
    *((name, "lengths", torch.ones(2, 3, dtype=torch.int32), ValueError, ["[2, 2]", "[2, 3]"]) for name in SCORES),
    *((name, "lengths", ELSEWHERE, ValueError, [torch.get_default_device().type, "meta"]) for name in KEY_OPERATORS),
    *((name, "min_length", -1, ValueError, ["at least 0", "-1"]) for name in ALL),
    *((name, "min_length", 1.0, TypeError, ["integer", "float"]) for name in ALL),
    *((name, "key", GRAD, ValueError, ["no gradient"]) for name in SCORES),
    (EA, "value", torch.ones(2, 2, 11, 8), ValueError, ["12", "[2, 2, 11, 8]"]),
    (EA, "value", torch.ones(2, 1, 12, 8), ValueError, ["2", "[2, 1, 12, 8]"]),
    (EA, "value", torch.ones(2, 2, 12, 8).double(), TypeError, ["float32", "float64"]),
    (EA, "positions", torch.ones(2, 2, 11, dtype=torch.int32), ValueError, ["[2, 2, 12]", "[2, 2, 11]"]),
    (EA, "positions", torch.ones(2, 2, 12, dtype=torch.int64), TypeError, ["int32", "int64"]),
    (EA, "query_mean", torch.ones(2, 4, 16).bfloat16(), TypeError, ["float32", "bfloat16"]),
    (EA, "query_mean", torch.ones(2, 4, 15), ValueError, ["16", "[2, 4, 15]"]),
    (EA, "query_mean", torch.ones(2, 3, 16), ValueError, ["multiple", "3"]),
    (EA, "query_mean", None, ValueError, ["query_samples=None"]),
    (EA, "query_cov", torch.ones(2, 4, 16, 15), ValueError, ["16", "[2, 4, 16, 15]"]),
    (EA, "query_cov", torch.ones(2, 4, 15, 16), ValueError, ["16", "[2, 4, 15, 16]"]),
    (EA, "query_cov", torch.ones(2, 2, 16, 16), ValueError, ["4", "[2, 2, 16, 16]"]),
    (EA, "query_cov", torch.ones(1, 4, 16, 16), ValueError, ["2", "[1, 4, 16, 16]"]),
    (EA, "query_samples", torch.ones(2, 4, 5, 16), ValueError, ["query_mean=[2, 4, 16]"]),
    (EA, "n_sink", -1, ValueError, ["at least 0", "-1"]),
    (EA, "epsilon", -0.1, ValueError, ["not negative", "-0.1"]),
    (EA, "epsilon", math.inf, ValueError, ["finite", "inf"]),
    (EA, "epsilon", "small", TypeError, ["float", "str"]),
    (EA, "scale", None, TypeError, ["float", "None"]),
    (EA, "scale", math.nan, ValueError, ["finite", "nan"]),
    ("query_moments", "query", FLAT, ValueError, ["[B H N D]", "[2, 12, 16]"]),
    ("query_moments", "query", torch.ones(2, 2, 12, 16, dtype=torch.int64), TypeError, ["float16", "int64"]),
    ("query_moments", "query", GRAD, ValueError, ["no gradient"]),
    ("query_moments", "valid", torch.ones(2, 12), TypeError, ["bool", "float32"]),
    ("query_moments", "valid", torch.ones(2, 11, dtype=torch.bool), ValueError, ["12", "[2, 11]"]),
    ("query_moments", "valid", torch.ones(1, 12, dtype=torch.bool), ValueError, ["2", "[1, 12]"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "argument", "value", "error", "words"), BAD)
def test_bad_input(name: str, argument: str, value: Any, error: type[Exception], words: list[str]) -> None:
    good = arguments(name)
    getattr(ops, name)(**good)
    with pytest.raises(error) as raised:
        getattr(ops, name)(**{**good, argument: value})
    for word in (argument, *words):
        assert word in str(raised.value), f"{word!r} is not in {raised.value}"


def test_samples_without_samples() -> None:
    good = arguments(EA)
    del good["query_mean"], good["query_cov"]
    with pytest.raises(ValueError, match="query_samples must hold at least one sample"):
        ops.score_expected_attention(**good, query_samples=torch.ones(2, 4, 0, 16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_statistics_are_not_rounded_by_autocast(name: str, dtype: torch.dtype) -> None:
    good = arguments(name)
    exact = getattr(ops, name)(**good)
    with torch.autocast("cpu", dtype):
        inside = getattr(ops, name)(**good)
    torch.testing.assert_close(inside, exact, rtol=0, atol=0)


def test_the_definition_takes_no_rows() -> None:
    none = {name: value[:0] if isinstance(value, Tensor) else value for name, value in arguments(EA).items()}
    del none["query_mean"], none["query_cov"]
    none["query_samples"] = torch.ones(0, 4, 3, 16)
    assert reference.score_expected_attention(**none).shape == ops.score_expected_attention(**none).shape == (0, 2, 12)
