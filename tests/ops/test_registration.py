"""What PyTorch may rely on: schemas, fakes, autograd formulas and compilation of every attention operator."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastattn import ops
from tests._helpers import draw

INT = torch.int32
OPERATORS = torch.ops.fastattn


def _attention(dtype: torch.dtype, grad: bool) -> tuple[Any, ...]:
    query, key, value = (
        draw.normal(2, heads, 5, dim, dtype=dtype, seed=dim) for heads, dim in ((4, 8), (2, 8), (2, 6))
    )
    query = draw.strided(query, "tokens_before_heads")
    tensors = [t.requires_grad_(grad) for t in (query, key, value)]
    return (*tensors, True, 0.3, torch.tensor([0, 1], dtype=INT), torch.tensor([5, 4], dtype=INT))


def _attention_backward(dtype: torch.dtype) -> tuple[Any, ...]:
    query, key, value, causal, scale, start, lengths = _attention(dtype, grad=False)
    out, lse = OPERATORS.attention.default(query, key, value, causal, scale, start, lengths)
    return torch.ones_like(out), query, key, value, out, lse, causal, scale, start, lengths


def _featured(dtype: torch.dtype, grad: bool) -> tuple[Any, ...]:
    sinks = draw.normal(4, dtype=dtype).requires_grad_(grad)
    return (*_attention(dtype, grad), 3, 5.0, sinks, torch.tensor([0.5, 0.25, 0.1, 0.0]), None, None)


def _packed(dtype: torch.dtype, grad: bool) -> tuple[Any, ...]:
    *tensors, causal, scale, _, _ = _attention(dtype, grad=False)
    tensors = [t[:1].detach().requires_grad_(grad) for t in tensors]
    rows = torch.tensor([0, 2, 2, 5], dtype=INT)
    return (*tensors, causal, scale, None, None, 0, 0.0, None, None, rows, rows)


def _featured_backward(dtype: torch.dtype) -> tuple[Any, ...]:
    args = _featured(dtype, grad=False)
    out, lse = OPERATORS.attention.default(*args)
    return (torch.ones_like(out), *args[:3], out, lse, *args[3:9], *args[10:])


def _sink_backward(dtype: torch.dtype) -> tuple[Any, ...]:
    args = _featured(dtype, grad=False)
    out, lse = OPERATORS.attention.default(*args)
    return torch.ones_like(out), out, lse, args[9]


def _decode(dtype: torch.dtype) -> tuple[Any, ...]:
    query, key, value, *_ = _attention(dtype, grad=False)
    return query, key, value, torch.tensor([[5, 0], [3, 3]], dtype=INT), 0.3, True


def _decode_featured(dtype: torch.dtype) -> tuple[Any, ...]:
    positions = (2 * torch.arange(5, dtype=INT)).expand(2, 2, 5).clone()
    return (*_decode(dtype), 3, 5.0, draw.normal(4), torch.tensor([0.5, 0.25, 0.1, 0.0]), positions)


def _latent(dtype: torch.dtype) -> tuple[Any, ...]:
    query, rope = draw.normal(2, 3, 2, 6, dtype=dtype), draw.normal(2, 3, 2, 2, dtype=dtype)
    return query, rope, draw.normal(2, 7, 8, dtype=dtype), torch.tensor([7, 4], dtype=INT), 0.3, True


def _merge(dtype: torch.dtype) -> tuple[Any, ...]:
    outs = [draw.strided(draw.normal(2, 3, 4, 5, dtype=dtype), layout) for layout in ("contiguous", "every_other")]
    return outs, [draw.normal(2, 3, 4), draw.normal(2, 4, 3).mT]


def _qk(dtype: torch.dtype) -> tuple[Any, ...]:
    return draw.normal(2, 4, 3, 5, dtype=dtype), draw.normal(2, 2, 6, 5, dtype=dtype), 0.5


CALLS: dict[str, tuple[Any, Callable[[torch.dtype], tuple[Any, ...]]]] = {
    "attention": (OPERATORS.attention.default, lambda dtype: _attention(dtype, grad=False)),
    "attention with gradient": (OPERATORS.attention.default, lambda dtype: _attention(dtype, grad=True)),
    "attention with features": (OPERATORS.attention.default, lambda dtype: _featured(dtype, grad=False)),
    "attention with features and gradient": (OPERATORS.attention.default, lambda dtype: _featured(dtype, grad=True)),
    "attention, packed": (OPERATORS.attention.default, lambda dtype: _packed(dtype, grad=True)),
    "attention_backward with features": (OPERATORS.attention_backward.default, _featured_backward),
    "attention_sink_backward": (OPERATORS.attention_sink_backward.default, _sink_backward),
    "attention_backward": (OPERATORS.attention_backward.default, _attention_backward),
    "decode_attention": (OPERATORS.decode_attention.default, _decode),
    "decode_attention with features": (OPERATORS.decode_attention.default, _decode_featured),
    "latent_decode with features": (
        OPERATORS.latent_decode.default,
        lambda dtype: (*_latent(dtype), 3, 5.0, draw.normal(3)),
    ),
    "latent_decode": (OPERATORS.latent_decode.default, _latent),
    "merge_attention": (OPERATORS.merge_attention.default, _merge),
    "qk_scores": (OPERATORS.qk_scores.default, _qk),
}


@pytest.mark.compile
@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str) -> None:
    operator, make = CALLS[name]
    assert set(torch.library.opcheck(operator, make(torch.float32)).values()) == {"SUCCESS"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_fakes_tell_shapes_strides_and_dtypes(name: str, dtype: torch.dtype) -> None:
    """Fault class: fake strides unlike the real ones."""
    operator, make = CALLS[name]
    if name == "merge_attention" and dtype == torch.float64:
        outs, lses = make(dtype)
        args: tuple[Any, ...] = (outs, [lse.double() for lse in lses])
    else:
        args = make(dtype)
    real = operator(*args)
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, args)
        fake = operator(*fakes)
    for one, two in zip(*(t if isinstance(t, tuple) else (t,) for t in (real, fake)), strict=True):
        assert (one.shape, one.stride(), one.dtype) == (two.shape, two.stride(), two.dtype)


@pytest.mark.compile
def test_attention_compiles_without_a_graph_break() -> None:
    query, key, value, *_ = _attention(torch.float32, grad=True)

    def loss(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (2 * ops.attention(query, key, value, causal=True)).square().sum()

    expected = torch.autograd.grad(loss(query, key, value), (query, key, value))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for one, two in zip(torch.autograd.grad(compiled(query, key, value), (query, key, value)), expected, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-5)


@pytest.mark.compile
def test_decoding_compiles_without_a_graph_break_or_recompilation() -> None:
    query, key, value, lengths, *_ = _decode(torch.float32)
    compilations = 0

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        nonlocal compilations
        compilations += 1
        return graph

    def step(lengths: Tensor) -> Tensor:
        one, one_lse = ops.decode_attention(query, key, value, lengths, return_lse=True)
        two, two_lse = ops.attention(query, key, value, causal=True, return_lse=True)
        return ops.merge_attention([one, two], [one_lse, two_lse])[0] + ops.qk_scores(query, key).mean()

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for filled in (1, 3, 5):
        torch.testing.assert_close(compiled(lengths.clamp(max=filled)), step(lengths.clamp(max=filled)))
    assert compilations == 1


@pytest.mark.compile
def test_wrong_input_raises_while_compiling() -> None:
    compiled = torch.compile(ops.attention, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="key must have size 8"):
        compiled(torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4))


def test_importing_the_operators_loads_no_compiler() -> None:
    code = (
        "import sys, fastattn.ops\n"
        "print([m for m in ('triton', 'transformers', 'torch._dynamo', 'torch._inductor') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]", result.stdout
