"""Hypothesis strategies and tensors shared by the tests: sizes, layouts, lengths and poison."""

from __future__ import annotations

import os

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Every way a caller may lay a tensor out; strided() makes each of them.
LAYOUTS = ("contiguous", "tokens_before_heads", "sliced", "last_dim_first", "every_other", "offset")

dtypes = st.sampled_from(FLOAT_DTYPES)
layouts = st.sampled_from(LAYOUTS)
seeds = st.integers(0, 2**31 - 1)


def cases(examples: int) -> settings:
    """Settings of a property test: ``examples`` cases, the same in every run.

    ``FASTATTN_EXAMPLES=2000 pytest ...`` searches that many new ones instead.
    """
    wanted = os.environ.get("FASTATTN_EXAMPLES")
    return settings(
        max_examples=int(wanted) if wanted else examples, derandomize=not wanted, deadline=None, database=None
    )


def sizes(maximum: int, minimum: int = 1) -> st.SearchStrategy[int]:
    """Sizes up to ``maximum``, often next to a power of two, where blocks end."""
    edges = sorted({n for p in range(12) for n in (2**p - 1, 2**p, 2**p + 1) if minimum <= n <= maximum})
    return st.sampled_from(edges) | st.integers(minimum, maximum)


def lengths(shape: tuple[int, ...], maximum: int, minimum: int = 0) -> st.SearchStrategy[Tensor]:
    """int32 tensors of ``shape`` within ``[minimum, maximum]``: all equal, or ragged with both ends likely."""
    count = 1
    for size in shape:
        count *= size
    one = st.integers(minimum, maximum) | st.sampled_from([minimum, maximum])
    equal = one.map(lambda n: [n] * count)
    ragged = st.lists(one, min_size=count, max_size=count)
    return (equal | ragged).map(lambda values: torch.tensor(values, dtype=torch.int32).view(shape))


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal numbers, the same for a seed in every dtype up to rounding, exact in float32 at the most."""
    drawn = torch.randn(shape, generator=_generator(seed), device="cpu")
    return on_device((scale * drawn).to(dtype))


def uniform(*shape: int, seed: int = 0) -> Tensor:
    """Uniform numbers in ``[0, 1)``."""
    return on_device(torch.rand(shape, generator=_generator(seed), device="cpu"))


def integers(low: int, high: int, *shape: int, seed: int = 0) -> Tensor:
    """Uniform int64 numbers in ``[low, high)``."""
    return on_device(torch.randint(low, high, shape, generator=_generator(seed), device="cpu"))


def permutation(count: int, seed: int = 0) -> Tensor:
    """The numbers below ``count`` in some order."""
    return on_device(torch.randperm(count, generator=_generator(seed), device="cpu"))


def on_device(tensor: Tensor) -> Tensor:
    """``tensor``, drawn on the CPU so that a seed means the same everywhere, on the default device."""
    return tensor.to(torch.get_default_device())


def _generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def strided(tensor: Tensor, layout: str) -> Tensor:
    """The same values laid out otherwise; memory between them holds NaN (the largest integer for integers)."""
    if layout == "contiguous":
        return tensor.contiguous()
    if layout == "tokens_before_heads":  # [B, S, H, D] seen as [B, H, S, D]
        if tensor.dim() < 3:
            return tensor.contiguous()
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "last_dim_first":  # the last dim has the largest stride
        return tensor.movedim(-1, 0).contiguous().movedim(0, -1)
    if layout == "sliced":  # part of larger buffers in every dim
        room = _poisoned([size + 3 for size in tensor.shape], tensor)
        view = room[tuple(slice(1, 1 + size) for size in tensor.shape)]
    elif layout == "every_other":  # last dim with stride 2
        room = _poisoned([*tensor.shape[:-1], 2 * tensor.shape[-1]], tensor)
        view = room[..., ::2]
    elif layout == "offset":  # contiguous rows at an odd address
        room = _poisoned([tensor.numel() + 1], tensor)
        view = room[1:].view(tensor.shape)
    else:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
    view.copy_(tensor)
    return view


def _poisoned(shape: list[int], like: Tensor) -> Tensor:
    fill = float("nan") if like.is_floating_point() else torch.iinfo(like.dtype).max
    return torch.full(shape, fill, dtype=like.dtype, device=like.device)


def poison_slots_(buffer: Tensor, lengths: Tensor, start: Tensor | None = None) -> Tensor:
    """Fill the slots outside ``start <= slot < lengths`` with NaN, in place.

    Args:
        buffer: ``[..., C, D]``.
        lengths: bounds per row (``[B]``) or per row and head (``[B, Hkv]``).
        start: like ``lengths``; 0 by default.
    """
    slot = torch.arange(buffer.shape[-2], device=buffer.device)
    leading = buffer.dim() - 2

    def widen(bound: Tensor) -> Tensor:
        return bound.view(*bound.shape, *[1] * (leading - bound.dim() + 1))

    valid = slot < widen(lengths)
    if start is not None:
        valid = valid & (slot >= widen(start))
    return buffer.masked_fill_(~valid[..., None], float("nan"))
