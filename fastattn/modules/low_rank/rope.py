"""Rotary frequencies of low-rank attention: plain, linear, llama3 and YaRN, in the arithmetic of transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fastattn.modules.rotary import Rotary
from fastattn.validation import hides_values

_COMMON = {"type", "rope_type", "rope_theta", "partial_rotary_factor", "max_position_embeddings"}
_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "beta_fast",
        "beta_slow",
        "original_max_position_embeddings",
        "truncate",
    },
}


def rope_type(scaling: Mapping[str, Any] | None) -> str:
    """The checked type of a ``rope_scaling`` dict.

    Raises:
        ValueError: a type whose frequencies change with the length, an unknown type, an unknown or a missing key.
    """
    if scaling is None:
        return "default"
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in _KEYS:
        raise ValueError(
            f"rope_scaling must have a rope_type with fixed frequencies, one of {sorted(_KEYS)}, got {kind!r}"
        )
    unknown = set(scaling) - _KEYS[kind] - _COMMON
    if unknown:
        raise ValueError(
            f"rope_scaling of type {kind!r} takes {sorted(_KEYS[kind])}, got unknown keys {sorted(unknown)}"
        )
    if scaling.get("partial_rotary_factor") not in (None, 1.0):
        raise ValueError(
            "rope_scaling must have partial_rotary_factor 1: qk_rope_head_dim says how many dims are rotated, "
            f"got {scaling['partial_rotary_factor']}"
        )
    optional = {"attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate"}
    for key in sorted(_KEYS[kind] - optional):
        if scaling.get(key) is None:
            raise ValueError(f"rope_scaling of type {kind!r} must have {key}, got {dict(scaling)}")
    return str(kind)


def rope_frequencies(dim: int, theta: float, scaling: Mapping[str, Any] | None) -> tuple[Tensor, float]:
    """``(inv_freq [dim / 2], attention_factor)``: float32 on the CPU whatever the default device and dtype are.

    Args:
        dim: number of rotated dims.
        theta: base of the wavelengths.
        scaling: a ``rope_scaling`` dict as in a transformers configuration, or None. ``rope_theta`` in it wins.
    """
    kind = rope_type(scaling)
    scaling = scaling or {}
    base = float(scaling.get("rope_theta") or theta)
    pair = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu")
    wavelength = base ** (pair / dim)
    if kind == "linear":
        return 1.0 / wavelength / scaling["factor"], 1.0
    if kind == "llama3":
        return _llama3(1.0 / wavelength, scaling), 1.0
    if kind == "yarn":
        return _yarn(wavelength, dim, base, scaling), _yarn_attention_factor(scaling)
    return 1.0 / wavelength, 1.0


def _mscale(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def softmax_factor(scaling: Mapping[str, Any] | None) -> float:
    """What DeepSeek multiplies the softmax scale by: ``m^2``, ``m = 0.1 mscale_all_dim ln(factor) + 1``, under YaRN."""
    if rope_type(scaling) != "yarn" or not scaling or not scaling.get("mscale_all_dim"):
        return 1.0
    return _mscale(scaling["factor"], scaling["mscale_all_dim"]) ** 2


def _yarn_attention_factor(scaling: Mapping[str, Any]) -> float:
    """The factor on cosine and sine: given, or the ratio of the two mscales, or YaRN's own."""
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    factor, mscale, mscale_all_dim = scaling["factor"], scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    return _mscale(factor)


def _yarn(wavelength: Tensor, dim: int, base: float, scaling: Mapping[str, Any]) -> Tensor:
    """YaRN (arXiv 2309.00071): fast pairs keep their frequency, slow ones are interpolated, a ramp in between."""
    length = scaling["original_max_position_embeddings"]

    def pair_of(rotations: float) -> float:  # the pair that rotates so often within the original length
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_of(scaling.get("beta_fast") or 32), pair_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    pair = torch.arange(dim // 2, dtype=torch.float32, device="cpu")
    kept = 1 - ((pair - low) / width).clamp(0, 1)
    return 1.0 / (scaling["factor"] * wavelength) * (1 - kept) + 1.0 / wavelength * kept


def _llama3(inv_freq: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Llama 3.1: slow pairs are divided by the factor, fast ones kept, with a smooth passage in between."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    rotations = scaling["original_max_position_embeddings"] / (2 * math.pi / inv_freq)
    smooth = ((rotations - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * inv_freq / scaling["factor"] + smooth * inv_freq


class LatentRotary(Rotary):
    """The rotation of a :class:`~fastattn.LowRankAttention` and the one owner of its frequencies.

    Given frequencies (``persistent``) are a buffer, which the attention module saves under its own name, see
    :attr:`table`. Computed ones are no buffer, so that no loader takes them for a tensor that must be loaded, or
    empties them, as transformers does with every non-persistent buffer.

    Construction on the meta device does not lose them. There they stay on the CPU: they are few, and nothing would
    bring them back where a checkpoint without them is assigned. They are kept as Python numbers too, for the way from
    the meta device to a real one.
    """

    def __init__(
        self,
        inv_freq: Tensor,
        *,
        interleave: bool,
        attention_factor: float,
        persistent: bool,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(inv_freq, interleave=interleave, attention_factor=attention_factor)
        hidden = inv_freq.is_meta or hides_values()
        self._initial: tuple[float, ...] | None = None if hidden else tuple(inv_freq.float().tolist())
        place = torch.get_default_device() if device is None else torch.device(device)
        table = self.inv_freq if place.type == "meta" else self.inv_freq.to(place)
        del self.inv_freq  # the base class's non-persistent buffer
        if persistent:
            self.register_buffer("inv_freq", table)
        else:
            self.inv_freq = table

    @property
    def table(self) -> dict[str, Tensor | None]:
        """This module's buffers, for the attention module to have as its own.

        Its state_dict then has ``inv_freq`` beside the projections, and a loader that sets the tensor of that name, by
        attribute (transformers) or among the buffers (accelerate), sets the one that is rotated with.
        """
        return self._buffers

    def reset_parameters(self) -> None:
        """Puts the frequencies of the construction back."""
        if self._initial is not None:
            with torch.inference_mode(False):
                self.inv_freq = torch.tensor(self._initial, dtype=torch.float32, device=self.inv_freq.device)

    def restore(self, exact: Tensor) -> None:
        """Undoes what a move did to the frequencies ``exact`` besides moving them: rounding, or emptying."""
        with torch.inference_mode(False):
            if exact.is_meta:
                self.inv_freq = self.inv_freq.float()
            else:
                self.inv_freq = exact.to(self.inv_freq.device, torch.float32)
        if exact.is_meta:
            self.reset_parameters()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        exact = self.inv_freq
        super()._apply(fn, recurse)
        if "inv_freq" not in self._buffers:
            self.inv_freq = fn(exact)
        self.restore(exact)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Saves nothing: the attention module does."""

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Misses nothing: the attention module loads the frequencies."""
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, [], unexpected_keys, error_msgs)
