"""attention's gradient kernels against autograd through the definition in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from fastattn import ops
from fastattn.ops import reference
from tests._helpers import draw
from tests._helpers.budget import assert_within_budget
from tests._helpers.triton_run import examples, interpreted
from tests.ops.test_attention import in_plain_pytorch, largest_score
from tests.triton.interpreter.test_attention import calls


def _gradients(function, tensors, grad_out, options):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    function(*leaves, **options).backward(grad_out)
    return [x.grad for x in leaves]


def check(query, key, value, family="sm_90", **options):
    grad_out = draw.normal(*query.shape[:3], value.shape[3], dtype=query.dtype, seed=7)
    clean = [query, key.nan_to_num(), value.nan_to_num()]  # autograd would multiply a masked key's zero by its NaN
    exact = _gradients(reference.attention, [x.double() for x in clean], grad_out.double(), options)
    defaults = {"causal": False, "scale": None, "key_start": None, "lengths": None}
    plain = _gradients(in_plain_pytorch, clean, grad_out, defaults | options)
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    with interpreted(family):
        ops.attention(*leaves, **options).backward(draw.strided(grad_out, "tokens_before_heads"))
    # a query with one key has p (dp - sum p dp) = 0 exactly, from terms of the size of dp; p itself is computed anew
    # from scores and lse, whose float32 rounding it inherits: some units of the largest value
    terms = largest_score(grad_out, clean[2], 1.0)
    for name, leaf, one, other in zip(("query", "key", "value"), leaves, exact, plain, strict=True):
        largest = one.abs().max().item() if name == "value" and one.numel() else terms
        assert_within_budget(leaf.grad, one, other, f"gradient of {name}", cancelling=largest)


@examples(15)
@given(calls(tokens=100))
def test_any_shape_layout_and_raggedness(call):
    check(**call)


@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (256, 256), (96, 96)])
def test_usual_head_dims(dims):
    query = draw.normal(1, 4, 20, dims[0], dtype=torch.float16)
    key = draw.normal(1, 2, 37, dims[0], dtype=torch.float16, seed=1)
    value = draw.normal(1, 2, 37, dims[1], dtype=torch.float16, seed=2)
    check(query, key, value, causal=True)


@pytest.mark.parametrize("keys", [1, 31, 32, 33, 64, 65])
@pytest.mark.parametrize("queries", [1, 33, 65])
def test_block_edges(queries, keys):
    x = draw.normal(1, 2, 65, 16)
    check(x[:, :, :queries], x[:, :1, :keys], x[:, 1:, :keys], causal=True)


def test_rows_without_keys_have_no_gradient():
    x = draw.normal(2, 2, 40, 16)
    bounds = torch.tensor([30, 10], dtype=torch.int32)
    check(x, x, x, key_start=bounds, lengths=torch.tensor([20, 40], dtype=torch.int32), causal=True)


def test_results_repeat_bit_for_bit():
    tensors = [draw.normal(1, 4, 50, 16, dtype=torch.float16, seed=s).requires_grad_() for s in range(3)]
    runs = []
    for _ in range(2):
        with interpreted():
            runs.append(torch.autograd.grad(ops.attention(*tensors, causal=True).sum(), tensors))
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)
