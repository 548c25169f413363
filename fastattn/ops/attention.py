"""Attention over full keys and values: prefill and training."""

from __future__ import annotations

from typing import Any, Literal, overload

from torch import Tensor

from fastattn import validation as check
from fastattn.ops import _nested
from fastattn.ops._features import (
    cast_for_autocast,
    check_features,
    check_packed,
)
from fastattn.ops._outputs import empty_out_and_lse
from fastattn.ops._register import register, register_backward


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    key_start: Tensor | None = None,
    lengths: Tensor | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    key_start: Tensor | None = None,
    lengths: Tensor | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    key_start: Tensor | None = None,
    lengths: Tensor | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    key_start: Tensor | None = None,
    lengths: Tensor | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Softmax attention (arXiv 1706.03762) with grouped heads (arXiv 2305.13245), differentiable in ``query``,
    ``key``, ``value`` and ``sinks``.

    .. math:: o_i = \sum_j p_{ij} v_j,\quad p_{ij} = \frac{e^{z_{ij}}}{e^{s} + \sum_j e^{z_{ij}}},\quad
        z_{ij} = c \tanh\big(\tfrac{1}{c}\,\mathrm{scale}\; q_i \cdot k_j\big) - m\,|p_i - j|

    over the keys that query ``i`` sees: ``key_start[b] <= j < lengths[b]``, with ``causal`` ``j <= p_i`` and with a
    window ``p_i - j < window``. Query ``i`` stands at ``p_i = i + Sk - Sq`` (by buffer index, aligned bottom-right).
    Query head ``h`` reads key/value head ``h // (H // Hkv)``. ``s`` is the head's sink, ``c`` the soft cap and ``m``
    the head's ALiBi slope; without them the sum has no ``e^s``, and the score is neither capped nor biased. Keys
    and values outside the valid range may hold anything, NaN included.

    Packed rows: with ``cu_seqlens_q`` and ``cu_seqlens_k``, both int32 ``[N+1]``, the batch is 1 and row ``n`` is the
    queries ``[cu_seqlens_q[n], cu_seqlens_q[n+1])`` against the keys ``[cu_seqlens_k[n], cu_seqlens_k[n+1])``, as if it
    were alone. Nested tensors of layout jagged, ``[B, H, j, D]`` as ``scaled_dot_product_attention`` takes them, are
    rows of that kind; the results are nested as well.

    Under autocast the tensors are cast as ``scaled_dot_product_attention`` does it; without, dtypes must agree.

    Args:
        query: ``[B, H, Sq, Dqk]``, float16, bfloat16, float32 or float64, any strides.
        key: ``[B, Hkv, Sk, Dqk]``, ``H % Hkv == 0``.
        value: ``[B, Hkv, Sk, Dv]``; ``Dv`` may differ from ``Dqk``.
        causal: mask keys later than the query.
        scale: softmax scale, ``Dqk ** -0.5`` by default.
        key_start: int32 ``[B]``, index of each row's first valid key (left padding); 0 by default.
        lengths: int32 ``[B]``, end index of each row's valid keys (right padding); ``Sk`` by default.
        window: positions that a query sees, its own included (arXiv 2004.05150); all by default.
        sinks: ``[H]``, any float dtype: a learned logit per head that joins the sum and has no value (as in GPT-OSS;
            arXiv 2309.17453).
        softcap: ``c > 0``, limits scores to ``(-c, c)`` (Gemma 2, arXiv 2408.00118).
        alibi_slopes: ``[H]``, any float dtype, without gradient (ALiBi, arXiv 2108.12409).
        cu_seqlens_q: where packed rows of queries begin and end: from 0, never falling, to ``Sq``. Rows may be empty.
        cu_seqlens_k: likewise for keys. Not together with ``key_start`` or ``lengths``.
        return_lse: also return the log-sum-exp.

    Returns:
        ``out [B, H, Sq, Dv]`` in the query's dtype and, with ``return_lse``, ``lse [B, H, Sq]``: the natural
        logarithm of the sum of exponentials, sink included, float32 (float64 for float64 inputs), without gradient. A
        query that sees no key gives ``out = 0`` and ``lse = -inf``, or its head's sink.

    Raises:
        TypeError: an argument of another type, or mixed dtypes.
        ValueError: shapes, heads or devices that do not fit, bounds of packed rows that break the rules above (their
            values are looked at on a CPU in eager mode), or slopes that require a gradient.
        RuntimeError: where its gradient is differentiated once more, or in forward mode.
    """
    if isinstance(query, Tensor) and query.is_nested:
        rows = _nested.pack(query, key, value, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        out, lse = attention(
            rows.query, rows.key, rows.value, causal=causal, scale=scale, key_start=key_start, lengths=lengths,
            window=window, sinks=sinks, softcap=softcap, alibi_slopes=alibi_slopes, cu_seqlens_q=rows.cu_seqlens_q,
            cu_seqlens_k=rows.cu_seqlens_k, return_lse=True,
        )  # fmt: skip
        return (rows.unpack(out), rows.unpack(lse)) if return_lse else rows.unpack(out)
    check.check_tensor("query", query, "B H Sq Dqk")
    check.check_tensor("key", key, "B Hkv Sk Dqk")
    check.check_tensor("value", value, "B Hkv Sk Dv")
    query, key, value = cast_for_autocast(query, key, value)
    check_attention_shapes(query, key, value)
    batch = query.shape[0]
    if key_start is not None:
        check.check_int32("key_start", key_start, (batch,), "B", query.device)
    if lengths is not None:
        check.check_int32("lengths", lengths, (batch,), "B", query.device)
    scale = check.resolve_scale(scale, query.shape[3])
    features = check_features("attention", query, "query", window, sinks, softcap, alibi_slopes)
    packed = check_packed(query, key, cu_seqlens_q, cu_seqlens_k, key_start=key_start, lengths=lengths)
    check.refuse_forward_mode("attention", query, key, value, sinks, alibi_slopes)
    if packed or not features.plain:
        cu_seqlens = cu_seqlens_q, cu_seqlens_k
        out, lse = ATTENTION(query, key, value, bool(causal), scale, key_start, lengths, *features, *cu_seqlens)
    else:
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


def _fake(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
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
    query, key, value, causal, scale, key_start, lengths, window, softcap, sinks, slopes, *cu_seqlens = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(query, key, value, out, lse, key_start, lengths, sinks, slopes, *cu_seqlens)
    ctx.causal, ctx.scale, ctx.window, ctx.softcap = causal, scale, window, softcap


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor | None) -> tuple[Any, ...]:
    query, key, value, out, lse, key_start, lengths, sinks, slopes, *cu_seqlens = ctx.saved_tensors
    tensors = grad_out, query, key, value, out, lse
    plain = ctx.window == 0 and ctx.softcap == 0 and slopes is None and cu_seqlens[0] is None
    features = () if plain else (ctx.window, ctx.softcap, slopes, *cu_seqlens)
    grads = ATTENTION_BACKWARD(*tensors, ctx.causal, ctx.scale, key_start, lengths, *features)
    grad_sinks = None
    if sinks is not None and ctx.needs_input_grad[9]:
        grad_sinks = ATTENTION_SINK_BACKWARD(grad_out, out, lse, sinks)
    return (*grads, None, None, None, None, None, None, grad_sinks, None, None, None)


def _second_backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    raise RuntimeError("attention has no second derivative: its gradient cannot be differentiated (create_graph=True)")


ATTENTION = register(
    "attention",
    "(Tensor query, Tensor key, Tensor value, bool causal, float scale, Tensor? key_start, Tensor? lengths,"
    " SymInt window=0, float softcap=0.0, Tensor? sinks=None, Tensor? alibi_slopes=None, Tensor? cu_seqlens_q=None,"
    " Tensor? cu_seqlens_k=None) -> (Tensor, Tensor)",
    cpu="fastattn.ops.cpu.attention:attention",
    triton="fastattn.ops.triton.attention:attention",
    fake=_fake,
)
ATTENTION_BACKWARD = register(
    "attention_backward",
    "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, bool causal, float scale,"
    " Tensor? key_start, Tensor? lengths, SymInt window=0, float softcap=0.0, Tensor? alibi_slopes=None,"
    " Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None) -> (Tensor, Tensor, Tensor)",
    cpu="fastattn.ops.cpu.attention:attention_backward",
    triton="fastattn.ops.triton.attention_backward:attention_backward",
    fake=_fake_backward,
)
ATTENTION_SINK_BACKWARD = register(
    "attention_sink_backward",
    "(Tensor grad_out, Tensor out, Tensor lse, Tensor sinks) -> Tensor",
    cpu="fastattn.ops._features:sink_gradient",
    triton="fastattn.ops._features:sink_gradient",
    fake=lambda grad_out, out, lse, sinks: sinks.new_empty(sinks.shape),
)
register_backward("attention", _backward, _setup_context)
register_backward("attention_backward", _second_backward, lambda ctx, inputs, output: None)
register_backward("attention_sink_backward", _second_backward, lambda ctx, inputs, output: None)
