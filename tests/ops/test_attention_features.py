"""``attention`` with windows, sinks, soft caps and ALiBi: values and gradients against a dense float64 computation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastattn import ops
from fastattn.ops import reference
from fastattn.ops.cpu import _blocks
from tests._helpers import draw, plain
from tests._helpers.budget import assert_lse, assert_within_budget, plain_dtype
from tests._helpers.features import buffer_distance, cast, dense, features
from tests.ops.test_attention import calls, largest_score

Call = tuple[Tensor, Tensor, Tensor, dict[str, Any], dict[str, Any]]


@st.composite
def featured(draw_: Any) -> Call:
    query, key, value, options = draw_(calls())
    return query, key, value, options, draw_(features(query.shape[1]))


def densely(
    query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any], extra: dict[str, Any], narrow: bool = False
) -> Any:
    """The dense computation in the dtype of ``query``; keys are finite."""
    queries, keys = query.shape[2], key.shape[2]
    distance = buffer_distance(queries, keys)
    visible = plain.visible_in_range(queries, keys, options["causal"], options["key_start"], options["lengths"])
    visible = visible & (distance < extra.get("window", 1 << 40))
    others = {name: option for name, option in extra.items() if name != "window"}
    return dense(query, key, value, distance, visible, scale=options["scale"], narrow=narrow, **others)


@draw.cases(120)
@given(featured())
def test_forward_equals_the_dense_computation(call: Call) -> None:
    query, key, value, options, extra = call
    out, lse = ops.attention(query, key, value, return_lse=True, **options, **extra)
    clean = query, key.nan_to_num(), value.nan_to_num()
    exact, exact_lse = densely(*(t.double() for t in clean), options, cast(extra, torch.float64))
    usual, _ = densely(*(t.to(plain_dtype(query.dtype)) for t in clean), options, cast(extra, torch.float32))
    assert_within_budget(out, exact, usual, "out")
    largest = largest_score(query, key, options["scale"]) + 2 * 40 * ("alibi_slopes" in extra) + 8 * ("sinks" in extra)
    assert_lse(lse, exact_lse, query.dtype, largest)
    assert out.is_contiguous()
    assert lse.is_contiguous()


@draw.cases(60)
@given(featured())
def test_the_definition_equals_the_dense_computation(call: Call) -> None:
    query, key, value, options, extra = call
    wide = [t.double() for t in (query, key, value)]
    actual = reference.attention(*wide, return_lse=True, **options, **cast(extra, torch.float64))
    clean = [t.nan_to_num() for t in wide]
    for one, two in zip(actual, densely(*clean, options, cast(extra, torch.float64)), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-12)


@draw.cases(80)
@given(featured(), draw.seeds, draw.layouts)
def test_backward_equals_autograd_through_the_dense_computation(call: Call, seed: int, layout: str) -> None:
    query, key, value, options, extra = call
    grad = draw.normal(*query.shape[:3], value.shape[3], dtype=query.dtype, seed=seed)
    sinks = extra.get("sinks")

    def gradients(function: Any, tensors: Any, extra: dict[str, Any], grad: Tensor) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in tensors]
        if sinks is not None:
            extra = extra | {"sinks": extra["sinks"].detach().requires_grad_()}
        out = function(*leaves, extra)
        return list(torch.autograd.grad(out, [*leaves, *([extra["sinks"]] if sinks is not None else [])], grad))

    def under_test(query: Tensor, key: Tensor, value: Tensor, extra: dict[str, Any]) -> Tensor:
        return ops.attention(query, key, value, **options, **extra)

    def by_dense(query: Tensor, key: Tensor, value: Tensor, extra: dict[str, Any]) -> Tensor:
        return densely(query, key, value, options, extra)[0]

    actual = gradients(under_test, (query, key, value), extra, draw.strided(grad, layout))
    clean = [query, key.nan_to_num(), value.nan_to_num()]
    exact = gradients(by_dense, [t.double() for t in clean], cast(extra, torch.float64), grad.double())
    dtype = plain_dtype(query.dtype)
    ways = [by_dense, lambda *args: densely(*args[:3], options, args[3], narrow=True)[0]]
    narrow = cast(extra, torch.float32), [t.to(dtype) for t in clean], grad.to(dtype)
    usual = [gradients(way, narrow[1], narrow[0], narrow[2]) for way in ways]
    terms = 0.0 if grad.numel() == 0 or value.numel() == 0 else largest_score(grad, clean[2], 1.0)
    for name, one, two, three in zip(("query", "key", "value"), actual, exact, zip(*usual, strict=True), strict=False):
        assert_within_budget(one, two, three, f"gradient of {name}", cancelling=0.0 if name == "value" else terms)
    if sinks is not None:
        assert actual[3].dtype == sinks.dtype
        # one number of every query and row, from outputs rounded to the query's dtype
        unit = torch.finfo(query.dtype).eps + torch.finfo(sinks.dtype).eps
        if query.dtype != torch.float64:
            unit += torch.finfo(torch.float32).eps
        allowed = 8 * unit * max(terms, 1.0) * max(1, query.shape[0] * query.shape[2])
        assert (actual[3].double() - exact[3]).abs().le(allowed).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("queries", "keys", "window"), [(600, 600, 100), (300, 700, 256), (700, 300, 1)])
def test_blocks_of_many_sizes(dtype: torch.dtype, queries: int, keys: int, window: int) -> None:
    query = draw.normal(1, 4, queries, 16, dtype=dtype, seed=1)
    key, value = (draw.normal(1, 2, keys, 16, dtype=dtype, seed=seed) for seed in (2, 3))
    options = {"causal": True, "scale": None, "key_start": None, "lengths": None}
    extra = {"window": window, "softcap": 2.0}
    out = ops.attention(query, key, value, **options, **extra)
    exact, _ = densely(*(t.double() for t in (query, key, value)), options, extra)
    usual, _ = densely(query, key, value, options, extra)
    assert_within_budget(out, exact, usual, "out")


def test_a_window_does_not_compute_the_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault class: a window that only masks. The numbers of computed scores are counted."""
    computed = 0
    score = _blocks.score

    def counting(*args: Any) -> Any:
        nonlocal computed
        result = score(*args)
        computed += result.value.numel()
        return result

    monkeypatch.setattr(_blocks, "score", counting)
    query = draw.normal(1, 1, 4096, 8)
    ops.attention(query, query, query, causal=True, window=64)
    assert 0 < computed <= 4096 * (256 + 64)


