"""fastattn.advise against the points that arXiv 2401.14489 published."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path

import pytest
import torch

from fastattn import advise
from fastattn.advice import Hardware

PUBLISHED = Path(__file__).parents[1] / "benchmarks" / "studies" / "published" / "qk_throughput.csv"


def points() -> list[tuple[int, int, float]]:
    lines = [line for line in PUBLISHED.read_text().splitlines() if not line.startswith("#")]
    rows = [(int(r["heads"]), int(r["hidden_size"]), float(r["tflops"])) for r in csv.DictReader(lines)]
    assert len(rows) == 48
    return rows


def predicted(heads: int, hidden_size: int) -> float:
    return advise(hidden_size, heads, 2048, torch.float16, "a100").tflops


def test_it_orders_the_published_points():
    pairs = [
        ((predicted(*a[:2]) < predicted(*b[:2])) == (a[2] < b[2]))
        for a, b in itertools.combinations(points(), 2)
        if abs(a[2] - b[2]) > 0.1 * b[2]
    ]
    assert len(pairs) > 800
    assert sum(pairs) / len(pairs) >= 0.98


def test_it_is_close_to_the_published_points():
    errors = [abs(predicted(heads, hidden) / tflops - 1) for heads, hidden, tflops in points()]
    assert max(errors) < 1 / 3
    assert sum(error < 0.2 for error in errors) >= 0.75 * len(errors)


def test_throughput_follows_the_head_dim_and_hardly_the_heads():
    at_64 = [predicted(heads, 64 * heads) for heads in (24, 32, 40, 64, 80, 96)]
    at_128 = [predicted(heads, 128 * heads) for heads in (24, 32, 40, 64, 80, 96)]
    assert max(at_64) < 1.1 * min(at_64)
    assert min(at_128) > 1.3 * max(at_64)


def test_a_head_dim_between_the_tiles_is_told_so():
    advice = advise(2560, 32, 2048, torch.float16, "a100")
    assert (advice.head_dim, advice.alignment) == (80, 16)
    assert "no multiple of 64" in str(advice)
    assert advice.tflops < advise(4096, 32, 2048, torch.float16, "a100").tflops
    assert advice.head_dims[0][1] > 80


def test_the_rank_saves_at_least_a_quarter_and_small_models_get_none():
    assert advise(4096, 32, 2048, device="h200").kv_lora_rank == 512
    small = advise(576, 9, 2048, device="h200").kv_lora_rank
    assert small is not None
    assert small + 64 <= 2 * 576 // 4
    assert advise(128, 2, 128, device="h200").kv_lora_rank is None


def test_a_decode_that_memory_binds_and_one_that_matrices_bind():
    assert "stays bound by memory" in str(advise(4096, 32, 2048, device="h200"))
    assert "bound by the matrix units" in str(advise(16384, 128, 2048, device="h200"))


def test_the_cpu_is_measured():
    advice = advise(512, 8, 256, torch.float32, "cpu")
    assert advice.tflops > 0
    assert "this CPU" in str(advice)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"hidden_size": 100}, ValueError, "hidden_size must be a multiple of num_heads 8, got 100"),
        ({"num_heads": 0}, ValueError, "num_heads must be at least 1, got 0"),
        ({"seq_len": 1.5}, TypeError, "seq_len must be an integer, got float"),
        ({"dtype": torch.float64}, TypeError, "dtype must be float16, bfloat16 or float32, got torch.float64"),
        ({"device": "abacus"}, ValueError, "device must be one of .*, got 'abacus'"),
        ({"device": 3}, TypeError, "device must be a name, a torch.device or a Hardware, got int"),
        ({"device": "meta"}, ValueError, "device must be one of .*, got 'meta'"),
    ],
)
def test_bad_input(changed, error, message):
    arguments = {"hidden_size": 512, "num_heads": 8, "seq_len": 128, "device": "h200", **changed}
    with pytest.raises(error, match=message):
        advise(**arguments)


def test_own_figures():
    slow = Hardware("slow", 1e9, 1e12, 1e12, 1)
    assert advise(512, 8, 256, device=slow).bound == "memory"
