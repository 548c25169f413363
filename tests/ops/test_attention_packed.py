"""Packed rows and nested tensors: equal to attention row by row, forward and backward."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastattn import ops
from fastattn.ops import reference
from tests._helpers import draw
from tests._helpers.budget import assert_lse, assert_within_budget, plain_dtype
from tests._helpers.features import buffer_distance, cast, dense, features
from tests.ops.test_attention import largest_score

Packed = tuple[Tensor, Tensor, Tensor, list[int], list[int], dict[str, Any]]


def bounds(lengths: list[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


@st.composite
def packed(draw_: Any) -> Packed:
    """Rows in any layout, some empty on one side or both."""
    rows = draw_(st.integers(0, 4))
    cu_q, cu_k = (bounds(draw_(st.lists(draw.sizes(20, 0), min_size=rows, max_size=rows))) for _ in range(2))
    kv_heads, groups = draw_(st.integers(1, 2)), draw_(st.integers(1, 3))
    dim, value_dim = draw_(st.sampled_from([(8, 8), (7, 5), (4, 12)]))
    dtype, seed = draw_(draw.dtypes), draw_(draw.seeds)
    query = draw.normal(1, kv_heads * groups, cu_q[-1], dim, dtype=dtype, seed=seed)
    key = draw.normal(1, kv_heads, cu_k[-1], dim, dtype=dtype, seed=seed + 1)
    value = draw.normal(1, kv_heads, cu_k[-1], value_dim, dtype=dtype, seed=seed + 2)
    query, key, value = (draw.strided(t, draw_(draw.layouts)) for t in (query, key, value))
    options = draw_(features(kv_heads * groups)) | {"causal": draw_(st.booleans())}
    return query, key, value, cu_q, cu_k, options


def by_rows(
    query: Tensor, key: Tensor, value: Tensor, cu_q: list[int], cu_k: list[int], options: Any, narrow: bool = False
) -> Any:
    """Dense attention of every row by itself, in the dtype of ``query``."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    others = {name: option for name, option in cast(options, dtype).items() if name not in ("window", "causal")}
    outs, lses = [(query.sum() + key.sum() + value.sum()) * value.new_zeros(1, query.shape[1], 0, value.shape[3])], []
    lses.append(query.new_zeros(1, query.shape[1], 0, dtype=dtype))
    for (q0, q1), (k0, k1) in zip(itertools.pairwise(cu_q), itertools.pairwise(cu_k), strict=True):
        distance = buffer_distance(q1 - q0, k1 - k0)
        visible = distance < options.get("window", 1 << 40)
        visible = visible & (distance >= 0) if options["causal"] else visible
        out, lse = dense(
            query[:, :, q0:q1], key[:, :, k0:k1], value[:, :, k0:k1], distance, visible[None], narrow=narrow, **others
        )
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@draw.cases(100)
@given(packed())
def test_forward_equals_row_by_row(call: Packed) -> None:
    query, key, value, cu_q, cu_k, options = call
    packed_rows = {"cu_seqlens_q": int32(cu_q), "cu_seqlens_k": int32(cu_k)}
    out, lse = ops.attention(query, key, value, return_lse=True, **packed_rows, **options)
    wide = [t.double() for t in (query, key, value)]
    exact, exact_lse = by_rows(*wide, cu_q, cu_k, options)
    usual, _ = by_rows(*(t.to(plain_dtype(query.dtype)) for t in (query, key, value)), cu_q, cu_k, options)
    assert_within_budget(out, exact, usual, "out")
    largest = largest_score(query, key, None) + 40 * ("alibi_slopes" in options) + 8 * ("sinks" in options)
    assert_lse(lse, exact_lse, query.dtype, largest)
    defined = reference.attention(*wide, return_lse=True, **packed_rows, **cast(options, torch.float64))
    torch.testing.assert_close(defined[0], exact, rtol=0, atol=1e-12)
    torch.testing.assert_close(defined[1], exact_lse, rtol=0, atol=1e-12)


@draw.cases(60)
@given(packed(), draw.seeds)
def test_backward_equals_row_by_row(call: Packed, seed: int) -> None:
    query, key, value, cu_q, cu_k, options = call
    grad = draw.normal(*query.shape[:3], value.shape[3], dtype=query.dtype, seed=seed)
    packed_rows = {"cu_seqlens_q": int32(cu_q), "cu_seqlens_k": int32(cu_k)}

    def gradients(function: Any, tensors: Any, grad: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in tensors]
        return torch.autograd.grad(function(*leaves), leaves, grad)

    def rows(*tensors: Tensor, narrow: bool = False) -> Tensor:
        return by_rows(*tensors, cu_q, cu_k, options, narrow)[0]

    tensors = query, key, value
    actual = gradients(lambda *t: ops.attention(*t, **packed_rows, **options), tensors, grad)
    exact = gradients(rows, [t.double() for t in tensors], grad.double())
    dtype = plain_dtype(query.dtype)
    ways = [functools.partial(rows, narrow=narrow) for narrow in (False, True)]
    usual = [gradients(way, [t.to(dtype) for t in tensors], grad.to(dtype)) for way in ways]
    terms = 0.0 if grad.numel() == 0 or value.numel() == 0 else largest_score(grad, value, 1.0)
    for name, one, two, three in zip(("query", "key", "value"), actual, exact, zip(*usual, strict=True), strict=True):
        assert_within_budget(one, two, three, f"gradient of {name}", cancelling=0.0 if name == "value" else terms)


def nested(lengths: list[int], heads: int, dim: int, seed: int) -> Tensor:
    """``[B, heads, j, D]``, as ``scaled_dot_product_attention`` takes it."""
    rows = [draw.normal(length, heads, dim, seed=seed + row) for row, length in enumerate(lengths)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)


