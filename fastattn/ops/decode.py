"""Attention of a few new queries over a cache: grouped-query and absorbed multi-head latent attention."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from fastattn import validation as check
from fastattn.ops._features import check_features
from fastattn.ops._formats import code_width
from fastattn.ops._outputs import empty_out_and_lse
from fastattn.ops._plain import decode_is_plain, latent_is_plain
from fastattn.ops._register import register
from fastattn.ops.attention import check_attention_shapes
from fastattn.ops.quantize import check_codes, code_columns


@overload
def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    positions: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    positions: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


@overload
def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    positions: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    positions: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Attention of ``Sq`` new queries over a cache buffer whose valid slots are a prefix.

    .. math:: o_i = \sum_j p_{ij} v_j,\quad p_i = \mathrm{softmax}_j(\mathrm{scale}\; q_i \cdot k_j)

    as :func:`attention`, over the slots that query ``i`` sees. The slots are split between programs, whose results are
    merged as :func:`merge_attention` does. With ``causal`` the newest ``Sq`` valid slots belong to the ``Sq`` queries:
    query ``i`` sees the first ``lengths - Sq + 1 + i`` slots. Without, every query sees all valid slots. Made for few
    queries and many slots; any number of queries works.

    ``window``, ``sinks``, ``softcap`` and ``alibi_slopes`` change the softmax as in :func:`attention`. The first and
    the last go by position: a key stands at its slot's position and a query at that of its own slot; without
    ``causal`` every query stands one past the newest. So a cache with gaps gives what the whole text would, without
    what is gone.

    Args:
        query: ``[B, H, Sq, Dqk]``, float16, bfloat16, float32 or float64.
        key: ``[B, Hkv, C, Dqk]``, a buffer; slots beyond ``lengths`` may hold anything, NaN included.
        value: ``[B, Hkv, C, Dv]``.
        lengths: int32 ``[B, Hkv]``, valid slots of every row and head, at most ``C``.
        scale: softmax scale, ``Dqk ** -0.5`` by default.
        causal: see above.
        window: positions that a query sees, its own included; all by default.
        positions: int32 ``[B, Hkv, C]``, the position of every slot, ascending over the valid slots; by default a
            slot's index.
        sinks: ``[H]``, any float dtype: a logit per head without a value.
        softcap: ``c > 0``, scores become ``c tanh(score / c)``.
        alibi_slopes: ``[H]``, any float dtype.
        key_scale: the cache is quantised and ``key`` holds codes (:func:`quantize` names formats and shapes); each is
            read as its scale times its code.
        value_scale: the same of ``value``, in the same format; given where ``key_scale`` is.
        return_lse: also return the log-sum-exp.

    Returns:
        ``out [B, H, Sq, Dv]`` and, with ``return_lse``, ``lse [B, H, Sq]`` (natural logarithm, float32; float64
        for float64 inputs). A query that sees no slot gives ``out = 0`` and ``lse = -inf``, or its head's sink.

    Raises:
        TypeError: an argument of another type, or mixed dtypes.
        ValueError: shapes, heads or devices that do not fit, or an argument that requires a gradient.
    """
    if key_scale is not None or value_scale is not None:
        options = (window, positions, sinks, softcap, alibi_slopes)
        out, lse = _decode_codes(query, key, value, lengths, scale, causal, key_scale, value_scale, *options)
        return (out, lse) if return_lse else out
    no_feature = window is None and softcap is None and positions is None and sinks is None and alibi_slopes is None
    if no_feature and not torch.compiler.is_compiling() and decode_is_plain(query, key, value, lengths):
        scale = check.resolve_scale(scale, query.shape[3])
        out, lse = DECODE_ATTENTION(query, key, value, lengths, scale, bool(causal))
        return (out, lse) if return_lse else out
    check.check_tensor("query", query, "B H Sq Dqk")
    check.check_tensor("key", key, "B Hkv C Dqk")
    check.check_tensor("value", value, "B Hkv C Dv")
    check_attention_shapes(query, key, value)
    check.check_int32("lengths", lengths, (key.shape[0], key.shape[1]), "B Hkv", query.device)
    if positions is not None:
        check.check_int32("positions", positions, tuple(key.shape[:3]), "B Hkv C", query.device)
    features = check_features("decode_attention", query, "query", window, sinks, softcap, alibi_slopes)
    check.check_no_grad("decode_attention", query=query, key=key, value=value, sinks=sinks)
    scale = check.resolve_scale(scale, query.shape[3])
    if features.plain:
        out, lse = DECODE_ATTENTION(query, key, value, lengths, scale, bool(causal))
    else:
        out, lse = DECODE_ATTENTION(query, key, value, lengths, scale, bool(causal), *features, positions)
    return (out, lse) if return_lse else out


