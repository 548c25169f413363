"""``attention``: values, log-sum-exp and gradients against the definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastattn import ops
from fastattn.ops import reference
from fastattn.ops.cpu._flash import cut
from tests._helpers import draw, plain
from tests._helpers.budget import assert_lse, assert_within_budget, plain_dtype


@st.composite
def calls(draw_: Any, tokens: int = 40, batch: int = 3) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Inputs in any layout, keys and values NaN outside their row's valid range."""
    rows = draw_(st.integers(0, batch))
    kv_heads, groups = draw_(st.integers(1, 2)), draw_(st.integers(1, 3))
    queries, keys = draw_(draw.sizes(tokens, 0)), draw_(draw.sizes(tokens, 0))
    dim, value_dim = draw_(st.sampled_from([(8, 8), (16, 16), (7, 5), (4, 12), (24, 16)]))
    dtype, seed = draw_(draw.dtypes), draw_(draw.seeds)
    query = draw.normal(rows, kv_heads * groups, queries, dim, dtype=dtype, seed=seed)
    key = draw.normal(rows, kv_heads, keys, dim, dtype=dtype, seed=seed + 1)
    value = draw.normal(rows, kv_heads, keys, value_dim, dtype=dtype, seed=seed + 2)
    options: dict[str, Any] = {"causal": draw_(st.booleans()), "scale": draw_(st.sampled_from([None, 0.3, -1.0, 0.0]))}
    for name in ("key_start", "lengths"):
        options[name] = draw_(draw.lengths((rows,), keys)) if draw_(st.booleans()) else None
    lengths = torch.full((rows,), keys) if options["lengths"] is None else options["lengths"]
    query, key, value = (draw.strided(t, draw_(draw.layouts)) for t in (query, key, value))
    for buffer in (key, value):
        draw.poison_slots_(buffer, lengths, options["key_start"])
    return query, key, value, options


def exactly(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return reference.attention(query.double(), key.double(), value.double(), return_lse=True, **options)


def in_plain_pytorch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    scale: float | None,
    key_start: Tensor | None,
    lengths: Tensor | None,
) -> Tensor:
    scale = query.shape[3] ** -0.5 if scale is None else scale
    visible = plain.visible_in_range(query.shape[2], key.shape[2], causal, key_start, lengths)
    return plain.attention(query, key, value, visible, scale)[0]


def largest_score(query: Tensor, key: Tensor, scale: float | None) -> float:
    """A bound: the largest norms multiplied."""
    if query.numel() == 0 or key.numel() == 0:
        return 0.0
    scale = query.shape[3] ** -0.5 if scale is None else abs(scale)
    return scale * (query.double().norm(dim=-1).max() * key.double().nan_to_num().norm(dim=-1).max()).item()


@draw.cases(60)
@given(calls())
def test_forward_equals_the_definition(call: tuple[Tensor, Tensor, Tensor, dict[str, Any]]) -> None:
    query, key, value, options = call
    out, lse = ops.attention(query, key, value, return_lse=True, **options)
    exact, exact_lse = exactly(query, key, value, options)
    assert_within_budget(out, exact, in_plain_pytorch(query, key, value, **options), "out")
    assert_lse(lse, exact_lse, query.dtype, largest_score(query, key, options["scale"]))
    assert out.is_contiguous()
    assert lse.is_contiguous()


def gradients(
    function: Any, query: Tensor, key: Tensor, value: Tensor, grad: Tensor, options: dict[str, Any]
) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in (query, key, value)]
    return torch.autograd.grad(function(*leaves, **options), leaves, grad)


@draw.cases(40)
@given(calls(), draw.seeds, draw.layouts)
def test_backward_equals_autograd_through_the_definition(
    call: tuple[Tensor, Tensor, Tensor, dict[str, Any]], seed: int, layout: str
) -> None:
    query, key, value, options = call
    grad = draw.normal(*query.shape[:3], value.shape[3], dtype=query.dtype, seed=seed + 3)
    actual = gradients(ops.attention, query, key, value, draw.strided(grad, layout), options)
    # Autograd multiplies a masked key's zero gradient by its value, so the definition gets no NaN here.
    clean = [query, key.nan_to_num(), value.nan_to_num(), grad]
    exact = gradients(reference.attention, *(t.double() for t in clean), options)
    expected = gradients(in_plain_pytorch, *(t.to(plain_dtype(query.dtype)) for t in clean), options)
    for name, one, two, three in zip(("query", "key", "value"), actual, exact, expected, strict=True):
        # A query with one key has p (dp - sum p dp) = 0 exactly, from terms of the size of dp.
        terms = 0.0 if name == "value" or two.numel() == 0 else largest_score(grad, clean[2], 1.0)
        assert_within_budget(one, two, three, f"gradient of {name}", cancelling=terms)
        assert one.is_contiguous()


