"""The benchmark suite: ``make bench``, or ``python -m pytest benchmarks/suite.py``.

Every case of :mod:`benchmarks.cases` is checked, then timed by pytest-benchmark, then timed in turns with the same work
in plain PyTorch. ``extra_info`` holds the bytes and operations of the case, the share of the roofline that this
machine's measured bandwidth and matrix rate allow, and the speedup over plain PyTorch with its quartiles.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks._timing import speedup, take_turns
from benchmarks.cases import CASES
from fastattn.advice import measured_cpu


@pytest.mark.parametrize("name", CASES)
def test_speed(name, benchmark):
    hardware = measured_cpu()
    with torch.no_grad():
        case = CASES[name]()
        case.check()
        benchmark(case.call)
        seconds = take_turns({"call": case.call, "baseline": case.baseline}, rounds=11, warmup=1)
    gain = speedup(seconds["baseline"], seconds["call"])
    rate = hardware.rate32 if "f32" in name or "bf16" not in name else hardware.matrix_rate
    bound = max(case.bytes / hardware.bandwidth, case.operations / rate)
    benchmark.extra_info.update(
        bytes=case.bytes,
        operations=case.operations,
        share_of_roofline=bound / benchmark.stats.stats.median,
        speedup_over_plain=gain.median,
        speedup_quartiles=[gain.low, gain.high],
        torch=torch.__version__,
        threads=torch.get_num_threads(),
    )
    share, microseconds = bound / benchmark.stats.stats.median, 1e6 * benchmark.stats.stats.median
    print(
        f"\n{name}: {microseconds:.0f} us, {100 * share:.0f}% of the roofline, {gain.median:.2f}x plain PyTorch "
        f"({gain.low:.2f} to {gain.high:.2f})"
    )
