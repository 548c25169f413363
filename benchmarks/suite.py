"""The benchmark suite: ``make bench``, or ``python -m pytest benchmarks/suite.py``.

Every case of :mod:`benchmarks.lib.cases` is checked, then timed by pytest-benchmark, then timed in turns with the same
work in plain PyTorch. ``extra_info`` holds the bytes and operations of the case, the share of the roofline that this
machine's measured bandwidth and matrix rate allow, and the speedup over plain PyTorch with its quartiles.

``python -m benchmarks.suite --shape decode:batch=1,heads=32,kv_heads=8,slots=32768,dim=128,dtype=bf16`` does the same
for shapes of your own; ``--shape`` may be repeated, and takes the arguments of a function of
:mod:`benchmarks.lib.cases`.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
from collections.abc import Callable, Sequence

import pytest
import torch

from benchmarks.lib.cases import CASES, DTYPES, SHAPED, Case
from benchmarks.lib.timing import speedup, take_turns
from fastattn.advice import measured_cpu


def parse_shape(text: str) -> tuple[str, Callable[[], Case]]:
    """The case that ``text``, as in ``decode:batch=1,heads=32,...``, asks for."""
    name, _, given = text.partition(":")
    if name not in SHAPED:
        raise argparse.ArgumentTypeError(f"--shape must begin with one of {', '.join(SHAPED)}, got {text!r}")
    known = inspect.signature(SHAPED[name]).parameters
    arguments: dict[str, object] = {}
    for part in filter(None, given.split(",")):
        key, _, value = part.partition("=")
        if key not in known:
            raise argparse.ArgumentTypeError(f"--shape {name} takes {', '.join(known)}, got {key!r}")
        if key == "dtype":
            if value not in DTYPES:
                raise argparse.ArgumentTypeError(f"dtype must be one of {', '.join(DTYPES)}, got {value!r}")
            arguments[key] = DTYPES[value]
        elif value.isdigit() and int(value) > 0:
            arguments[key] = int(value)
        else:
            raise argparse.ArgumentTypeError(f"{key} must be a positive number, got {value!r}")
    missing = [k for k, p in known.items() if p.default is p.empty and k not in arguments]
    if missing:
        raise argparse.ArgumentTypeError(f"--shape {name} also needs {', '.join(missing)}")
    return text, lambda: SHAPED[name](**arguments)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suite", description="Times operators at given shapes.")
    parser.add_argument("--shape", action="append", type=parse_shape, required=True, metavar="NAME:SIZE=N,...")
    hardware = measured_cpu()
    for text, make in parser.parse_args(argv).shape:
        with torch.no_grad():
            case = make()
            case.check()
            seconds = take_turns({"call": case.call, "baseline": case.baseline}, rounds=11, warmup=1)
        gain, median = speedup(seconds["baseline"], seconds["call"]), statistics.median(seconds["call"])
        rate = hardware.matrix_rate if "bf16" in text else hardware.rate32
        share = max(case.bytes / hardware.bandwidth, case.operations / rate) / median
        print(
            f"{text}: {1e6 * median:.0f} us, {100 * share:.0f}% of the roofline, {gain.median:.2f}x plain PyTorch "
            f"({gain.low:.2f} to {gain.high:.2f})"
        )


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


if __name__ == "__main__":
    main()
