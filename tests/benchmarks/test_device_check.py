"""The device check reports everything, whatever one of its parts does, and says in a sentence what is missing."""

from __future__ import annotations

import json
import sys
import time
import types

import pytest
import torch

pytest.importorskip("matplotlib", reason="the device check plots with matplotlib")
from benchmarks import device_check
from benchmarks.device import parts, preflight, report, timing, worker
from benchmarks.device.bench import Bench


def result_of(out):
    return json.loads((out / "device_check.json").read_text())


def test_injected_faults_end_their_own_parts_only(tmp_path, monkeypatch):
    files = [file for file in device_check.suite_files() if file.stem == "test_merge"]
    assert len(files) == 1
    monkeypatch.setattr(device_check, "suite_files", lambda: files)
    monkeypatch.setattr(device_check, "NATURE", ("replay",))
    assert device_check.main(["--dry-run", "--only", "correctness", "--out", str(tmp_path)]) == 0
    result = result_of(tmp_path)
    assert set(result["faults"]) == {"raises", "exits", "quits", "killed", "hangs"}
    assert device_check.unexpected_faults(result) == []
    assert {row["kernel"] for row in result["correctness"]} == {"merge_attention", "cache"}
    assert [row for row in result["correctness"] if row["error"]] == []
    assert result["compilations"] > 0
    assert result["unfinished"] == []
    text = (tmp_path / "device_check.txt").read_text()
    assert "SIGKILL" in text
    assert f"{result['compilations']} distinct" in text
    assert len(list(tmp_path.iterdir())) <= 8


def test_what_is_wrong_is_not_timed(tmp_path, monkeypatch):
    suite, out = tmp_path / "suite", tmp_path / "out"
    suite.mkdir()
    (suite / "conftest.py").write_text("from tests.conftest import pytest_addoption\n")
    (suite / "test_qk.py").write_text("def test_right(): pass\n\ndef test_wrong(): assert 1 == 2\n")
    monkeypatch.setattr(device_check, "suite_files", lambda: [suite / "test_qk.py"])
    monkeypatch.setattr(device_check, "NATURE", ())
    monkeypatch.setattr(device_check, "FAULTS", {})
    monkeypatch.setattr(device_check, "OPERATORS", ("qk_scores",))
    assert device_check.main(["--dry-run", "--only", "correctness", "timing", "--out", str(out)]) == 1
    result = result_of(out)
    assert [row["error"] is None for row in result["correctness"]] == [True, False]
    assert "1 == 2" in result["correctness"][1]["error"]
    assert [row["error"] for row in result["timing"]] == ["not timed: its results are wrong"]


@pytest.mark.parametrize("name", device_check.OPERATORS)
def test_every_operator_is_timed(tmp_path, name):
    assert worker.time_operator(name, tmp_path, "cpu", True)
    lines = parts.read(tmp_path)
    assert len(lines) == len(timing.entries(Bench("cpu", small=True))[name])
    kernels = {line["timed"]["kernel"] for line in lines}
    assert kernels == ({"attention", "attention_backward"} if name == "attention" else {name})
    report.write(tmp_path)
    assert (tmp_path / "device_check.png").exists()


@pytest.mark.parametrize("name", device_check.OPERATORS)
def test_timed_inputs_are_constructed_under_any_default_device(name):
    for make in timing.entries(Bench("cpu", small=True))[name]:
        with torch.device("meta"):
            entry = make()
        cells = [cell.cell_contents for cell in entry.ours.__closure__ or ()]
        tensors = [cell for cell in cells if isinstance(cell, torch.Tensor)]
        assert tensors or name == "attention"
        assert all(tensor.device.type == "cpu" for tensor in tensors)


def test_inputs_are_drawn_alike_under_any_default_device():
    bench = Bench("cpu", small=True)
    with torch.device("meta"):
        drawn = bench.normal(3, 4, dtype=torch.float32, seed=5)
        assert bench.int32([1]).device.type == bench.noise(2, dtype=torch.float32).device.type == "cpu"
    assert torch.equal(drawn, bench.normal(3, 4, dtype=torch.float32, seed=5))


