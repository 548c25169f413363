"""What a conversion did and what it cost: as data, a table, JSON and a plot."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class LayerReport:
    """One layer. Errors are relative: ``sqrt(E||y - y'||^2 / E||y||^2)`` on the calibration text.

    Attributes:
        name: of the attention module.
        kv_lora_rank, q_lora_rank, qk_rope_head_dim, freq_fold: what the layer was converted to.
        key_error, value_error, query_error: of the projections' outputs, before RoPE.
        joint_error: of the balanced ``[K_nope; V]`` that the latent approximates.
        rope_error: expected change of the rotated keys by lost or moved frequencies.
        cache_bytes_before, cache_bytes_after: per token, in the model's dtype.
    """

    name: str
    kv_lora_rank: int
    q_lora_rank: int | None
    qk_rope_head_dim: int
    freq_fold: int
    key_error: float
    value_error: float
    query_error: float
    joint_error: float
    rope_error: float
    cache_bytes_before: int
    cache_bytes_after: int


@dataclass(frozen=True)
class ConversionReport:
    """What :func:`fastattn.to_low_rank_` returns.

    Attributes:
        layers: one :class:`LayerReport` for each converted layer.
        config: the :class:`~fastattn.LowRankConfig` as a dict.
        calibration_tokens: how many were fed.
        seconds: that the conversion took.
        peak_memory_bytes: the device's peak on CUDA, the process's so far on a CPU, None where neither is known.
        loss_before, loss_after: nats per token on the evaluation text, None without one.
        notes: what else there is to say.
    """

    layers: list[LayerReport]
    config: dict[str, Any]
    calibration_tokens: int
    seconds: float
    peak_memory_bytes: int | None
    loss_before: float | None = None
    loss_after: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def cache_bytes_before(self) -> int:
        """Bytes cached per token over the converted layers, before."""
        return sum(layer.cache_bytes_before for layer in self.layers)

    @property
    def cache_bytes_after(self) -> int:
        """Bytes cached per token over the converted layers, after."""
        return sum(layer.cache_bytes_after for layer in self.layers)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as JSON holds it."""
        return asdict(self) | {
            "cache_bytes_before": self.cache_bytes_before,
            "cache_bytes_after": self.cache_bytes_after,
        }

    def save_json(self, path: str | Path) -> None:
        """Write :meth:`as_dict` to ``path``."""
        Path(path).write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        head = ("layer", "rank", "q rank", "rope", "fold", "key", "value", "query", "joint", "rope err", "bytes/token")
        rows = [
            (
                layer.name,
                str(layer.kv_lora_rank),
                "full" if layer.q_lora_rank is None else str(layer.q_lora_rank),
                str(layer.qk_rope_head_dim),
                str(layer.freq_fold),
                f"{layer.key_error:.4f}",
                f"{layer.value_error:.4f}",
                f"{layer.query_error:.4f}",
                f"{layer.joint_error:.4f}",
                f"{layer.rope_error:.4f}",
                f"{layer.cache_bytes_before} -> {layer.cache_bytes_after}",
            )
            for layer in self.layers
        ]
        widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]]
        before, after = self.cache_bytes_before, self.cache_bytes_after
        lines.append(f"cache: {before} -> {after} bytes per token ({1 - after / before:.1%} less)")
        if self.loss_before is not None and self.loss_after is not None:
            lines.append(f"held-out loss: {self.loss_before:.4f} -> {self.loss_after:.4f} nats per token")
        memory = "" if self.peak_memory_bytes is None else f", peak memory {self.peak_memory_bytes / 2**20:.0f} MiB"
        lines.append(f"{self.calibration_tokens} calibration tokens, {self.seconds:.1f} s{memory}")
        return "\n".join([line.rstrip() for line in lines] + self.notes)

    def plot(self, path: str | Path) -> None:
        """Save a figure of the errors and cache bytes per layer to ``path`` (needs matplotlib)."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 3.5), layout="constrained")
        errors, cache = figure.subplots(1, 2)
        index = range(len(self.layers))
        for name in ("key", "value", "query", "rope"):
            errors.plot(index, [getattr(layer, f"{name}_error") for layer in self.layers], label=name)
        errors.set(xlabel="converted layer", ylabel="relative output error", ylim=(0, None))
        errors.legend()
        cache.plot(index, [layer.cache_bytes_before for layer in self.layers], label="before")
        cache.plot(index, [layer.cache_bytes_after for layer in self.layers], label="after")
        cache.set(xlabel="converted layer", ylabel="cache bytes per token", ylim=(0, None))
        cache.legend()
        figure.savefig(path, dpi=150)
