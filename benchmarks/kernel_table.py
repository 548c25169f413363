"""Every kernel compiled for every chip without a GPU, and what it takes from the chip.

    python -m benchmarks.kernel_table                 # compile all, print the table, exit 1 on a breach
    python -m benchmarks.kernel_table --changed       # compile only what changed since the committed table
    python -m benchmarks.kernel_table --write         # and commit the result to benchmarks/results/kernel_table.csv
    python -m benchmarks.kernel_table --only decode --target sm_90

Limits: shared memory within a block's share of the chip; no spilled registers or local-memory traffic in inference
kernels' loops, a committed budget in gradient kernels (``SPILL_BUDGETS``); the chip's matrix instructions for every
16-bit product, warp-group ones (wgmma) on sm_90 and tcgen05 on sm_100 from 64 rows on; 16-byte loads.

The numbers belong to one version of triton. Under another, the newest say, the table is printed and breaches are
reported, not gated; CONTRIBUTING.md says how.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import triton

from benchmarks.lib import offline
from fastattn.ops.triton._launch import SHARED_MEMORY

PINNED = "3.6."
TABLE = Path(__file__).parent / "results" / "kernel_table.csv"
COLUMNS = ("source", "case", "kernel", "config", "target", "registers", "spills", "local", "shared", "matrix",
           "wide_loads", "occupancy")  # fmt: skip
# Bytes per thread that gradient kernels may spill, by (case, kernel, target).
SPILL_BUDGETS: dict[tuple[str, str, str], int] = {
    # several queries of many heads: once per program, where the result is written, and not in the loop over the keys
    ("latent_decode 512+64 rows 128 x 2", "latent_kernel", "sm_90"): 72,
    ("latent_decode 512+64 rows 256 window, cap", "latent_kernel", "sm_90"): 72,
    ("latent_decode 256+64 rows 128 x 2", "latent_kernel", "sm_90"): 48,
    ("attention_backward 96/96", "grad_key_value_kernel", "sm_86"): 48,
    ("attention_backward 96/96 window, cap, slopes", "grad_query_kernel", "sm_100"): 8,
    ("attention_backward 256/256 window, cap, slopes", "grad_key_value_kernel", "sm_90"): 48,
    # float32 has no matrix unit: operands of a product sit in registers, whole rows per thread
    ("attention_backward 128/128 float32", "grad_query_kernel", "sm_86"): 16,
    ("attention_backward 128/128 float32", "grad_query_kernel", "sm_90"): 24,
    ("attention_backward 128/128 float32", "grad_query_kernel", "sm_100"): 24,
    ("attention_backward 256/256 float32", "grad_query_kernel", "sm_80"): 216,
    ("attention_backward 256/256 float32", "grad_query_kernel", "sm_86"): 208,
    ("attention_backward 256/256 float32", "grad_query_kernel", "sm_90"): 216,
    ("attention_backward 256/256 float32", "grad_query_kernel", "sm_100"): 216,
}


@dataclass(frozen=True)
class Row:
    """One line of the table, and what it breaches."""

    values: dict[str, str]
    breaches: tuple[str, ...] = ()


def unique_jobs(only: str = "", target: str = "") -> list[offline.Job]:
    """The jobs of all cases that give different machine code, under the name of the first."""
    jobs: dict[tuple[object, ...], offline.Job] = {}
    for case in offline.all_cases():
        for job in offline.jobs_of(case):
            wanted = (only in job.case or only in job.kernel) and target in ("", job.family)
            key = (job.module, job.kernel, job.family, job.signature, job.constexprs, job.aligned, job.options)
            if wanted and key not in jobs:
                jobs[key] = job
    return list(jobs.values())


def row_of(job: offline.Job) -> Row:
    """Compile ``job`` and hold it to the limits."""
    found = offline.compile_job(job)
    values = {
        "source": offline.source_of(job),
        "case": job.case,
        "kernel": job.kernel,
        "config": job.config,
        "target": job.family,
        "registers": str(found.registers),
        "spills": str(found.spills),
        "local": str(found.local),
        "shared": str(found.shared),
        "matrix": " ".join(f"{name}:{count}" for name, count in found.matrix.items()) or "-",
        "wide_loads": str(found.wide_loads),
        "occupancy": str(found.occupancy),
    }
    return Row(values, tuple(breaches(job, found)))


def breaches(job: offline.Job, found: offline.Resources) -> Iterable[str]:
    """The limits that a compiled kernel breaks."""
    if found.error:
        yield f"does not compile: {found.error}"
        return
    if found.shared > SHARED_MEMORY[job.family]:
        yield f"{found.shared} bytes of shared memory, {SHARED_MEMORY[job.family]} at most"
    if found.occupancy < 1:
        yield "does not fit on a processor"
    budget = SPILL_BUDGETS.get((job.case, job.kernel, job.family), 0)
    if found.spills > budget or (budget == 0 and found.local > 0):
        yield f"spills {found.spills} bytes ({found.local} local accesses), {budget} allowed"
    half = any(kind in ("*bf16", "*fp16") for name, kind in job.signature if not name.endswith("_scale"))
    if found.dots and half:
        rows = dict(job.constexprs).get("BLOCK_M", 0)
        unit = {"sm_90": "HGMMA", "sm_100": "UTCHMMA"}.get(job.family) if rows >= 64 else None
        if unit is not None and unit not in found.matrix:
            yield f"{rows} rows without {unit}"
        elif not found.matrix:
            yield "a 16-bit product without matrix instructions"
    if found.wide_loads == 0 and not job.narrow:
        yield "no 16-byte load"


def committed() -> dict[str, dict[str, str]]:
    """The committed table by the rows' source, empty where there is none."""
    if not TABLE.exists():
        return {}
    with TABLE.open(newline="") as file:
        return {row["source"]: row for row in csv.DictReader(file)}