@pytest.mark.parametrize(("queries", "keys"), [(2, 4), (4, 2)])
def test_gradcheck(queries: int, keys: int) -> None:
    query = draw.normal(2, 2, queries, 2, dtype=torch.float64, seed=1).requires_grad_()
    key = draw.normal(2, 1, keys, 2, dtype=torch.float64, seed=2).requires_grad_()
    value = draw.normal(2, 1, keys, 3, dtype=torch.float64, seed=3).requires_grad_()
    start, lengths = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([keys, keys - 1], dtype=torch.int32)

    def attend(*args: Tensor) -> Any:
        return ops.attention(*args, causal=True, key_start=start, lengths=lengths)

    assert torch.autograd.gradcheck(attend, (query, key, value), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("queries", "keys"), [(63, 600), (256, 257), (770, 513)])
def test_sizes_beyond_the_kernels_blocks(dtype: torch.dtype, queries: int, keys: int) -> None:
    query = draw.normal(1, 4, queries, 32, dtype=dtype, seed=1)
    key, value = (draw.normal(1, 2, keys, 32, dtype=dtype, seed=seed) for seed in (2, 3))
    options = {"causal": True, "scale": None, "key_start": torch.tensor([3], dtype=torch.int32), "lengths": None}
    out, lse = ops.attention(query, key, value, return_lse=True, **options)
    exact, exact_lse = exactly(query, key, value, options)
    assert_within_budget(out, exact, in_plain_pytorch(query, key, value, **options), "out")
    assert_lse(lse, exact_lse, dtype, largest_score(query, key, None))


def test_rows_without_keys_give_zero_and_no_gradient() -> None:
    query = draw.normal(2, 2, 3, 4, seed=1).requires_grad_()
    key = torch.full((2, 1, 5, 4), float("nan")).requires_grad_()
    value = torch.full((2, 1, 5, 4), float("nan")).requires_grad_()
    lengths = torch.tensor([0, 2], dtype=torch.int32)
    start = torch.tensor([0, 4], dtype=torch.int32)  # after its end
    out, lse = ops.attention(query, key, value, key_start=start, lengths=lengths, return_lse=True)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, float("-inf")))
    out.sum().backward()
    for leaf in (query, key, value):
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))


def test_causal_is_aligned_bottom_right_with_more_queries_than_keys() -> None:
    """Fault class: top-left masks when the numbers of queries and keys differ."""
    key = torch.zeros(1, 1, 2, 4)
    value = torch.tensor([1.0, 3.0]).view(1, 1, 2, 1)
    out, lse = ops.attention(torch.zeros(1, 1, 4, 4), key, value, causal=True, return_lse=True)
    assert out.flatten().tolist() == [0.0, 0.0, 1.0, 2.0]
    assert lse.flatten().tolist() == pytest.approx([float("-inf"), float("-inf"), 0.0, 0.6931472])  # log 1, log 2


def test_a_row_of_a_batch_gives_what_it_gives_alone() -> None:
    query, key, value = (draw.normal(3, heads, 9, 8, seed=heads) for heads in (4, 2, 2))
    options = {"key_start": torch.tensor([0, 4, 0], dtype=torch.int32)}
    together = ops.attention(query, key, value, causal=True, **options)
    for row in range(3):
        one = slice(row, row + 1)
        alone = ops.attention(query[one], key[one], value[one], causal=True, key_start=options["key_start"][one])
        torch.testing.assert_close(together[one], alone, rtol=0, atol=1e-6)


def test_a_second_derivative_is_refused() -> None:
    query = draw.normal(1, 2, 3, 8).requires_grad_()
    out = ops.attention(query, query, query)
    (grad,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="attention has no second derivative"):
        (query.sum() + grad.square().sum()).backward()


def test_lse_carries_no_gradient() -> None:
    query = draw.normal(1, 1, 2, 4).requires_grad_()
    _, lse = ops.attention(query, query, query, return_lse=True)
    assert not lse.requires_grad


@pytest.mark.cpu_only
@draw.cases(200)
@given(st.integers(0, 9), st.integers(0, 9), st.integers(-12, 12))
def test_pieces_cover_exactly_the_visible_keys_once(queries: int, keys: int, first: int) -> None:
    covered = torch.zeros(queries, keys)
    for q0, q1, k0, k1, causal in cut(queries, keys, first):
        assert q0 < q1
        assert k0 < k1
        block = torch.ones(q1 - q0, k1 - k0)
        covered[q0:q1, k0:k1] += block.tril() if causal else block
    visible = torch.arange(keys) < torch.arange(queries)[:, None] + first
    assert torch.equal(covered, visible.float())


@pytest.mark.parametrize("causal", [False, True])
def test_heads_of_no_dims_score_every_key_zero(causal: bool) -> None:
    query, key, value = draw.normal(1, 4, 3, 0), draw.normal(1, 2, 5, 0), draw.normal(1, 2, 5, 8).requires_grad_()
    actual = ops.attention(query, key, value, causal=causal, return_lse=True)
    expected = reference.attention(query, key, value, causal=causal, scale=1.0, return_lse=True)
    torch.testing.assert_close(actual, expected)
    grads = [torch.autograd.grad(out.sum(), value)[0] for out, _ in (actual, expected)]
    torch.testing.assert_close(*grads)
    lengths = torch.tensor([[5, 3]], dtype=torch.int32)
    decoded = ops.decode_attention(query, key, value.detach(), lengths, causal=causal, return_lse=True)
    expected = reference.decode_attention(query, key, value, lengths, causal=causal, scale=1.0, return_lse=True)
    torch.testing.assert_close(decoded, expected)
