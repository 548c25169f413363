"""A model's rotary embedding as a :class:`~fastattn.Rotary`, checked against the queries and keys it produces."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastattn.integrations._arguments import FIXED_ROPE_TYPES
from fastattn.modules.rotary import Rotary

# How far a rotated vector may be from the expected one, relative to the largest entry. cos and sin are rounded to the
# model's dtype before they are used.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def find_rotary(decoder: nn.Module) -> tuple[Tensor, float] | str | None:
    """Frequencies and attention factor of the full-attention layers' rotary embedding.

    None where there is no rotary embedding, and the reason where there is no single one.

    Raises:
        ValueError: its frequencies change with the length of the text.
    """
    name = type(decoder).__name__
    found = [r for module in decoder.modules() if (r := _read(module)) is not None]
    if not found:
        return None
    inv_freq, factor, _ = found[0]
    _check_there(frequencies for frequencies, _, _ in found)
    for _, _, kind in found:
        if kind not in FIXED_ROPE_TYPES:
            raise ValueError(
                f'the model\'s rotary embedding is of type "{kind}", whose frequencies may change with the length of '
                "the text, so that cached keys would be rotated with old ones; supported are "
                f"{', '.join(FIXED_ROPE_TYPES)}"
            )
    for other in found[1:]:
        if other[1:] != found[0][1:] or not torch.equal(other[0].cpu(), inv_freq.cpu()):
            return f"{name} has several rotary embeddings, which differ from each other"
    return inv_freq, factor


def _check_there(frequencies: Iterable[Tensor]) -> None:
    if any(table.is_meta for table in frequencies):
        raise ValueError(
            "the model's rotary frequencies must be on a device, got them on the meta device: they were never loaded, "
            "or offloaded with the weights (offload_buffers=True of accelerate; leave that False)"
        )


def _read(module: Any) -> tuple[Tensor, float, str] | None:
    """Frequencies, factor and type of ``module``, None if it is no rotary embedding."""
    prefix = "" if hasattr(module, "inv_freq") else "full_attention_"  # models with one embedding per layer type
    inv_freq = getattr(module, f"{prefix}inv_freq", None)
    if not isinstance(inv_freq, Tensor):
        return None
    rope_type = getattr(module, "rope_type", "default")
    if isinstance(rope_type, dict):
        rope_type = rope_type["full_attention"]
    return inv_freq, float(getattr(module, f"{prefix}attention_scaling", 1.0)), rope_type


@dataclass(frozen=True)
class Rotation:
    """A :class:`~fastattn.Rotary` and the rounding of the model that it was found in."""

    rotary: Rotary
    tolerance: float

    def explains(self, rotated: Tensor, positions: Tensor) -> bool:
        """``rotated [1, H, T, D]``, one vector at ``positions [1, T]`` (the first is 0), is rotated by this."""
        wide = rotated.to(torch.float32)
        offsets = positions.to(rotated.device)
        expected = self.rotary.shift(wide[:, :, :1].expand_as(wide), offsets)
        return bool((wide - expected).abs().max() <= self.tolerance * wide.abs().max())


def rotation_of(rotated: Tensor, positions: Tensor, inv_freq: Tensor, factor: float) -> Rotation:
    """Which dims are rotated and how they pair, found from ``rotated [1, H, T, D]``, one vector at several positions.

    Where nothing fits, the most common layout is returned, and :meth:`Rotation.explains` says so.
    """
    dims = 2 * inv_freq.shape[0]
    last = max(rotated.shape[3] - dims, 0)
    candidates = [
        Rotation(
            Rotary(inv_freq.to(rotated.device), interleave=interleave, attention_factor=factor, start=start),
            _TOLERANCE.get(rotated.dtype, 1e-4),
        )
        for start in sorted({0, last})
        for interleave in (False, True)
    ]
    if dims > rotated.shape[3]:
        raise ValueError(f"the rotary embedding rotates {dims} dims, the model's queries have {rotated.shape[3]}")
    return next((c for c in candidates if c.explains(rotated, positions)), candidates[0])


def checked_rotary(
    name: str, calls: list[dict[str, Any]], positions: Tensor, found: tuple[Tensor, float] | str | None
) -> tuple[Rotary | list[Rotary | None] | None, str]:
    """The rotation that explains what queries and keys of all layers have in common, or None and why there is none.

    Where some layers do not rotate at all, a list with None for those.
    """
    if found is None:
        return None, f"{name} has no rotary embedding (a module with inv_freq)"
    if isinstance(found, str):
        return None, found
    each = []
    rotation = None
    for call in calls:
        if rotation is None or not _explained(rotation, call, positions):
            rotation = rotation_of(call["query"], positions, *found)
        for part in ("query", "key"):
            if not rotation.explains(call[part], positions) and not _stands_still(call, rotation.tolerance):
                index = call["module"].layer_idx
                return None, (
                    f"the {part} of layer {index} of {name} is not rotated as {rotation.rotary}, which its rotary "
                    "embedding stands for: norms come after the rotation, or it rotates in another way"
                )
        each.append(rotation.rotary if _explained(rotation, call, positions) else None)
    rotary = next((one for one in each if one is not None), None)
    if all(one is rotary for one in each):
        return (rotary, "") if rotary is not None else ([None] * len(each), "")
    return each, ""


def _explained(rotation: Rotation, call: dict[str, Any], positions: Tensor) -> bool:
    return rotation.explains(call["query"], positions) and rotation.explains(call["key"], positions)


def _stands_still(call: dict[str, Any], tolerance: float) -> bool:
    """One vector gives the same query and key at every position: the layer does not rotate."""
    return all(
        bool((part - part[:, :, :1]).abs().max() <= tolerance * part.abs().max())
        for part in (call["query"], call["key"])
    )


def low_rank_rotary(calls: list[dict[str, Any]]) -> Rotary | list[Rotary | None]:
    """The rotation of the rope key in the cached latents; one for each layer where they differ."""
    rotations: list[Rotary] = [call["module"].latent_rotary() for call in calls]
    _check_there(rotation.inv_freq for rotation in rotations)
    return rotations[0] if len({described(rotation) for rotation in rotations}) == 1 else list(rotations)


def described(rotary: Rotary | None) -> str:
    """Equal for rotations that are."""
    if rotary is None:
        return "none"
    return f"{rotary.extra_repr()} #{zlib.crc32(rotary.inv_freq.cpu().numpy().tobytes()):08x}"
