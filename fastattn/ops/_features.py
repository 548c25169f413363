"""Windows, sinks, soft caps, ALiBi and packed rows: their checks, and what callers may wrap around an operator."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from fastattn import validation as check


class Features(NamedTuple):
    """How scores become weights beyond the softmax; an operator takes the numbers as they are here.

    Attributes:
        window: positions that a query sees, its own included; 0 for all.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 for none.
        sinks: ``[H]``, a logit per head without a value.
        alibi_slopes: ``[H]``, what a position of distance takes from a score.
    """

    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None

    @property
    def by_score(self) -> bool:
        """Whether single scores change or drop out, which a kernel of plain attention can't do."""
        return self.window > 0 or self.softcap > 0 or self.alibi_slopes is not None

    @property
    def plain(self) -> bool:
        """Whether there is none, as a comparison of tensors would not tell."""
        return not self.by_score and self.sinks is None


def check_features(
    operator: str,
    query: Tensor,
    query_name: str,
    window: int | None,
    sinks: Tensor | None,
    softcap: float | None,
    alibi_slopes: Tensor | None = None,
) -> Features:
    """The features as numbers, or an error that names the wrong one."""
    if window is not None:
        check.check_count("window", window, 1)
        window = min(window, 2**30)  # positions and their distances are int32
    if softcap is not None:
        if isinstance(softcap, bool) or not isinstance(softcap, (int, float)):
            raise TypeError(f"softcap must be a float or None, got {type(softcap).__name__}")
        if not 0 < softcap < math.inf:
            raise ValueError(f"softcap must be positive and finite, got {softcap}")
    for name, per_head in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if per_head is None:
            continue
        check.check_tensor(name, per_head, "H")
        check.check_size(name, per_head, 0, query.shape[1], f"{query_name}'s heads")
        if per_head.dtype not in check.FLOATS:
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {per_head.dtype}")
        check.check_device(name, per_head, query_name, query)
    if alibi_slopes is not None and torch.is_grad_enabled() and alibi_slopes.requires_grad:
        raise ValueError(f"{operator} has no gradient for alibi_slopes, but they require one: detach them")
    return Features(window or 0, float(softcap or 0.0), sinks, alibi_slopes)


def check_packed(
    query: Tensor,
    key: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    **excluded: Tensor | None,
) -> bool:
    """Whether rows are packed; an error if their bounds are wrong."""
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return False
    for name, given, other in (
        ("cu_seqlens_q", cu_seqlens_q, "cu_seqlens_k"),
        ("cu_seqlens_k", cu_seqlens_k, "cu_seqlens_q"),
    ):
        if given is None:
            raise ValueError(f"{name} must be given where {other} is, got None")
    assert cu_seqlens_q is not None  # both, now
    assert cu_seqlens_k is not None
    for name, bound in excluded.items():
        if bound is not None:
            raise ValueError(f"{name} must be None with cu_seqlens_q and cu_seqlens_k: packed rows end where they end")
    if query.shape[0] != 1:
        raise ValueError(f"query must have batch 1 with cu_seqlens_q, got {list(query.shape)}")
    check.check_tensor("cu_seqlens_q", cu_seqlens_q, "N+1")
    if cu_seqlens_q.shape[0] == 0:
        raise ValueError("cu_seqlens_q must have shape [N+1] with N of 0 or more, got [0]")
    rows = (cu_seqlens_q.shape[0],)
    check.check_int32("cu_seqlens_q", cu_seqlens_q, rows, "N+1", query.device)
    check.check_int32("cu_seqlens_k", cu_seqlens_k, rows, "N+1", query.device)
    for name, cu, total, what in (
        ("cu_seqlens_q", cu_seqlens_q, query.shape[2], "query"),
        ("cu_seqlens_k", cu_seqlens_k, key.shape[2], "key"),
    ):
        if check.checks_values(cu) and not _is_hidden(cu):
            _check_bounds(name, cu.tolist(), total, what)
    return True


def _check_bounds(name: str, bounds: list[int], total: int, what: str) -> None:
    if bounds[0] != 0:
        raise ValueError(f"{name} must start at 0, got {bounds[0]}")
    for row, (start, end) in enumerate(itertools.pairwise(bounds)):
        if end < start:
            raise ValueError(f"{name} must never fall, got {start} and then {end} for row {row}")
    if bounds[-1] != total:
        raise ValueError(f"{name} must end at {what}'s {total} tokens, got {bounds[-1]}")


def _is_hidden(tensor: Tensor) -> bool:
    """Whether a transform of ``torch.func`` or a fake mode keeps the values back."""
    return type(tensor) is not Tensor or torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def cast_for_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast floats but float64 in autocast's dtype, as ``scaled_dot_product_attention`` takes them."""
    device = tensors[0].device.type
    if not check.autocasts(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors)


def sink_gradient(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """A sink takes weight from every value: its gradient is ``-sum exp(sink - lse) (do . o)`` over queries and rows."""
    wide = lse.dtype
    weight = torch.exp(sinks.to(wide)[:, None] - lse)
    return -(weight * (grad_out.to(wide) * out.to(wide)).sum(-1)).sum((0, 2)).to(sinks.dtype)


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Attention without sinks becomes attention with them: its weights now sum to ``exp(lse - new lse)``."""
    total = torch.logaddexp(lse, sinks.detach().to(lse.dtype)[:, None])
    share = torch.exp(lse - total.masked_fill(total == float("-inf"), 0.0))
    out.mul_(share[..., None])
    lse.copy_(total)
