"""The benchmark cases give right results, and the comparison of revisions finds what it should."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cases import CASES
from benchmarks.compare import median_interval


@pytest.mark.parametrize("name", [name for name in CASES if "8192" not in name and "4096" not in name])
def test_a_case_gives_the_right_result(name):
    with torch.no_grad():
        case = CASES[name]()
        case.check()
        case.baseline()
    assert case.bytes > 0


def test_a_wrong_result_is_noticed():
    with torch.no_grad():
        case = CASES["decode-2048-f32"]()
        call = case.call
        case.call = lambda: call() + 0.1
        with pytest.raises(AssertionError, match="wrong by"):
            case.check()


def test_the_interval_of_a_median_is_that_of_its_order_statistics():
    values = [float(value) for value in range(1, 26)]
    assert median_interval(values) == (13.0, 8.0, 18.0)  # ranks 8 and 18 of 25 cover the median with 95.7%
    assert median_interval([1.0] * 9)[1:] == (1.0, 1.0)
    with pytest.raises(ValueError, match="enough rounds"):
        median_interval([1.0, 2.0, 3.0])
