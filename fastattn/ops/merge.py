"""Combining partial attention results over disjoint sets of keys."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fastattn import validation as check
from fastattn.ops._outputs import accumulator_dtype
from fastattn.ops._register import register


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    r"""Attention over the union of disjoint keys, from the results over each part (online softmax, arXiv 1805.02867).

    .. math:: \mathrm{lse} = \log\sum_p e^{\mathrm{lse}_p},\qquad
              o = \sum_p e^{\mathrm{lse}_p - \mathrm{lse}}\, o_p

    Args:
        outs: partial outputs, each ``[B, H, Sq, Dv]``, of one dtype.
        lses: their log-sum-exps, each ``[B, H, Sq]``, natural logarithm, float32 (float64 for float64 outputs). A
            part that saw no key has ``lse = -inf`` and is neutral.

    Returns:
        ``(out, lse)`` of the same shapes and dtypes. Where no part saw a key: 0 and -inf.

    Raises:
        TypeError: not sequences of tensors of one dtype.
        ValueError: no part, or parts of different shapes, or an argument that requires a gradient.
    """
    outs, lses = list(outs), list(lses)
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"outs and lses must hold the same number of parts, at least one, got {len(outs)} and {len(lses)}"
        )
    for index, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        check.check_tensor(f"outs[{index}]", out, "B H Sq Dv")
        check.check_tensor(f"lses[{index}]", lse, "B H Sq")
        check.check_same_kind("outs[0]", outs[0], **{f"outs[{index}]": out})
        check.check_device(f"lses[{index}]", lse, "outs[0]", outs[0])
        if out.shape != outs[0].shape:
            raise ValueError(f"outs[{index}] must have outs[0]'s shape {list(outs[0].shape)}, got {list(out.shape)}")
        if lse.shape != out.shape[:3]:
            raise ValueError(f"lses[{index}] must have shape {list(out.shape[:3])}, got {list(lse.shape)}")
        expected = accumulator_dtype(out.dtype)
        if lse.dtype != expected:
            raise TypeError(f"lses[{index}] must be {expected} for {out.dtype} outputs, got {lse.dtype}")
        check.check_no_grad("merge_attention", **{f"outs[{index}]": out, f"lses[{index}]": lse})
    return MERGE_ATTENTION(outs, lses)


def _fake(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    return outs[0].new_empty(outs[0].shape), lses[0].new_empty(lses[0].shape)


MERGE_ATTENTION = register(
    "merge_attention",
    "(Tensor[] outs, Tensor[] lses) -> (Tensor, Tensor)",
    cpu="fastattn.ops.cpu.merge:merge_attention",
    triton="fastattn.ops.triton.merge:merge_attention",
    fake=_fake,
)
