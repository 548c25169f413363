"""Means and shares with the 95% confidence intervals that the studies print."""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple


class Estimate(NamedTuple):
    """A mean and its 95% confidence interval."""

    mean: float
    low: float
    high: float


def mean_and_interval(values: list[float]) -> Estimate:
    """Student's interval; nan for a single value."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Estimate(mean, math.nan, math.nan)
    t = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
    quantile = t.get(len(values) - 1, 2.262 if len(values) < 30 else 2.0)
    half = quantile * statistics.stdev(values) / len(values) ** 0.5
    return Estimate(mean, mean - half, mean + half)


def share_and_interval(hits: list[int]) -> Estimate:
    """Wilson's interval, which stays between 0 and 1 and says something even where all or none hit."""
    share, n, z = statistics.fmean(hits), len(hits), 1.96
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return Estimate(share, max(min(middle - half, share), 0.0), min(max(middle + half, share), 1.0))
