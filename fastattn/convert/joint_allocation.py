"""Share the numbers that a token costs over layers, and inside a layer between rope key and latent."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# What a lost position costs when others are lost with it, over what it costs alone. Of 4 and 8 the better on
# SmolLM2-135M at 72 numbers (3.52 and 3.35 nats on text that is in no table), and as good at 128 (2.777 and 2.785).
TOGETHER = 8.0


@dataclass(frozen=True)
class LayerCosts:
    """What a layer may be: ``pairs[i]`` components keep RoPE, at a cost of ``rope[i]`` and, with latent rank ``r``, of
    ``latent[i][r]`` more (``r`` from 0), falling. Expected losses, of one unit over all layers."""

    pairs: list[int]
    rope: list[float]
    latent: list[Tensor]


def pair_counts(components: int) -> list[int]:
    """The counts that a layer is judged at: every one while there are few, then in steps of about a third."""
    counts = [1]
    while counts[-1] < components:
        counts.append(min(components, counts[-1] + max(1, counts[-1] // 3)))
    return counts


def choose_at_price(layers: list[LayerCosts], price: float) -> list[tuple[int, int]]:
    """Every layer's ``(index into pairs, rank)`` of least cost, where a number per token costs ``price``.

    No other choice that needs as few numbers, ``sum(2 pairs + rank)``, costs less.
    """
    chosen = []
    for layer in layers:
        best: tuple[float, int, int] | None = None
        for index, (pairs, rope, latent) in enumerate(zip(layer.pairs, layer.rope, layer.latent, strict=True)):
            ranks = torch.arange(latent.numel(), dtype=latent.dtype, device=latent.device)
            total = latent + price * ranks
            rank = 1 + int(total[1:].argmin())
            cost = rope + float(total[rank]) + 2 * price * pairs
            if best is None or cost < best[0]:
                best = (cost, index, rank)
        assert best is not None  # there is at least one count of pairs
        chosen.append(best[1:])
    return chosen


def numbers(layers: list[LayerCosts], chosen: list[tuple[int, int]]) -> int:
    """What a token costs, over all layers."""
    return sum(2 * layer.pairs[index] + rank for layer, (index, rank) in zip(layers, chosen, strict=True))


def allocate_jointly(layers: list[LayerCosts], budget: int) -> list[int]:
    """The pairs that every layer keeps, at the lowest price at which ``budget`` numbers are not exceeded.

    What is left of the budget is for the ranks (:func:`~fastattn.convert.allocation.allocate_globally`).

    Raises:
        ValueError: fewer than three numbers per layer: a pair and a rank of 1.
    """
    if budget < 3 * len(layers):
        raise ValueError(f"kv_lora_rank + qk_rope_head_dim must be at least 3 per layer, got {budget / len(layers):g}")
    low, high = 1e-12, 1.0
    while numbers(layers, choose_at_price(layers, high)) > budget:
        high *= 16
    for _ in range(40):
        price = (low * high) ** 0.5
        if numbers(layers, choose_at_price(layers, price)) > budget:
            low = price
        else:
            high = price
    return [layer.pairs[index] for layer, (index, _) in zip(layers, choose_at_price(layers, high), strict=True)]
