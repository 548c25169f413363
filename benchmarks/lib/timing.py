"""Interleaved timing: what is compared takes turns, so that a change of the machine's speed hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) < 2:
            raise ValueError(f"values must hold at least 2 measurements, got {len(values)}")
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


def take_turns(
    calls: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 15,
    warmup: int = 2,
    clock: Callable[[], float] | None = None,
) -> dict[str, list[float]]:
    """Seconds of every call in every round; each round runs all calls once, every other round in reverse order.

    Args:
        calls: by name. A call has done its work when it returns.
        rounds: measured rounds.
        warmup: rounds before that are not measured (compilation, first touch of memory).
        clock: seconds; ``time.perf_counter`` by default.
    """
    clock = clock or time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(warmup + rounds):
        order = list(calls.items())
        for name, call in order if index % 2 == 0 else reversed(order):
            begin = clock()
            call()
            elapsed = clock() - begin
            if index >= warmup:
                seconds[name].append(elapsed)
    return seconds


def speedup(slower: Sequence[float], faster: Sequence[float]) -> Spread:
    """How many times as long ``slower`` takes, round by round."""
    return Spread.of([one / two for one, two in zip(slower, faster, strict=True)])
