"""The timing helper, on a clock that the calls themselves move."""

from __future__ import annotations

import pytest

from benchmarks.lib.timing import Spread, speedup, take_turns


def test_calls_take_turns_in_alternating_order_and_are_charged_their_own_time() -> None:
    now, order = 0.0, []

    def call(name: str, seconds: float) -> None:
        nonlocal now
        now += seconds
        order.append(name)

    calls = {"slow": lambda: call("slow", 3.0), "fast": lambda: call("fast", 1.0)}
    seconds = take_turns(calls, rounds=2, warmup=1, clock=lambda: now)
    assert seconds == {"slow": [3.0, 3.0], "fast": [1.0, 1.0]}
    assert order == ["slow", "fast", "fast", "slow", "slow", "fast"]


def test_speedup_is_the_median_of_the_rounds_ratios() -> None:
    assert speedup([2.0, 9.0, 8.0], [1.0, 3.0, 1.0]) == Spread(median=3.0, low=2.5, high=5.5)


def test_one_measurement_has_no_spread() -> None:
    with pytest.raises(ValueError, match="at least 2 measurements, got 1"):
        Spread.of([1.0])