def resources_of(row: dict[str, str]) -> offline.Resources:
    """A committed row read back."""
    matrix = dict(item.split(":") for item in row["matrix"].split() if item != "-")
    numbers = {name: int(row[name]) for name in ("registers", "spills", "local", "shared", "wide_loads", "occupancy")}
    return offline.Resources(matrix={name: int(count) for name, count in matrix.items()}, dots=bool(matrix), **numbers)


def _known_row(job: offline.Job, row: dict[str, str]) -> Row:
    return Row(row | {"case": job.case}, tuple(breaches(job, resources_of(row))))


def compile_rows(jobs: list[offline.Job], processes: int) -> list[Row]:
    """Rows in the order of ``jobs``, compiled in ``processes`` processes."""
    if processes <= 1 or len(jobs) < 2:
        return [row_of(job) for job in jobs]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return list(pool.map(row_of, jobs, chunksize=4))


def write(rows: list[dict[str, str]]) -> None:
    TABLE.parent.mkdir(exist_ok=True)
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases or kernels whose name holds this")
    parser.add_argument("--target", default="", choices=("", *SHARED_MEMORY), help="one chip family")
    parser.add_argument("--changed", action="store_true", help="take unchanged rows from the committed table")
    parser.add_argument("--write", action="store_true", help="replace the committed table")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    options = parser.parse_args(arguments)
    if options.write and (options.only or options.target):
        parser.error("--write replaces the whole table: leave out --only and --target")
    gated = triton.__version__.startswith(PINNED)

    jobs = unique_jobs(options.only, options.target)
    known = committed() if options.changed and gated else {}
    fresh = [job for job in jobs if offline.source_of(job) not in known]
    compiled = dict(zip(fresh, compile_rows(fresh, options.processes), strict=True))
    rows = [compiled[job] if job in compiled else _known_row(job, known[offline.source_of(job)]) for job in jobs]

    print(f"triton {triton.__version__}, {len(rows)} kernels, {len(fresh)} compiled now")
    print("  ".join(COLUMNS[1:]))
    for row in rows:
        print("  ".join(row.values[name] for name in COLUMNS[1:]))
    broken = [row for row in rows if row.breaches]
    for row in broken:
        where = " ".join(row.values[name] for name in ("case", "kernel", "config", "target"))
        print(f"BREACH {where}: {'; '.join(row.breaches)}")
    if not gated:
        print(f"Not gated: the limits and the committed table hold for triton {PINNED}x")
        return 0
    if options.write:
        write([row.values for row in rows])
    print(f"{len(broken)} breaches")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