@overload
def latent_decode(
    query_latent: Tensor,
    query_rope: Tensor,
    cache: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    cache_scale: Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def latent_decode(
    query_latent: Tensor,
    query_rope: Tensor,
    cache: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    cache_scale: Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


@overload
def latent_decode(
    query_latent: Tensor,
    query_rope: Tensor,
    cache: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    cache_scale: Tensor | None = None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...


def latent_decode(
    query_latent: Tensor,
    query_rope: Tensor,
    cache: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    cache_scale: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Absorbed multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) over a latent cache.

    All query heads share one latent per token. With the cache split as ``[latent c_j (R) | rope key r_j (Dr)]``:

    .. math:: o_i = \sum_j \mathrm{softmax}_j\big(\mathrm{scale}\,(q^c_i \cdot c_j + q^r_i \cdot r_j)\big)\, c_j

    Args:
        query_latent: ``[B, H, Sq, R]``, the query taken through the key up-projection.
        query_rope: ``[B, H, Sq, Dr]``, rotated.
        cache: ``[B, C, R + Dr]``; slots beyond ``lengths`` may hold anything, NaN included.
        lengths: int32 ``[B]``, valid slots per row.
        scale: softmax scale of the module (it does not follow from these shapes).
        causal: the newest ``Sq`` valid slots belong to the ``Sq`` queries, as in :func:`decode_attention`.
        window: slots that a query sees, its own included, as in :func:`decode_attention` without ``positions``.
        sinks: ``[H]``, any float dtype: a logit per head without a value.
        softcap: ``c > 0``, scores become ``c tanh(score / c)``.
        cache_scale: the cache is quantised, a latent and its rope key together, as in :func:`decode_attention`.
        return_lse: also return the log-sum-exp.

    Returns:
        ``out [B, H, Sq, R]`` and, with ``return_lse``, ``lse [B, H, Sq]`` (natural logarithm, float32; float64 for
        float64 inputs). A query that sees no slot gives ``out = 0`` and ``lse = -inf``. On a CPU without the native
        kernels bfloat16 inputs may have their scores rounded to bfloat16 relative to the largest one: ``lse`` may then
        err by up to 1e-2, not 1e-5.

    Raises:
        TypeError: an argument of another type, or mixed dtypes.
        ValueError: shapes or devices that do not fit, or an argument that requires a gradient.
    """
    no_feature = window is None and softcap is None and sinks is None and scale is not None
    if no_feature and not torch.compiler.is_compiling() and latent_is_plain(query_latent, query_rope, cache, lengths):
        scale = check.resolve_scale(scale, cache.shape[2])
        out, lse = LATENT_DECODE(query_latent, query_rope, cache, lengths, scale, bool(causal))
        return (out, lse) if return_lse else out
    check.check_tensor("query_latent", query_latent, "B H Sq R")
    check.check_tensor("query_rope", query_rope, "B H Sq Dr")
    check.check_tensor("cache", cache, "B C R+Dr")
    for dim, what in enumerate(("batch", "heads", "tokens")):
        check.check_size("query_rope", query_rope, dim, query_latent.shape[dim], f"query_latent's {what}")
    check.check_size("cache", cache, 0, query_latent.shape[0], "query_latent's batch")
    columns = query_latent.shape[3] + query_rope.shape[3]
    if cache_scale is not None:
        storage = check_codes("cache", cache, "cache_scale", cache_scale)
        check.check_size("cache", cache, 2, code_width(storage, columns), "codes of the query's rank plus rope dim")
        check.check_same_kind("query_latent", query_latent, query_rope=query_rope)
        check.check_device("cache", cache, "query_latent", query_latent)
    else:
        check.check_size("cache", cache, 2, columns, "rank plus rope dim of the query")
        check.check_same_kind("query_latent", query_latent, query_rope=query_rope, cache=cache)
    check.check_int32("lengths", lengths, (cache.shape[0],), "B", cache.device)
    check.check_no_grad("latent_decode", query_latent=query_latent, query_rope=query_rope, cache=cache, sinks=sinks)
    if scale is None:
        raise TypeError("scale must be a float: it does not follow from the shapes of a latent cache")
    scale = check.resolve_scale(scale, columns)
    features = check_features("latent_decode", query_latent, "query_latent", window, sinks, softcap)
    check.refuse_forward_mode("latent_decode", query_latent, query_rope, cache, sinks)
    if cache_scale is not None:
        query, codes, scales = torch.cat([query_latent, query_rope], dim=-1), cache[:, None], cache_scale[:, None]
        out, lse = DECODE_CODES(
            query, codes, codes, scales, scales, lengths[:, None], scale, bool(causal), query_latent.shape[3], *features
        )
    elif features.plain:
        out, lse = LATENT_DECODE(query_latent, query_rope, cache, lengths, scale, bool(causal))
    else:
        out, lse = LATENT_DECODE(query_latent, query_rope, cache, lengths, scale, bool(causal), *features[:3])
    return (out, lse) if return_lse else out


def _decode_codes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    scale: float | None,
    causal: bool,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    window: int | None,
    positions: Tensor | None,
    sinks: Tensor | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """:func:`decode_attention` over a quantised cache."""
    for name, given in (("key_scale", key_scale), ("value_scale", value_scale)):
        if given is None:
            raise TypeError(f"{name} must be given where the other scale is, got None: both or neither are quantised")
    check.check_tensor("query", query, "B H Sq Dqk")
    check.check_same_kind("query", query)
    check.check_tensor("key", key, "B Hkv C codes")
    check.check_tensor("value", value, "B Hkv C codes")
    storage = check_codes("key", key, "key_scale", key_scale)
    of_value = check_codes("value", value, "value_scale", value_scale)
    if of_value != storage:
        raise ValueError(f"value must be stored as key is, in {storage!r}, got {of_value!r}")
    check.check_size("key", key, 0, query.shape[0], "query's batch")
    check.check_size("key", key, 3, code_width(storage, query.shape[3]), "codes of query's head dim")
    for dim, what in enumerate(("batch", "heads", "slots")):
        check.check_size("value", value, dim, key.shape[dim], f"key's {what}")
    check.check_groups(query, key)
    check.check_device("key", key, "query", query)
    check.check_device("value", value, "query", query)
    check.check_int32("lengths", lengths, tuple(key.shape[:2]), "B Hkv", query.device)
    if positions is not None:
        check.check_int32("positions", positions, tuple(key.shape[:3]), "B Hkv C", query.device)
    features = check_features("decode_attention", query, "query", window, sinks, softcap, alibi_slopes)
    check.check_no_grad("decode_attention", query=query, sinks=sinks)
    scale = check.resolve_scale(scale, query.shape[3])
    value_dim = code_columns(value, storage)
    options = (scale, bool(causal), value_dim, *features, positions)
    return DECODE_CODES(query, key, value, key_scale, value_scale, lengths, *options)


def _fake_codes(query: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    return empty_out_and_lse(query, arguments[7])


def _fake_decode(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_out_and_lse(query, value.shape[3])


def _fake_latent(query_latent: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_out_and_lse(query_latent, query_latent.shape[3])


DECODE_ATTENTION = register(
    "decode_attention",
    "(Tensor query, Tensor key, Tensor value, Tensor lengths, float scale, bool causal, SymInt window=0,"
    " float softcap=0.0, Tensor? sinks=None, Tensor? alibi_slopes=None, Tensor? positions=None) -> (Tensor, Tensor)",
    cpu="fastattn.ops.cpu.decode:decode_attention",
    triton="fastattn.ops.triton.decode:decode_attention",
    fake=_fake_decode,
)
LATENT_DECODE = register(
    "latent_decode",
    "(Tensor query_latent, Tensor query_rope, Tensor cache, Tensor lengths, float scale, bool causal,"
    " SymInt window=0, float softcap=0.0, Tensor? sinks=None) -> (Tensor, Tensor)",
    cpu="fastattn.ops.cpu.latent:latent_decode",
    triton="fastattn.ops.triton.latent:latent_decode",
    fake=_fake_latent,
)
DECODE_CODES = register(
    "decode_codes",
    "(Tensor query, Tensor key, Tensor value, Tensor key_scale, Tensor value_scale, Tensor lengths, float scale,"
    " bool causal, SymInt value_dim, SymInt window=0, float softcap=0.0, Tensor? sinks=None, Tensor? alibi_slopes=None,"
    " Tensor? positions=None) -> (Tensor, Tensor)",
    cpu="fastattn.ops.cpu.codes:decode_codes",
    triton="fastattn.ops.triton.codes:decode_codes",
    fake=_fake_codes,
)