def test_a_query_without_keys_gives_zero_and_the_sink() -> None:
    query, key = draw.normal(1, 2, 4, 8), draw.normal(1, 1, 2, 8)
    sinks = torch.tensor([0.5, -3.0], requires_grad=True)
    out, lse = ops.attention(query, key, key, causal=True, sinks=sinks, return_lse=True)
    assert torch.equal(out[:, :, :2], torch.zeros(1, 2, 2, 8))
    assert torch.equal(lse[0, :, :2], torch.tensor([[0.5, 0.5], [-3.0, -3.0]]))
    assert not lse.requires_grad
    capped, capped_lse = ops.attention(query, key, key, causal=True, sinks=sinks, softcap=1e6, return_lse=True)
    torch.testing.assert_close(capped, out)
    torch.testing.assert_close(capped_lse, lse)


def test_a_sink_of_minus_infinity_is_no_sink() -> None:
    query = draw.normal(1, 2, 4, 8)
    sinks = torch.full((2,), float("-inf"))
    torch.testing.assert_close(
        ops.attention(query, query, query, causal=True, sinks=sinks, return_lse=True),
        ops.attention(query, query, query, causal=True, return_lse=True),
    )
    out, lse = ops.attention(query, query[:, :, :0], query[:, :, :0], sinks=sinks, return_lse=True)
    assert not out.any()
    assert torch.equal(lse, torch.full_like(lse, float("-inf")))