def test_nested_tensors_equal_row_by_row() -> None:
    query, key, value = nested([3, 0, 7], 4, 8, 1), nested([5, 2, 4], 2, 8, 11), nested([5, 2, 4], 2, 6, 21)
    options: dict[str, Any] = {"causal": True, "window": 3, "sinks": torch.tensor([0.0, 1.0, -1.0, 2.0])}
    out, lse = ops.attention(query, key, value, return_lse=True, **options)
    assert out.layout == torch.jagged
    assert (out.shape[0], out.shape[1], out.shape[3], lse.dim()) == (3, 4, 6, 3)
    assert out.shape[2] == lse.shape[2] == query.shape[2]  # the same ragged rows, which can be added
    rows = zip(query.unbind(), key.unbind(), value.unbind(), out.unbind(), lse.unbind(), strict=True)
    for row_query, row_key, row_value, row_out, row_lse in rows:
        alone = ops.attention(row_query[None], row_key[None], row_value[None], return_lse=True, **options)
        torch.testing.assert_close((row_out[None], row_lse[None]), alone)


def test_gradients_flow_into_nested_tensors() -> None:
    leaves = [
        torch.nested.nested_tensor([draw.normal(n, 2, 4, seed=s + n) for n in (3, 5)], layout=torch.jagged)
        for s in range(3)
    ]
    for leaf in leaves:
        leaf.requires_grad_()
    out = ops.attention(*(leaf.transpose(1, 2) for leaf in leaves), causal=True)
    torch.cat([row.flatten() for row in out.unbind()]).square().sum().backward()
    for row in range(2):
        alone = [leaf.detach().unbind()[row].transpose(0, 1)[None].requires_grad_() for leaf in leaves]
        ops.attention(*alone, causal=True).square().sum().backward()
        for leaf, one in zip(leaves, alone, strict=True):
            assert leaf.grad is not None
            torch.testing.assert_close(leaf.grad.unbind()[row].transpose(0, 1)[None], one.grad)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"cu_seqlens_k": None}, ValueError, "cu_seqlens_k must be given where cu_seqlens_q is, got None"),
        ({"cu_seqlens_q": None}, ValueError, "cu_seqlens_q must be given where cu_seqlens_k is, got None"),
        ({"cu_seqlens_q": int32([1, 4])}, ValueError, "cu_seqlens_q must start at 0, got 1"),
        ({"cu_seqlens_k": int32([0, 3])}, ValueError, "cu_seqlens_k must end at key's 4 tokens, got 3"),
        (
            {"cu_seqlens_q": int32([0, 3, 2, 4]), "cu_seqlens_k": int32([0, 1, 1, 4])},
            ValueError,
            "cu_seqlens_q must never fall, got 3 and then 2 for row 1",
        ),
        ({"cu_seqlens_q": torch.tensor([0, 4])}, TypeError, "cu_seqlens_q must be int32, got torch.int64"),
        ({"cu_seqlens_q": int32([])}, ValueError, "cu_seqlens_q must have shape"),
        ({"cu_seqlens_k": int32([0, 2, 4])}, ValueError, r"cu_seqlens_k must have shape \[N\+1\] = \[2\], got \[3\]"),
        ({"key_start": int32([0])}, ValueError, "key_start must be None with cu_seqlens_q"),
        ({"lengths": int32([4])}, ValueError, "lengths must be None with cu_seqlens_q"),
    ],
    ids=str,
)
def test_wrong_bounds_are_named(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    x = torch.zeros(1, 2, 4, 4)
    with pytest.raises(error, match=message):
        ops.attention(x, x, x, **({"cu_seqlens_q": int32([0, 4]), "cu_seqlens_k": int32([0, 4])} | wrong))


def test_packed_rows_are_one_batch_and_nested_ones_are_all_nested() -> None:
    x, rows = torch.zeros(2, 2, 4, 4), int32([0, 4])
    with pytest.raises(ValueError, match="query must have batch 1 with cu_seqlens_q"):
        ops.attention(x, x, x, cu_seqlens_q=rows, cu_seqlens_k=rows)
    query = nested([3, 1], 2, 4, 0)
    with pytest.raises(TypeError, match="key must be a nested tensor of layout jagged, as query is, got a tensor"):
        ops.attention(query, x, x)
    with pytest.raises(ValueError, match=r"query must be nested \[B, heads, j, D\]"):
        ops.attention(query.transpose(1, 2), query, query)
    with pytest.raises(ValueError, match="key must have query's 2 rows, got 3"):
        ops.attention(query, nested([1, 2, 1], 2, 4, 0), nested([1, 2, 1], 2, 4, 0))
    with pytest.raises(ValueError, match="value must have key's tokens in every row"):
        ops.attention(query, query, nested([1, 3], 2, 4, 0))
    with pytest.raises(ValueError, match="cu_seqlens_q must be None with a nested query"):
        ops.attention(query, query, query, cu_seqlens_q=rows, cu_seqlens_k=rows)


@pytest.mark.compile
def test_packed_rows_compile_without_a_graph_break() -> None:
    x = draw.normal(1, 2, 9, 8).requires_grad_()
    rows, sinks = int32([0, 4, 4, 9]), torch.zeros(2, requires_grad=True)

    def loss(x: Tensor, sinks: Tensor) -> Tensor:
        out = ops.attention(x, x, x, causal=True, window=3, sinks=sinks, cu_seqlens_q=rows, cu_seqlens_k=rows)
        return out.square().sum()

    expected = torch.autograd.grad(loss(x, sinks), (x, sinks))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for one, two in zip(torch.autograd.grad(compiled(x, sinks), (x, sinks)), expected, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-5)
