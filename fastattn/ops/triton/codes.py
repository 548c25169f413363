"""Attention over a quantised cache on a device: refused, there is no kernel that reads codes yet."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def decode_codes(query: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """See :func:`fastattn.ops.decode_attention`."""
    raise ValueError(
        f"a quantised cache must be on a CPU: fastattn has no kernel for {query.device.type} that reads codes yet; "
        "keep the cache in bfloat16 there"
    )