def test_gradcheck_with_every_feature() -> None:
    query = draw.normal(2, 2, 4, 2, dtype=torch.float64, seed=1).requires_grad_()
    key, value = (draw.normal(2, 1, 5, 2, dtype=torch.float64, seed=seed).requires_grad_() for seed in (2, 3))
    sinks = draw.normal(2, dtype=torch.float64, seed=4).requires_grad_()
    slopes, start = torch.tensor([0.5, 0.25]), torch.tensor([0, 1], dtype=torch.int32)

    def attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Any:
        return ops.attention(
            query, key, value, causal=True, key_start=start, window=3, sinks=sinks, softcap=0.7, alibi_slopes=slopes
        )

    assert torch.autograd.gradcheck(attend, (query, key, value, sinks), fast_mode=True)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"window": 0}, ValueError, "window must be at least 1, got 0"),
        ({"window": 2.0}, TypeError, "window must be an integer, got float"),
        ({"window": True}, TypeError, "window must be an integer, got bool"),
        ({"softcap": 0.0}, ValueError, "softcap must be positive and finite, got 0.0"),
        ({"softcap": -1.0}, ValueError, "softcap must be positive and finite, got -1.0"),
        ({"softcap": "5"}, TypeError, "softcap must be a float or None, got str"),
        ({"sinks": torch.zeros(3)}, ValueError, "sinks must have size 2 in dim 0"),
        ({"sinks": torch.zeros(2, dtype=torch.int32)}, TypeError, "sinks must be float16, .* got torch.int32"),
        ({"sinks": [0.0, 0.0]}, TypeError, r"sinks must be a tensor \[H\], got list"),
        ({"sinks": torch.zeros(2, device="meta")}, ValueError, "sinks must be on query's device cpu, got meta"),
        ({"alibi_slopes": torch.zeros(1, 2)}, ValueError, r"alibi_slopes must have shape \[H\], got \[1, 2\]"),
        ({"alibi_slopes": torch.zeros(2, dtype=torch.int64)}, TypeError, "alibi_slopes must be float16"),
        ({"alibi_slopes": torch.zeros(2, requires_grad=True)}, ValueError, "no gradient for alibi_slopes"),
    ],
    ids=str,
)
def test_wrong_features_are_named(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(error, match=message):
        ops.attention(x, x, x, **wrong)


# -- what PyTorch wraps around an operator -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 3, (torch.float32, torch.bfloat16, torch.float16)], ids=str)
def test_autocast_casts_as_scaled_dot_product_attention_does(dtypes: tuple[torch.dtype, ...]) -> None:
    query, key, value = (
        draw.normal(1, 2, 5, 8, dtype=dtype, seed=seed).requires_grad_() for seed, dtype in enumerate(dtypes)
    )
    with torch.autocast("cpu", torch.bfloat16):
        out = ops.attention(query, key, value, sinks=torch.zeros(2), window=9)
        usual = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    assert out.dtype == usual.dtype == torch.bfloat16
    out.sum().backward()
    assert [t.grad.dtype for t in (query, key, value)] == list(dtypes)
    casted = (t.detach().bfloat16() for t in (query, key, value))
    assert torch.equal(out, ops.attention(*casted, sinks=torch.zeros(2), window=9))


def test_autocast_leaves_float64_and_mixed_dtypes_are_refused_without() -> None:
    x = draw.normal(1, 2, 5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.attention(x.double(), x.double(), x.double()).dtype == torch.float64
    with pytest.raises(TypeError, match="key must have query's dtype"):
        ops.attention(x, x.bfloat16(), x)


def test_forward_mode_is_refused_and_not_zero() -> None:
    """Fault: torch.func.jvp and jacfwd gave zeros silently."""
    x = draw.normal(1, 2, 5, 8)
    with pytest.raises(RuntimeError, match="attention has no forward-mode derivative"):
        torch.func.jvp(lambda query: ops.attention(query, x, x), (x,), (x,))
    with pytest.raises(RuntimeError, match="attention has no forward-mode derivative"):
        torch.func.jacfwd(lambda value: ops.attention(x, x, value))(x)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_goes_row_by_row_and_the_gradient_of_torch_func_is_refused() -> None:
    x = draw.normal(3, 1, 2, 5, 8)

    def attend(query: Tensor) -> Tensor:
        return ops.attention(query, query, query, causal=True, window=3)

    torch.testing.assert_close(torch.vmap(attend)(x), torch.stack([attend(row) for row in x]))
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda query: attend(query).sum())(x[0])
