"""Everything that only a GPU can tell, in one command: ``python -m benchmarks.device_check --out DIR``.

1. correctness: every kernel against float64, in all dtypes, with poisoned memory, at block edges, beyond 2^31 elements
   and 2^17 tokens, in replayed and compiled CUDA graphs;
2. timing, of what passed: each kernel against the best PyTorch equivalents and against the device's measured bandwidth
   and matrix rate, with a cold cache;
3. the studies of speedup against context and of key-query throughput at the device's size.

A failure in one check does not stop the rest. Writes ``device_check.json``, a table and plots, at most 8 files; made to
take under 5 minutes on one H200. ``--dry-run`` goes the whole way on a CPU with small shapes (its times mean nothing).
Runs from a checkout, without installing.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import platform
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.device import correctness, timing
from benchmarks.studies import _common as common

STEPS = ("correctness", "timing", "studies")
STUDIES = ("qk_throughput", "speedup_vs_context")


def run_correctness(bench: correctness.Bench, result: dict[str, Any]) -> None:
    found = result["correctness"] = []
    for kernel, case, check in correctness.checks(bench):
        begin, error = time.perf_counter(), None
        try:
            with torch.device(bench.device):
                check()
        except Exception as problem:
            where = traceback.extract_tb(problem.__traceback__)[-1]
            error = f"{type(problem).__name__}: {str(problem)[:300]} ({Path(where.filename).name}:{where.lineno})"
            print(f"FAILED  {kernel}, {case}: {error}", flush=True)
        found.append({"kernel": kernel, "case": case, "error": error, "seconds": round(time.perf_counter() - begin, 2)})
        if bench.cuda:
            torch.cuda.empty_cache()
    passed = sum(1 for row in found if row["error"] is None)
    print(f"correctness: {passed} of {len(found)} checks passed", flush=True)


def run_timing(bench: correctness.Bench, result: dict[str, Any]) -> None:
    failed = {row["kernel"] for row in result.get("correctness", []) if row["error"]}
    clock = timing.Clock(bench)
    bandwidth, rate = timing.ceilings(bench, clock)
    result["ceilings"] = {"copy_bytes_per_second": bandwidth, "bfloat16_flop_per_second": rate}
    found = result["timing"] = []
    for make in timing.entries(bench):
        try:
            entry = make()
            if entry.kernel in failed:
                found.append({"kernel": entry.kernel, "case": entry.case, "error": "not timed: its results are wrong"})
                continue
            if entry.kernel == "attention_backward":
                found.append(asdict(timing.measure(entry, clock, bandwidth, rate)))
            else:
                with torch.no_grad():
                    found.append(asdict(timing.measure(entry, clock, bandwidth, rate)))
        except Exception as problem:
            found.append({"kernel": "?", "case": "?", "error": f"{type(problem).__name__}: {str(problem)[:300]}"})
            print(f"FAILED  timing: {found[-1]['error']}", flush=True)
        finally:
            entry = None  # type: ignore[assignment]
            if bench.cuda:
                torch.cuda.empty_cache()


def run_studies(bench: correctness.Bench, result: dict[str, Any], out: Path) -> None:
    result["studies"] = {}
    for name in STUDIES:
        arguments = ["--out", str(out), "--device", bench.device, "--fresh"]
        try:
            study = importlib.import_module(f"benchmarks.studies.{name}")
            if bench.small:
                study.dry_run(out)
            else:
                study.main(arguments)
            result["studies"][name] = (out / f"{name}.txt").read_text()
            (out / f"{name}.txt").unlink()  # it is in the table and in the JSON
        except Exception as problem:
            result["studies"][name] = f"FAILED: {type(problem).__name__}: {str(problem)[:300]}"
            print(f"FAILED  study {name}: {result['studies'][name]}", flush=True)


def timing_table(result: dict[str, Any]) -> str:
    rows = []
    for row in result.get("timing", []):
        if row.get("error"):
            rows.append([row["kernel"], row["case"], row["error"], "", "", "", "", ""])
            continue
        rivals = {name: value for name, value in row["rivals"].items() if isinstance(value, float)}
        best = min(rivals, key=lambda name: rivals[name]) if rivals else ""
        rows.append(
            [
                row["kernel"],
                row["case"],
                f"{1e6 * row['seconds']:.0f}",
                f"{100 * row['bandwidth_share']:.0f}%",
                f"{row['tflops']:.0f}",
                best,
                f"{rivals[best] / row['seconds']:.2f}x" if best else "",
                row["target"],
            ]
        )
    header = ["kernel", "case", "us", "of bandwidth", "TFLOP/s", "best rival", "faster than it", "target"]
    return common.table(header, rows)


def plot(result: dict[str, Any], out: Path, note: str) -> None:
    rows = [row for row in result.get("timing", []) if not row.get("error")]
    if not rows:
        return
    figure, (axis,) = common.figure(1, width=11, height=0.42 * len(rows) + 1.6)
    figure.subplots_adjust(left=0.34, bottom=0.16)
    for index, row in enumerate(rows):
        rivals = {name: value for name, value in row["rivals"].items() if isinstance(value, float)}
        for name, value in rivals.items():
            axis.plot(value / row["seconds"], index, "|", markersize=12, color="#D55E00")
            axis.annotate(name, (value / row["seconds"], index), fontsize=6, rotation=25, color="#888888")
    axis.axvline(1.0, color="#0072B2")
    axis.set_yticks(range(len(rows)), [f"{row['kernel']} {row['case']}" for row in rows], fontsize=7)
    axis.invert_yaxis()
    axis.set(xscale="log", xlabel="time of the PyTorch equivalents over this project's (right of 1: slower than ours)")
    figure.text(0.01, 0.01, note, fontsize=6.5, color="#555555")
    figure.savefig(out / "device_check.png", dpi=150)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--dry-run", action="store_true", help="small shapes, on a CPU if there is no GPU")
    given = parser.parse_args(arguments)
    if not (torch.cuda.is_available() or given.dry_run):
        parser.error("no GPU here: give --dry-run")
    device = "cuda" if torch.cuda.is_available() and not given.dry_run else "cpu"
    bench = correctness.Bench(device, small=given.dry_run)
    given.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    begin = time.perf_counter()
    triton = importlib.import_module("triton").__version__ if importlib.util.find_spec("triton") else "none"
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()}), dry run",
        "torch": torch.__version__,
        "triton": triton,
        "python": platform.python_version(),
    }
    note = ", ".join(f"{name} {result[name]}" for name in ("device", "torch", "triton", "date"))

    def save() -> None:
        result["seconds"] = round(time.perf_counter() - begin, 1)
        (given.out / "device_check.json").write_text(json.dumps(result, indent=1))

    if "correctness" in given.only:
        run_correctness(bench, result)
        save()
    if "timing" in given.only:
        run_timing(bench, result)
        save()
        plot(result, given.out, note)
    if "studies" in given.only:
        run_studies(bench, result, given.out)
        save()
    failed = [
        f"{row['kernel']}, {row['case']}: {row['error']}" for row in result.get("correctness", []) if row["error"]
    ]
    text = "\n\n".join([note, timing_table(result), *result.get("studies", {}).values(), *failed])
    (given.out / "device_check.txt").write_text(text + "\n")
    print(f"\n{text}\n\n{result['seconds']} s; written to {given.out}")
    broken = failed or [r for r in result.get("timing", []) if r.get("error")]
    broken = broken or [text for text in result.get("studies", {}).values() if text.startswith("FAILED")]
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
