"""The benchmark cases give right results, and the comparison of revisions finds what it should."""

from __future__ import annotations

import argparse
import re

import pytest
import torch

from benchmarks import history, suite
from benchmarks.compare import ROOT, Revision, compare, median_interval
from benchmarks.lib.cases import CASES


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


def test_two_processes_time_a_case_in_turns():
    here, base = Revision(ROOT), Revision(ROOT)
    try:
        found = compare(here, base, "merge-2-parts", rounds=7)
    finally:
        here.close()
        base.close()
    assert not isinstance(found, str), found
    median, low, high = found
    assert 0 < low <= median <= high


def test_history_keeps_a_line_per_run_and_draws_it(tmp_path):
    report = {
        "datetime": "2026-01-02T03:04:05",
        "machine_info": {"cpu": {"brand_raw": "a processor"}, "machine": "x86_64", "python_version": "3.11"},
        "benchmarks": [
            {
                "params": {"name": name},
                "stats": {"median": 1e-3, "iqr": 1e-5},
                "extra_info": {"share_of_roofline": 0.5, "speedup_over_plain": 2.0, "threads": 2, "torch": "2.13.0"},
            }
            for name in ("decode-2048-f32", "knorm-1024-f32")
        ],
    }
    line = history.record(report, "abcdef0123")
    assert line["cases"]["decode-2048-f32"]["median_us"] == 1000.0
    assert (line["date"], line["machine"], line["revision"]) == ("2026-01-02", "a processor", "abcdef0123")
    history.plot([line, line], tmp_path / "history.png")
    assert (tmp_path / "history.png").stat().st_size > 1000
    with pytest.raises(SystemExit, match="no benchmark"):
        history.record({**report, "benchmarks": []}, "abc")


def test_shapes_of_ones_own(capsys):
    shapes = ["decode:batch=2,heads=4,kv_heads=2,slots=100,dim=16,dtype=f32", "moments:heads=2,tokens=9,dim=8"]
    suite.main(["--shape", shapes[0], "--shape", shapes[1]])
    measured = r": \d+ us, \d+% of the roofline, [\d.]+x plain PyTorch \([\d.]+ to [\d.]+\)$"
    for line, shape in zip(capsys.readouterr().out.splitlines(), shapes, strict=True):
        assert re.match(re.escape(shape) + measured, line)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("encode:batch=1", "--shape must begin with one of attention, decode"),
        ("decode:rows=1", "--shape decode takes batch, heads, kv_heads, slots, dim, dtype, got 'rows'"),
        ("decode:batch=0", "batch must be a positive number, got '0'"),
        ("decode:batch=1,dtype=int8", "dtype must be one of bf16, f32, got 'int8'"),
        ("decode:batch=1,heads=2,dim=8,dtype=f32", "--shape decode also needs kv_heads, slots"),
    ],
)
def test_a_shape_that_means_nothing(text, says):
    with pytest.raises(argparse.ArgumentTypeError, match=re.escape(says)):
        suite.parse_shape(text)
