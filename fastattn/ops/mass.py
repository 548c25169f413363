"""Attention mass: what the cached tokens receive from some queries, for policies that keep what is attended to."""

from __future__ import annotations

from torch import Tensor

from fastattn import validation as check
from fastattn.ops._outputs import accumulator_dtype
from fastattn.ops._register import register
from fastattn.ops.quantize import check_codes, code_columns


def attention_mass(
    key: Tensor,
    lengths: Tensor,
    positions: Tensor,
    query: Tensor,
    query_positions: Tensor,
    *,
    scale: float,
    min_length: int = 0,
    key_scale: Tensor | None = None,
) -> Tensor:
    r"""The attention that every slot receives, summed over queries and averaged over the heads of a group.

    :math:`m_t = \frac1G \sum_g \sum_w \mathrm{softmax}_t(c\, q_{gw} \cdot k_t)`, each softmax over the valid slots with
    ``positions <= query_positions``. Queries are taken in blocks: memory does not grow with queries times slots.

    Args:
        key: ``[B, Hkv, C, D]`` as cached (rotated).
        lengths: int32 ``[B, Hkv]``, valid slots.
        positions: int32 ``[B, Hkv, C]``, rising over the valid slots.
        query: ``[B, H, N, D]``, rotated, of the key's dtype unless that holds codes.
        query_positions: int32 ``[B, N]``; a query with -1 does not count.
        scale: the attention's softmax scale ``c``.
        min_length: rows of which no head has as many valid slots are skipped.
        key_scale: the keys are codes, as in :func:`decode_attention`; on a GPU they are turned into numbers first.

    Returns:
        ``[B, Hkv, C]``, float32 (float64 for float64 queries), 0 beyond ``lengths``; unspecified for skipped rows.

    Raises:
        TypeError, ValueError: an argument of another type or shape, or one that requires a gradient.
    """
    check.check_tensor("key", key, "B Hkv C D")
    check.check_tensor("query", query, "B H N D")
    check.check_size("query", query, 0, key.shape[0], "key's batch")
    check.check_groups(query, key)
    if key_scale is None:
        check.check_size("query", query, 3, key.shape[3], "key's head dim")
        check.check_same_kind("key", key, query=query)
    else:
        columns = code_columns(key, check_codes("key", key, "key_scale", key_scale))
        check.check_size("query", query, 3, columns, "key's head dim")
        check.check_same_kind("query", query)
        check.check_device("query", query, "key", key)
    check.check_int32("lengths", lengths, tuple(key.shape[:2]), "B Hkv", key.device)
    check.check_int32("positions", positions, tuple(key.shape[:3]), "B Hkv C", key.device)
    check.check_int32("query_positions", query_positions, (query.shape[0], query.shape[2]), "B N", key.device)
    check.check_count("min_length", min_length, 0)
    check.check_no_grad("attention_mass", key=key, query=query)
    if scale is None:
        raise TypeError("scale must be a float, got None")
    scale = check.fixed(check.resolve_scale(scale, query.shape[3]))
    return ATTENTION_MASS(key, lengths, positions, query, query_positions, scale, min_length, key_scale)


def _fake(key: Tensor, lengths: Tensor, positions: Tensor, query: Tensor, *_: object) -> Tensor:
    return query.new_empty(key.shape[:3], dtype=accumulator_dtype(query.dtype))


ATTENTION_MASS = register(
    "attention_mass",
    "(Tensor key, Tensor lengths, Tensor positions, Tensor query, Tensor query_positions, float scale,"
    " SymInt min_length, Tensor? key_scale=None) -> Tensor",
    cpu="fastattn.ops.cpu.mass:attention_mass",
    triton="fastattn.ops.triton.mass:attention_mass",
    fake=_fake,
)
