"""The device check goes its whole way on a CPU, finds what is wrong, and goes on after it."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("matplotlib", reason="the device check plots with matplotlib")
from benchmarks import device_check
from benchmarks.device import correctness
from fastattn import ops


def test_a_dry_run_passes_and_writes_at_most_eight_files(tmp_path):
    assert device_check.main(["--dry-run", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "device_check.json").read_text())
    assert len(result["correctness"]) > 100
    assert [row for row in result["correctness"] if row["error"]] == []
    assert {row["kernel"] for row in result["timing"]} == {
        "attention",
        "attention_backward",
        "cache",
        "decode_attention",
        "latent_decode",
        "qk_scores",
        "query_moments",
        "scores",
    }
    assert set(result["studies"]) == {"qk_throughput", "speedup_vs_context"}
    files = [path.name for path in tmp_path.iterdir()]
    assert len(files) <= 8, files
    assert "device_check.png" in files


def test_a_wrong_kernel_is_found_and_not_timed(tmp_path, monkeypatch):
    right = ops.score_knorm
    monkeypatch.setattr(ops, "score_knorm", lambda *a, **k: right(*a, **k) * 1.01)
    monkeypatch.setattr(correctness, "DTYPES", correctness.DTYPES[-1:])
    assert device_check.main(["--dry-run", "--only", "correctness", "timing", "--out", str(tmp_path)]) == 1
    result = json.loads((tmp_path / "device_check.json").read_text())
    wrong = {row["kernel"] for row in result["correctness"] if row["error"]}
    assert wrong == {"scores", "decode_attention"}  # the check beyond 2^31 elements scores as well
    timed = {row["kernel"]: row["error"] for row in result["timing"]}
    assert timed["scores"] == "not timed: its results are wrong"
    assert timed["attention"] is None


def test_without_a_gpu_it_asks_for_a_dry_run(tmp_path, capsys):
    with pytest.raises(SystemExit):
        device_check.main(["--out", str(tmp_path)])
    assert "give --dry-run" in capsys.readouterr().err