def test_a_study_that_exits_is_a_line(tmp_path, monkeypatch):
    def dry_run(out):
        raise SystemExit("measured under other conditions")

    monkeypatch.setitem(sys.modules, "benchmarks.studies.leaves", types.SimpleNamespace(dry_run=dry_run))
    assert not worker.study("leaves", tmp_path, "cpu", True)
    assert report.failures(report.write(tmp_path))[0].startswith("leaves: FAILED: SystemExit: measured under")


def test_studies_give_their_tables(tmp_path):
    for name in device_check.STUDIES:
        assert worker.study(name, tmp_path, "cpu", True)
    assert set(report.write(tmp_path)["studies"]) == set(device_check.STUDIES)


def test_an_interrupted_run_is_reported(tmp_path, capsys):
    parts.append(tmp_path, step="conditions", part="", device="a device")
    line = {"step": "correctness", "part": "qk", "kernel": "qk_scores", "seconds": 1.0}
    parts.append(tmp_path, **line, case="one", error=None)
    parts.append(tmp_path, **line, case="another", error="wrong")
    with (tmp_path / parts.LINES).open("a") as file:
        file.write('{"step": "correctness", "pa')
    assert device_check.main(["--report", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "1 of 2 checks passed" in said
    assert "qk, another: wrong" in said
    assert "interrupted: correctness qk" in said


def test_after_the_minutes_nothing_begins(tmp_path):
    part = parts.Part("timing", "late", (sys.executable, "-c", "raise SystemExit(1)"), 60)
    parts.run([part], tmp_path, 1, deadline=time.monotonic() - 1)
    assert [line["error"] for line in parts.read(tmp_path)] == ["not run: the minutes are over"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give --out DIR"),
        (["--out", "x", "--minutes", "0"], "--minutes must be above 0, got 0"),
        (["--report", "nowhere"], "nowhere holds no device_check.jsonl"),
    ],
)
def test_bad_options_are_refused(arguments, says, capsys):
    with pytest.raises(SystemExit):
        device_check.main(arguments)
    assert says in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_asks_for_a_dry_run(tmp_path, capsys):
    with pytest.raises(SystemExit):
        device_check.main(["--out", str(tmp_path / "out")])
    assert "give --dry-run" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_missing_driver_is_a_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "PyTorch finds no driver" in preflight.problem()


def test_a_triton_that_does_not_fit_is_a_sentence():
    assert preflight.triton_problem("3.6.0", "3.6.0+git1") is None
    assert preflight.triton_problem(None, "3.6.0") is None
    assert "Triton 3.4.0 does not fit" in preflight.triton_problem("3.6.0", "3.4.0")
    assert preflight.triton_problem("3.6.0", None).endswith("pip install triton==3.6.0")


def test_a_small_device_is_a_sentence(monkeypatch):
    launch = pytest.importorskip("fastattn.ops.triton._launch", reason="needs Triton")

    def refuse(tensor):
        raise RuntimeError("fastattn's kernels need 101376 bytes of shared memory per block, X has 49152")

    monkeypatch.setattr(launch, "target_of", refuse)
    monkeypatch.setattr(torch, "empty", lambda *a, **k: None)
    assert "need 101376 bytes of shared memory" in preflight._device_problem()


def test_targets_are_what_bytes_and_operations_allow():
    """An H200: 4.8 TB/s, 989 TFLOP/s. Three products per key leave Expected Attention about a quarter of the memory."""
    bandwidth, rate = 4.8e12, 989e12
    work = timing.expected_attention_work(4, 32, 8, 32768, 128)
    assert 0.25 < timing.attainable_share(*work, bandwidth, rate) < 0.28
    assert timing.attainable_share(4.0 * 8 * 128, 4.0 * 32 * 128, bandwidth, rate) == 1.0
