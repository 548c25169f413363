"""Bad input: the message names the argument, what came and what was expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastattn import ops

DEVICE = torch.get_default_device()  # of the run: see --device

INT = torch.int32


def good() -> dict[str, dict[str, Any]]:
    """A valid call of every operator; a case below replaces one argument."""
    query, key, value = torch.zeros(2, 4, 3, 8), torch.zeros(2, 2, 5, 8), torch.zeros(2, 2, 5, 6)
    return {
        "attention": {"query": query, "key": key, "value": value},
        "decode_attention": {"query": query, "key": key, "value": value, "lengths": torch.ones(2, 2, dtype=INT)},
        "latent_decode": {
            "query_latent": query,
            "query_rope": torch.zeros(2, 4, 3, 2),
            "cache": torch.zeros(2, 7, 10),
            "lengths": torch.ones(2, dtype=INT),
            "scale": 0.1,
        },
        "merge_attention": {"outs": [query, query], "lses": [torch.zeros(2, 4, 3)] * 2},
        "qk_scores": {"query": query, "key": key},
    }


GRAD = torch.zeros(2, 4, 3, 8).requires_grad_()
META = torch.zeros(2, 2, 5, 8, device="meta")
# operator, argument, bad value, error, what the message holds: the argument, what was expected, what came
CASES: list[tuple[str, str, Any, type[Exception], tuple[str, ...]]] = [
    *(
        case
        for name in ("attention", "decode_attention", "qk_scores")
        for case in (
            (name, "query", [1.0], TypeError, ("query", "tensor", "list")),
            (name, "query", torch.zeros(4, 3, 8), ValueError, ("query", "B H Sq D", "[4, 3, 8]")),
            (name, "query", torch.zeros(2, 3, 3, 8), ValueError, ("query", "multiple of key's 2 heads", "3")),
            (name, "query", torch.zeros(2, 4, 3, 8, dtype=torch.int64), TypeError, ("query", "float16", "int64")),
            (name, "key", None, TypeError, ("key", "tensor", "NoneType")),
            (name, "key", torch.zeros(1, 2, 5, 8), ValueError, ("key", "size 2 in dim 0", "[1, 2, 5, 8]")),
            (name, "key", torch.zeros(2, 2, 5, 9), ValueError, ("key", "size 8 in dim 3", "[2, 2, 5, 9]")),
            (name, "key", torch.zeros(2, 2, 5, 8).half(), TypeError, ("key", "float32", "float16")),
            (name, "key", META, ValueError, ("key", "cpu", "meta")),
            (name, "scale", "1", TypeError, ("scale", "float", "str")),
            (name, "scale", True, TypeError, ("scale", "float", "bool")),
            (name, "scale", float("nan"), ValueError, ("scale", "finite", "nan")),
        )
    ),
    *(
        case
        for name in ("attention", "decode_attention")
        for case in (
            (name, "key", torch.zeros(2, 0, 5, 8), ValueError, ("value", "size 0 in dim 1", "[2, 2, 5, 6]")),
            (name, "value", torch.zeros(2, 5, 6), ValueError, ("value", "Dv", "[2, 5, 6]")),
            (name, "value", torch.zeros(1, 2, 5, 6), ValueError, ("value", "size 2 in dim 0", "[1, 2, 5, 6]")),
            (name, "value", torch.zeros(2, 4, 5, 6), ValueError, ("value", "size 2 in dim 1", "[2, 4, 5, 6]")),
            (name, "value", torch.zeros(2, 2, 6, 6), ValueError, ("value", "size 5 in dim 2", "[2, 2, 6, 6]")),
            (name, "value", torch.zeros(2, 2, 5, 6).double(), TypeError, ("value", "float32", "float64")),
            (name, "lengths", [1, 2], TypeError, ("lengths", "tensor", "list")),
            (name, "lengths", torch.zeros(3, 3, 3, dtype=INT), ValueError, ("lengths", "[B", "[3, 3, 3]")),
        )
    ),
    ("attention", "lengths", torch.ones(2, dtype=torch.int64), TypeError, ("lengths", "int32", "int64")),
    ("attention", "lengths", torch.ones(3, dtype=INT), ValueError, ("lengths", "[2]", "[3]")),
    ("attention", "lengths", torch.ones(2, dtype=INT, device="meta"), ValueError, ("lengths", DEVICE.type, "meta")),
    ("attention", "key_start", torch.ones(2), TypeError, ("key_start", "int32", "float32")),
    ("attention", "key_start", torch.ones(2, 1, dtype=INT), ValueError, ("key_start", "[B]", "[2, 1]")),
    ("decode_attention", "lengths", torch.ones(2, 2), TypeError, ("lengths", "int32", "float32")),
    ("decode_attention", "lengths", torch.ones(2, 4, dtype=INT), ValueError, ("lengths", "[2, 2]", "[2, 4]")),
    ("decode_attention", "query", GRAD, ValueError, ("decode_attention has no gradient", "query")),
    ("qk_scores", "query", GRAD, ValueError, ("qk_scores has no gradient", "query")),
    ("qk_scores", "scale", None, TypeError, ("scale", "float", "None")),
    ("latent_decode", "query_latent", torch.zeros(2, 4, 8), ValueError, ("query_latent", "B H Sq R", "[2, 4, 8]")),
    ("latent_decode", "query_latent", GRAD, ValueError, ("latent_decode has no gradient", "query_latent")),
    ("latent_decode", "query_rope", torch.zeros(2, 3, 3, 2), ValueError, ("query_rope", "size 4 in dim 1", "[2, 3,")),
    ("latent_decode", "query_rope", torch.zeros(2, 4, 3, 2).half(), TypeError, ("query_rope", "float32", "float16")),
    ("latent_decode", "cache", torch.zeros(2, 7, 9), ValueError, ("cache", "size 10 in dim 2", "[2, 7, 9]")),
    ("latent_decode", "cache", torch.zeros(1, 7, 10), ValueError, ("cache", "size 2 in dim 0", "[1, 7, 10]")),
    ("latent_decode", "cache", torch.zeros(2, 1, 7, 10), ValueError, ("cache", "B C R+Dr", "[2, 1, 7, 10]")),
    ("latent_decode", "lengths", torch.ones(2, 1, dtype=INT), ValueError, ("lengths", "[B]", "[2, 1]")),
    ("latent_decode", "scale", None, TypeError, ("scale", "float")),
    ("merge_attention", "outs", [], ValueError, ("outs", "lses", "0 and 2")),
    ("merge_attention", "outs", [torch.zeros(2, 4, 3, 8)], ValueError, ("same number", "1 and 2")),
    ("merge_attention", "outs", [torch.zeros(2, 4, 3, 8), 1], TypeError, ("outs[1]", "tensor", "int")),
    (
        "merge_attention",
        "outs",
        [torch.zeros(2, 4, 3, 8), torch.zeros(2, 4, 3, 7)],
        ValueError,
        ("outs[1]", "[2, 4, 3, 8]", "[2, 4, 3, 7]"),
    ),
    (
        "merge_attention",
        "outs",
        [torch.zeros(2, 4, 3, 8), torch.zeros(2, 4, 3, 8).half()],
        TypeError,
        ("outs[1]", "float32", "float16"),
    ),
    ("merge_attention", "lses", [torch.zeros(2, 4, 1)] * 2, ValueError, ("lses[0]", "[2, 4, 3]", "[2, 4, 1]")),
    ("merge_attention", "lses", [torch.zeros(2, 4, 3).double()] * 2, TypeError, ("lses[0]", "float32", "float64")),
    ("merge_attention", "outs", [GRAD, GRAD], ValueError, ("merge_attention has no gradient", "outs[0]")),
]


@pytest.mark.parametrize(("operator", "argument", "bad", "error", "parts"), CASES)
def test_bad_input_is_named(
    operator: str, argument: str, bad: Any, error: type[Exception], parts: tuple[str, ...]
) -> None:
    function: Callable[..., Any] = getattr(ops, operator)
    arguments = good()[operator]
    function(**arguments)  # the call that the case spoils is valid
    arguments[argument] = bad
    with pytest.raises(error) as raised:
        function(**arguments)
    for part in parts:
        assert part in str(raised.value)


@pytest.mark.parametrize("operator", ["decode_attention", "latent_decode", "merge_attention", "qk_scores"])
def test_arguments_that_require_gradients_are_fine_without_gradients(operator: str) -> None:
    arguments = good()[operator]
    for value in arguments.values():
        if isinstance(value, Tensor) and value.is_floating_point():
            value.requires_grad_()
    with torch.no_grad():
        getattr(ops, operator)(**arguments)
