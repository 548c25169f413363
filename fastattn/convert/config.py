"""What a conversion is asked to do."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fastattn.validation import check_count

METHODS = ("loss_optimal", "plain_svd", "curvature")
ALLOCATIONS = ("uniform", "global", "joint")
STATISTICS = ("sequential", "parallel")
SELECTIONS = ("energy", "uniform", "curvature")
MIXINGS = ("complex", "real")
RESOLVED = ("statistics", "rope_selection")  # None stands for what suits the method


@dataclass(frozen=True)
class LowRankConfig:
    """Options of :func:`fastattn.to_low_rank_`. ``None`` for a rank or dim keeps all there is.

    Args:
        kv_lora_rank: latent values cached per token, besides the rope key; at most
            ``kv_heads * (head_dim + v_head_dim) - qk_rope_head_dim``.
        q_lora_rank: rank of the query projection; ``None`` keeps one full-rank projection.
        qk_rope_head_dim: dims of the shared rope key, even, at most ``kv_heads`` times the rotated dims of a head.
            ``None`` keeps every one: RoPE is exact and only the rest is compressed.
        method: ``"loss_optimal"`` minimizes the error of the projections' outputs on the calibration text,
            ``"plain_svd"`` the error of their weights, ``"curvature"`` what the error costs the loss: the SVD of
            ``A^1/2 W B^1/2`` with the Kronecker-factored Fisher information ``A (x) B`` of the latent projection, from
            one backward pass of the original per calibration sequence, and of the query projection likewise.
        rank_allocation: with ``"curvature"``: ``"uniform"`` gives every layer ``kv_lora_rank``, ``"global"`` shares
            the same total by one threshold on the expected losses, so that ranks differ between layers; likewise the
            query's ranks and, with ``rope_selection="curvature"``, rope dims. ``"joint"`` shares the sum
            ``kv_lora_rank + qk_rope_head_dim`` over layers and, inside each, between latent and rope key.
        refit: with ``"curvature"``: fit each output projection by ridge regression to the original's residual stream,
            layer by layer, on at most 8,192 calibration tokens.
        freq_fold: number of neighboring frequencies that are concentrated together as if they were equal, a divisor of
            the number of frequencies, or ``"search"``: for each layer the divisor of least expected error.
        rope_selection: which components keep RoPE: ``"energy"`` those of a layer whose loss would change scores most;
            ``"uniform"`` equally many of every folded group, at the model's own evenly spaced frequencies (with
            ``freq_fold = head_dim / qk_rope_head_dim`` these are DeepSeek's, which an export needs); ``"curvature"``,
            with that method only, those whose lost position costs the loss most, mixed over heads at one frequency. By
            default ``"energy"``, and ``"curvature"`` with that method.
        rope_mixing: ``"real"`` rotates both halves of a pair alike, as published; ``"complex"`` also lets heads differ
            in phase, which collects at least as much energy.
        kv_rank_budget: sum of the layers' latent ranks, given out where they lower the relative error most; needs
            ``kv_lora_rank=None``.
        statistics: ``"sequential"`` calibrates a layer on what the already converted layers put out, ``"parallel"`` on
            what the original's did; by default the first, with ``"curvature"`` always the second.
        damping: multiple of the mean input energy added to the diagonal of the statistics.
        balance: scale keys to the values' size before their joint decomposition.
        layers: converts only attention modules whose name matches: a regular expression or a function of the name.

    Raises:
        TypeError, ValueError: an option of the wrong type or outside its range.
    """

    kv_lora_rank: int | None = 512
    q_lora_rank: int | None = None
    qk_rope_head_dim: int | None = 64
    method: Literal["loss_optimal", "plain_svd", "curvature"] = "loss_optimal"
    freq_fold: int | Literal["search"] = "search"
    rope_selection: Literal["energy", "uniform", "curvature"] | None = None
    rope_mixing: Literal["complex", "real"] = "complex"
    kv_rank_budget: int | None = None
    statistics: Literal["sequential", "parallel"] | None = None
    damping: float = 0.0
    balance: bool = True
    layers: str | Callable[[str], bool] | None = None
    rank_allocation: Literal["uniform", "global", "joint"] = "uniform"
    refit: bool = False

    def __post_init__(self) -> None:
        counts = {"kv_lora_rank": 1, "q_lora_rank": 1, "kv_rank_budget": 1, "qk_rope_head_dim": 2}
        if self.freq_fold != "search":
            counts["freq_fold"] = 1
        for name, minimum in counts.items():
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), minimum)
        if self.qk_rope_head_dim is not None and self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim must be even (RoPE turns pairs), got {self.qk_rope_head_dim}")
        for name, allowed in (
            ("method", METHODS),
            ("rope_selection", SELECTIONS),
            ("rope_mixing", MIXINGS),
            ("statistics", STATISTICS),
            ("rank_allocation", ALLOCATIONS),
        ):
            if getattr(self, name) not in allowed and (getattr(self, name) is not None or name not in RESOLVED):
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        if self.kv_rank_budget is not None and self.kv_lora_rank is not None:
            raise ValueError(
                f"kv_rank_budget sets the ranks and needs kv_lora_rank=None, got kv_lora_rank={self.kv_lora_rank}"
            )
        if isinstance(self.damping, bool) or not isinstance(self.damping, (int, float)):
            raise TypeError(f"damping must be a number, got {type(self.damping).__name__}")
        if not (math.isfinite(self.damping) and self.damping >= 0):
            raise ValueError(f"damping must be finite and at least 0, got {self.damping}")
        if not isinstance(self.balance, bool):
            raise TypeError(f"balance must be a bool, got {type(self.balance).__name__}")
        if not isinstance(self.refit, bool):
            raise TypeError(f"refit must be a bool, got {type(self.refit).__name__}")
        self._check_curvature()
        if self.layers is not None and not isinstance(self.layers, str) and not callable(self.layers):
            raise TypeError(
                f"layers must be a regular expression, a function or None, got {type(self.layers).__name__}"
            )

    def _check_curvature(self) -> None:
        """Options that belong to the curvature, and those that have no meaning with it."""
        if self.method != "curvature":
            if self.refit or self.rank_allocation != "uniform" or self.rope_selection == "curvature":
                raise ValueError(
                    'rank_allocation, refit and rope_selection="curvature" need method="curvature", '
                    f"got {self.method!r}"
                )
            return
        if self.rank_allocation == "joint" and (
            self.selection != "curvature" or self.kv_lora_rank is None or self.qk_rope_head_dim is None
        ):
            raise ValueError(
                'rank_allocation="joint" needs numbers for kv_lora_rank and qk_rope_head_dim and '
                f'rope_selection="curvature", got {self.kv_lora_rank}, {self.qk_rope_head_dim} and {self.selection!r}'
            )
        if self.statistics == "sequential":
            raise ValueError('statistics must be "parallel" or None for method="curvature", got "sequential"')
        if self.selection == "curvature" and (self.freq_fold != "search" or self.rope_mixing != "complex"):
            raise ValueError(
                'freq_fold and rope_mixing need rope_selection="energy" or "uniform", which "curvature" replaces, got '
                f"{self.freq_fold!r} and {self.rope_mixing!r}"
            )

    @property
    def sequential(self) -> bool:
        """Layers are calibrated on what the converted layers before them put out."""
        return self.method != "curvature" if self.statistics is None else self.statistics == "sequential"

    @property
    def selection(self) -> str:
        """What chooses the components that keep RoPE."""
        return self.rope_selection or ("curvature" if self.method == "curvature" else "energy")

    def wants(self, name: str) -> bool:
        """Whether the attention module called ``name`` is to be converted."""
        if self.layers is None:
            return True
        if isinstance(self.layers, str):
            return re.search(self.layers, name) is not None
        return bool(self.layers(name))

    def as_dict(self) -> dict[str, Any]:
        """The options as JSON can hold them."""
        options = asdict(self)
        options["statistics"] = "sequential" if self.sequential else "parallel"
        options["rope_selection"] = self.selection
        if callable(self.layers):
            options["layers"] = getattr(self.layers, "__qualname__", repr(self.layers))
        return options
