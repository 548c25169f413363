"""Everything that only a GPU can tell, in one command: ``python -m benchmarks.device_check --out DIR``.

1. correctness: the operator suite on the GPU (``pytest tests/ops --device cuda``), then what needs a GPU by its nature:
   more than 2^31 elements and 2^17 tokens, replayed and compiled CUDA graphs;
2. timing, of what passed: each kernel against the best PyTorch equivalents and against the device's measured bandwidth
   and matrix rate, with a cold cache, short kernels by replaying a CUDA graph;
3. the studies of speedup against context and of key-query throughput at the device's size.

Each file of the suite, operator and study is a process of its own with a time limit: an illegal access, a hang or an
exit ends that part only. Every check appends a line to ``device_check.jsonl`` as it finishes; JSON, table and plot are
made from the lines at the end, or with ``--report DIR`` from an interrupted run's. ``--only STEP`` and ``--minutes N``
cut the run. ``--dry-run`` goes the whole way on a CPU with small shapes (its times mean nothing), injects faults and
counts what a GPU would compile. Runs from a checkout, without installing.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import platform
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

from benchmarks.device import parts, preflight, report
from benchmarks.device.parts import Part

ROOT = Path(__file__).resolve().parents[1]
STEPS = ("correctness", "timing", "studies")
STUDIES = ("qk_throughput", "speedup_vs_context")
NATURE = ("huge", "long", "replay", "compiled")
# What each file of the suite checks. A file that is not here belongs to no single operator.
KERNELS = {
    "attention": "attention",
    "cache": "cache",
    "decode": "decode_attention",
    "latent": "latent_decode",
    "merge": "merge_attention",
    "moments": "query_moments",
    "qk": "qk_scores",
    "scores": "scores",
}
OPERATORS = ("decode_attention", "latent_decode", "attention", "qk_scores", "scores", "query_moments", "cache")
FAULTS = {
    "raises": "ValueError: an injected fault",
    "exits": "SystemExit: 3",
    "quits": "ended with exit code 3",
    "killed": "ended by signal 9 (SIGKILL)",
    "hangs": "took more than 3 s",
}


def suite_files() -> list[Path]:
    """The operator suite, one file per operator."""
    return sorted((ROOT / "tests" / "ops").glob("test_*.py"))


def suite_parts(out: Path, device: str, small: bool) -> list[Part]:
    """A process per file of the operator suite."""
    found = []
    for file in suite_files():
        name = file.stem.removeprefix("test_")
        kernel = KERNELS.get(name, "")
        settings = {"OUT": str(out), "PART": name, "KERNEL": kernel}
        variables = [f"FASTATTN_DEVICE_CHECK_{key}={value}" for key, value in settings.items()]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
        command += ["-p", "benchmarks.device.pytest_lines", "--device", device, str(file)]
        if small:
            counted = int(importlib.util.find_spec("triton") is not None)
            variables += ["FASTATTN_EXAMPLES=2", f"FASTATTN_DEVICE_CHECK_COUNT={counted}"]
            command += ["-m", "not compile", "-k", "not refused and not bad_input"]
        found.append(Part("correctness", name, ("env", *variables, *command), 300 if small else 240, kernel))
    return found


def worker_part(step: str, kind: str, name: str, timeout: float, where: tuple[str, ...], kernel: str = "") -> Part:
    """A process of :mod:`benchmarks.device.worker`."""
    command = (sys.executable, "-m", "benchmarks.device.worker", kind, name, *where)
    return Part(step, name, command, timeout, kernel)


def run_steps(given: argparse.Namespace, device: str) -> None:
    """Correctness in several processes at a time, then timing and studies one after the other."""
    out, small = given.out, given.dry_run
    deadline = time.monotonic() + 60 * given.minutes
    where = ("--out", str(out), "--device", device, *(["--small"] if small else []))
    cores = max(1, min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))
    if small:
        faults = [worker_part("faults", "fault", name, 3 if name == "hangs" else 60, where) for name in FAULTS]
        parts.run(faults, out, len(faults), small=True)
    if "correctness" in given.only:
        checks = suite_parts(out, device, small)
        checks += [worker_part("correctness", "check", name, 180, where) for name in NATURE]
        parts.run(checks, out, cores, deadline, small)
        if not small and shutil.which("compute-sanitizer"):
            run_again_sanitized(checks, out, deadline)
    if "timing" in given.only:
        wrong = {line.get("kernel") for line in parts.read(out) if line["step"] == "correctness" and line.get("error")}
        timed = [worker_part("timing", "ceilings", "ceilings", 60, where)]
        for name in OPERATORS:
            if name in wrong:
                line = {"step": "timing", "part": name, "kernel": name, "case": "", "seconds": 0.0}
                parts.append(out, **line, error="not timed: its results are wrong", ended=True)
                continue
            timed.append(worker_part("timing", "timing", name, 120, where, name))
        parts.run(timed, out, 1, deadline, small)
    if "studies" in given.only:
        studies = [worker_part("studies", "study", name, 300, where) for name in STUDIES]
        parts.run(studies, out, 1, deadline, small)


def run_again_sanitized(checks: list[Part], out: Path, deadline: float) -> None:
    """Once more what failed, under compute-sanitizer, whose report names the kernel and the address."""
    wrong = {line["part"] for line in parts.read(out) if line["step"] == "correctness" and line.get("error")}
    again = []
    for part in checks:
        if part.name in wrong:
            command = part.command
            at = command.index(sys.executable)
            tool = ("compute-sanitizer", "--error-exitcode", "9")
            again.append(
                Part("correctness", f"{part.name} (sanitized)", (*command[:at], *tool, *command[at:]), 240, part.kernel)
            )
    parts.run(again, out, 1, deadline)


def unexpected_faults(result: dict[str, dict[str, str]]) -> list[str]:
    """Injected faults that were not reported as what they are."""
    faults = result["faults"]
    return [name for name, says in FAULTS.items() if says not in faults.get(name, "")]


def conditions(device: str) -> dict[str, str]:
    triton = importlib.import_module("triton").__version__ if importlib.util.find_spec("triton") else "none"
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()}), dry run",
        "torch": torch.__version__,
        "triton": triton,
        "python": platform.python_version(),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="folder for the results, at most 8 files")
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end then, with what is done")
    parser.add_argument("--dry-run", action="store_true", help="small shapes, on the CPU")
    parser.add_argument("--report", type=Path, metavar="DIR", help="only make JSON, table and plot of DIR's lines")
    given = parser.parse_args(arguments)
    if given.report is not None:
        if not (given.report / parts.LINES).exists():
            parser.error(f"--report: {given.report} holds no {parts.LINES}")
        return int(bool(report.failures(report.write(given.report))))
    if given.out is None:
        parser.error("give --out DIR, or --report DIR")
    if not given.minutes > 0:
        parser.error(f"--minutes must be above 0, got {given.minutes:g}")
    missing = None if given.dry_run else preflight.problem()
    if missing:
        parser.error(missing)
    device = "cpu" if given.dry_run else "cuda"
    given.out = given.out.resolve()
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / parts.LINES).unlink(missing_ok=True)
    parts.append(given.out, step="conditions", part="", **conditions(device))
    begin = time.monotonic()
    try:
        run_steps(given, device)
    finally:
        result = report.write(given.out)
        print(f"{time.monotonic() - begin:.0f} s")
    silent = unexpected_faults(result) if given.dry_run else []
    if silent:
        print(f"FAILED  injected faults that were not reported: {', '.join(silent)}")
    return int(bool(report.failures(result) or silent))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the parts and writes the report on the way out
    raise SystemExit(main())
