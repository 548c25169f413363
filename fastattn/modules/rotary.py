"""Rotary position embedding as data: what a policy needs to know of a model's rotation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fastattn.validation import check_count


class Rotary(nn.Module):
    r"""Rotation of pairs of dims by angles that grow with the position (RoPE, arXiv 2104.09864).

    Pair ``f`` of a vector at position ``p`` is rotated by ``p * inv_freq[f]`` and multiplied by ``attention_factor``
    (YaRN). Dims outside ``[start, start + 2 * len(inv_freq))`` stay as they are: without frequencies this is the
    identity, a layer without rotation.

    Args:
        inv_freq: ``[m]``, radians per position; kept in float32 whatever ``.to()`` says.
        interleave: pairs are neighbors ``(0, 1), (2, 3), ...`` (DeepSeek) instead of halves ``(0, m), (1, m + 1)``,
            ... (Llama).
        attention_factor: factor on the rotated dims.
        start: first rotated dim (the rank, for a latent cache ``[latent | rope key]``).

    Raises:
        TypeError, ValueError: an argument of another type, shape or range.
    """

    inv_freq: Tensor

    def __init__(
        self, inv_freq: Tensor, *, interleave: bool = False, attention_factor: float = 1.0, start: int = 0
    ) -> None:
        super().__init__()
        if not isinstance(inv_freq, Tensor):
            raise TypeError(f"inv_freq must be a tensor [m], got {type(inv_freq).__name__}")
        if inv_freq.dim() != 1 or not inv_freq.is_floating_point():
            raise ValueError(f"inv_freq must be a float tensor [m], got {inv_freq.dtype} {list(inv_freq.shape)}")
        if isinstance(attention_factor, bool) or not isinstance(attention_factor, (int, float)):
            raise TypeError(f"attention_factor must be a float, got {type(attention_factor).__name__}")
        if not 0.0 < attention_factor < float("inf"):
            raise ValueError(f"attention_factor must be positive and finite, got {attention_factor}")
        check_count("start", start, 0)
        with torch.inference_mode(False):
            self.register_buffer("inv_freq", inv_freq.detach().to(torch.float32, copy=True), persistent=False)
        self.interleave = bool(interleave)
        self.attention_factor = float(attention_factor)
        self.start = int(start)

    @property
    def end(self) -> int:
        """One past the last rotated dim."""
        return self.start + 2 * self.inv_freq.shape[0]

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """``x [B, H, T, D]`` rotated to ``positions [B, T]`` (or ``[B, H, T]``), in ``x``'s dtype.

        Raises:
            ValueError: ``positions`` for another number of tokens, or ``x`` has too few dims to rotate.
        """
        angle = self._angles(x, positions)
        return self._rotate_pairs(x, angle.cos() * self.attention_factor, angle.sin() * self.attention_factor)

    def unrotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """The inverse of :meth:`rotate`."""
        angle = self._angles(x, positions)
        return self._rotate_pairs(x, angle.cos() / self.attention_factor, -angle.sin() / self.attention_factor)

    def move(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """An ``x [B, H, T, D]`` that was rotated to positions ``source``, rotated to ``target`` instead.

        The angles are those that :meth:`rotate` takes, rounded as they are there; only their difference is taken in
        float64. Far from the start, where an angle's rounding is a good part of a turn, what was put in comes out.

        Args:
            x: vectors after rotation.
            source, target: ``[B, T]`` or ``[B, H, T]``.
        """
        exact = self._angles(x, target).double() - self._angles(x, source).double()
        angle = exact.remainder(2 * math.pi).to(x.dtype if x.dtype == torch.float64 else torch.float32)
        return self._rotate_pairs(x, angle.cos(), angle.sin())

    def shift(self, x: Tensor, offsets: Tensor) -> Tensor:
        """An already rotated ``x [B, H, T, D]`` moved on by ``offsets [B, T]`` or ``[B, H, T]`` positions."""
        angle = self._angles(x, offsets)
        return self._rotate_pairs(x, angle.cos(), angle.sin())

    def average(self, x: Tensor, first: Tensor, count: int) -> Tensor:
        r"""``x [B, ..., D]`` under the mean rotation over positions ``first, ..., first + count - 1``.

        In closed form per frequency f: a rotation by :math:`(first + (count - 1)/2) f` times
        :math:`\sin(count f / 2) / (count \sin(f / 2))`.

        Args:
            x: vectors before rotation.
            first: int ``[B]``.
            count: number of positions, at least 1.

        Raises:
            TypeError, ValueError: ``count`` is not that, or ``x`` has too few dims to rotate.
        """
        check_count("count", count, 1)
        wide = x.dtype if x.dtype == torch.float64 else torch.float32
        freq = self.inv_freq.to(wide)
        half = freq / 2
        tiny = half.sin().abs() < 1e-6
        shrink = torch.where(tiny, 1.0, (count * half).sin() / (count * torch.where(tiny, 1.0, half.sin())))
        exact = (first.double()[:, None] + (count - 1) / 2) * self.inv_freq.double()  # [B, m]
        angle = exact.remainder(2 * math.pi).to(wide)  # far from the start float32 would round it by half a turn
        angle = angle.view(angle.shape[0], *[1] * (x.dim() - 2), angle.shape[1])
        shrink = shrink * self.attention_factor
        return self._rotate_pairs(x, angle.cos() * shrink, angle.sin() * shrink)

    def _angles(self, x: Tensor, positions: Tensor) -> Tensor:
        if positions.shape[-1:] != x.shape[-2:-1]:
            raise ValueError(
                f"positions must have one entry for each of x's {x.shape[-2]} tokens, [B, T] or [B, H, T] for "
                f"x [B, H, T, D], got {list(positions.shape)} for {list(x.shape)}"
            )
        wide = x.dtype if x.dtype == torch.float64 else torch.float32
        if positions.dim() == 2:
            positions = positions[:, None]
        return positions[..., None].to(wide) * self.inv_freq.to(x.device, wide)

    def _rotate_pairs(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if x.shape[-1] < self.end:
            raise ValueError(f"x must have at least {self.end} dims to rotate, got {x.shape[-1]}")
        if self.end == self.start:
            return x
        pairs = x[..., self.start : self.end].to(cos.dtype)
        if self.interleave:
            first, second = pairs[..., 0::2], pairs[..., 1::2]
            rotated = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
        else:
            first, second = pairs.chunk(2, dim=-1)
            rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        rotated = rotated.to(x.dtype)
        if rotated.shape[-1] == x.shape[-1]:
            return rotated
        return torch.cat([x[..., : self.start], rotated, x[..., self.end :]], dim=-1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves to another device, but never rounds the frequencies."""
        with torch.inference_mode(False):
            exact = self.inv_freq
            super()._apply(fn, recurse)
            if not exact.is_meta:  # nothing to keep there
                self.inv_freq = exact.to(self.inv_freq.device)
            elif self.inv_freq.dtype != torch.float32:
                self.inv_freq = self.inv_freq.float()
        return self

    def extra_repr(self) -> str:
        return (
            f"frequencies={self.inv_freq.shape[0]}, interleave={self.interleave}, "
            f"attention_factor={self.attention_factor:g}, start={self.start}"
        )
