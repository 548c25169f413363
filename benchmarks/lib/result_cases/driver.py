"""Runs every section on the fastattn of the current folder and writes a digest of each result.

:mod:`benchmarks.compare_results` starts it, once per revision, in a process of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import fastattn
from benchmarks.lib.result_cases._common import Results
from benchmarks.lib.result_cases.caches import caches
from benchmarks.lib.result_cases.low_rank import low_rank
from benchmarks.lib.result_cases.models import conversion, generation
from benchmarks.lib.result_cases.operators import operators

SECTIONS = {section.__name__: section for section in (operators, caches, low_rank, generation, conversion)}


def main(folder: Path, saved: Path, only: list[str]) -> None:
    """Run the sections ``only`` (all if empty).

    What a section saves goes to ``folder``; what it loads lies in ``saved``, where the base's process saved it.
    """
    torch.set_num_threads(1)
    results = Results()
    for name in only or SECTIONS:
        SECTIONS[name](results, folder, saved)
        print(f"{name}: {len(results.digests)} results so far", file=sys.stderr, flush=True)
    code = Path(fastattn.__file__).parent.parent
    (folder / "digests.json").write_text(json.dumps({"code": str(code), "digests": results.digests}))
