"""Attention over full keys and values: prefill and training."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastattn import validation as check
from fastattn.ops._outputs import empty_out_and_lse
from fastattn.ops._register import register, register_backward


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    key_start: Tensor | None = None,
    lengths: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Softmax attention (arXiv 1706.03762) with grouped heads (arXiv 2305.13245), differentiable in ``query``, ``key``
    and ``value``.

    .. math:: o_i = \sum_j p_{ij} v_j,\quad p_i = \mathrm{softmax}_j(\mathrm{scale}\; q_i \cdot k_j)

    over the keys that query ``i`` sees: ``key_start[b] <= j < lengths[b]`` and, with ``causal``,
    ``j <= i + Sk - Sq`` (by buffer index, aligned bottom-right). Query head ``h`` reads key/value head
    ``h // (H // Hkv)``. Keys and values outside the valid range may hold anything, NaN included.

    Args:
        query: ``[B, H, Sq, Dqk]``, float16, bfloat16, float32 or float64, any strides.
        key: ``[B, Hkv, Sk, Dqk]``, ``H % Hkv == 0``.
        value: ``[B, Hkv, Sk, Dv]``; ``Dv`` may differ from ``Dqk``.
        causal: mask keys later than the query.
        scale: softmax scale, ``Dqk ** -0.5`` by default.
        key_start: int32 ``[B]``, index of each row's first valid key (left padding); 0 by default.
        lengths: int32 ``[B]``, end index of each row's valid keys (right padding); ``Sk`` by default.
        return_lse: also return the log-sum-exp.

    Returns:
        ``out [B, H, Sq, Dv]`` in the query's dtype and, with ``return_lse``, ``lse [B, H, Sq]``: the natural
        logarithm of the sum of exponentials, float32 (float64 for float64 inputs), without gradient. A query
        that sees no key gives ``out = 0`` and ``lse = -inf``.

    Raises:
        TypeError: an argument of another type, or mixed dtypes.
        ValueError: shapes, heads or devices that do not fit.
        RuntimeError: where its gradient is differentiated once more.
    """
    check.check_tensor("query", query, "B H Sq Dqk")
    check.check_tensor("key", key, "B Hkv Sk Dqk")
    check.check_tensor("value", value, "B Hkv Sk Dv")
    check_attention_shapes(query, key, value)
    batch = query.shape[0]
    if key_start is not None:
        check.check_int32("key_start", key_start, (batch,), "B", query.device)
    if lengths is not None:
        check.check_int32("lengths", lengths, (batch,), "B", query.device)
    scale = check.resolve_scale(scale, query.shape[3])
    out, lse = ATTENTION(query, key, value, bool(causal), scale, key_start, lengths)
    return (out, lse) if return_lse else out


def check_attention_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Shapes, heads, dtypes and devices of the three tensors fit together."""
    check.check_size("key", key, 0, query.shape[0], "query's batch")
    check.check_size("key", key, 3, query.shape[3], "query's head dim")
    check.check_size("value", value, 0, key.shape[0], "key's batch")
    check.check_size("value", value, 1, key.shape[1], "key's heads")
    check.check_size("value", value, 2, key.shape[2], "key's tokens")
    check.check_groups(query, key)
    check.check_same_kind("query", query, key=key, value=value)


def _fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    scale: float,
    key_start: Tensor | None,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return empty_out_and_lse(query, value.shape[3])


def _fake_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        query.new_empty(query.shape),
        key.new_empty(key.shape),
        value.new_empty(value.shape),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, causal, scale, key_start, lengths = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(query, key, value, out, lse, key_start, lengths)
    ctx.causal, ctx.scale = causal, scale


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor | None) -> tuple[Any, ...]:
    query, key, value, out, lse, key_start, lengths = ctx.saved_tensors
    grads = ATTENTION_BACKWARD(grad_out, query, key, value, out, lse, ctx.causal, ctx.scale, key_start, lengths)
    return (*grads, None, None, None, None)


def _second_backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    raise RuntimeError("attention has no second derivative: its gradient cannot be differentiated (create_graph=True)")


ATTENTION = register(
    "attention",
    "(Tensor query, Tensor key, Tensor value, bool causal, float scale, Tensor? key_start, Tensor? lengths)"
    " -> (Tensor, Tensor)",
    cpu="fastattn.ops.cpu.attention:attention",
    triton="fastattn.ops.triton.attention:attention",
    fake=_fake,
)
ATTENTION_BACKWARD = register(
    "attention_backward",
    "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, bool causal, float scale,"
    " Tensor? key_start, Tensor? lengths) -> (Tensor, Tensor, Tensor)",
    cpu="fastattn.ops.cpu.attention:attention_backward",
    triton="fastattn.ops.triton.attention_backward:attention_backward",
    fake=_fake_backward,
)
register_backward("attention", _backward, _setup_context)
register_backward("attention_backward", _second_backward, lambda ctx, inputs, output: None)
