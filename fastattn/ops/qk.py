"""The key-query product on its own."""

from __future__ import annotations

from torch import Tensor

from fastattn import validation as check
from fastattn.ops._register import register


def qk_scores(query: Tensor, key: Tensor, *, scale: float = 1.0) -> Tensor:
    """``scale * query @ key^T`` for every query head over the keys of its group, accumulated in float32.

    Args:
        query: ``[B, H, Sq, D]``, float16, bfloat16, float32 or float64, any strides.
        key: ``[B, Hkv, Sk, D]``, ``H % Hkv == 0``.
        scale: factor on the product; 1 by default (no softmax scale).

    Returns:
        ``[B, H, Sq, Sk]`` in the query's dtype, contiguous.

    Raises:
        TypeError: an argument of another type, or mixed dtypes.
        ValueError: shapes, heads or devices that do not fit, or an argument that requires a gradient.
    """
    check.check_tensor("query", query, "B H Sq D")
    check.check_tensor("key", key, "B Hkv Sk D")
    check.check_size("key", key, 0, query.shape[0], "query's batch")
    check.check_size("key", key, 3, query.shape[3], "query's head dim")
    check.check_groups(query, key)
    check.check_same_kind("query", query, key=key)
    check.check_no_grad("qk_scores", query=query, key=key)
    if scale is None:
        raise TypeError("scale must be a float, got None")
    return QK_SCORES(query, key, check.fixed(check.resolve_scale(scale, query.shape[3])))


def _fake(query: Tensor, key: Tensor, scale: float) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


QK_SCORES = register(
    "qk_scores",
    "(Tensor query, Tensor key, float scale) -> Tensor",
    cpu="fastattn.ops.cpu.qk:qk_scores",
    triton="fastattn.ops.triton.qk:qk_scores",
    fake=_fake,
)
