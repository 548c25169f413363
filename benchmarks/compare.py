"""Is this revision slower than another? ``make bench-compare BASE=rev`` (or ``python -m benchmarks.compare rev``).

Both revisions are checked out beside each other (the working tree as it is, uncommitted changes included, is this
one), each in a process of its own, and time the cases of :mod:`benchmarks.lib.cases` in turns. A case fails where it is
slower by more than 1.3x with 95% confidence: where the lower end of the confidence interval of the median of its
rounds' ratios (from the rounds' order, without assuming a distribution) lies above 1.3. Such a case is timed twice
more, each time in new processes, and only counts if it always fails: where a process's memory happens to lie can make
one and the same code twice as slow for as long as the process lives.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
CASES_FILE = ROOT / "benchmarks" / "lib" / "cases.py"
LIMIT, CONFIDENCE = 1.3, 0.95
ROUND_SECONDS = 0.02
TRIES = 3  # pairs of processes that must all find a case slower


class Revision:
    """A process that times one revision's code on request."""

    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(folder), "FASTATTN_BENCH_CASES": str(CASES_FILE)}
        environment["OMP_WAIT_POLICY"] = "passive"  # else threads of the one spin into the time of the other
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "benchmarks" / "compare.py"), "--worker"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **what: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a revision's process stopped with exit status {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def worker() -> None:
    """Times cases as asked on standard input. Imports fastattn from PYTHONPATH, the cases from this checkout."""
    import importlib.util

    import torch

    answers, sys.stdout = sys.stdout, sys.stderr
    path = Path(os.environ["FASTATTN_BENCH_CASES"])
    spec = importlib.util.spec_from_file_location("fastattn_bench_cases", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    case, loops = None, 1
    with torch.no_grad():
        for line in sys.stdin:
            what = json.loads(line)
            answer: dict[str, Any] = {}
            try:
                if "case" in what:
                    case = module.CASES[what["case"]]()
                    case.check()
                    case.call()
                    start = time.perf_counter()
                    case.call()
                    loops = max(1, round(ROUND_SECONDS / (time.perf_counter() - start)))
                    answer["loops"] = loops
                else:
                    loops = what["loops"]
                    start = time.perf_counter()
                    for _ in range(loops):
                        case.call()
                    answer["seconds"] = (time.perf_counter() - start) / loops
            except Exception as error:  # an older revision may lack what a case needs
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)


def median_interval(values: list[float], confidence: float = CONFIDENCE) -> tuple[float, float, float]:
    """Median and its confidence interval from order statistics (binomial)."""
    ordered, n = sorted(values), len(values)
    below, tail = 0, 0.0
    while True:  # largest k with P(fewer than k of n below the median) <= (1 - confidence) / 2
        tail += math.comb(n, below) / 2.0**n
        if tail > (1 - confidence) / 2:
            break
        below += 1
    if below == 0:
        raise ValueError(f"values must hold enough rounds for {confidence:.0%} confidence, got {n}")
    return statistics.median(ordered), ordered[below - 1], ordered[n - below]


def compare(here: Revision, base: Revision, name: str, rounds: int) -> tuple[float, float, float] | str:
    """How many times as long this revision takes: median and confidence interval, or why that is unknown."""
    prepared = [revision.ask(case=name) for revision in (here, base)]
    for answer, which in zip(prepared, ("this revision", "the base"), strict=True):
        if "error" in answer:
            if which == "this revision":
                raise SystemExit(f"{name} fails: {answer['error']}")
            return f"not in {which} ({answer['error']})"
    loops = max(1, min(answer["loops"] for answer in prepared))
    ratios = []
    for index in range(rounds):
        pair = [here, base] if index % 2 == 0 else [base, here]
        seconds = {revision: revision.ask(loops=loops)["seconds"] for revision in pair}
        ratios.append(seconds[here] / seconds[base])
    return median_interval(ratios)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("base", nargs="?", default="HEAD", help="the revision to compare with")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--only", nargs="+", help="names of cases, or beginnings of names")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker()
        return 0
    sys.path.insert(0, str(ROOT))
    from benchmarks.lib.cases import CASES

    names = [name for name in CASES if not given.only or any(name.startswith(start) for start in given.only)]
    if not names:
        raise SystemExit(f"--only must name cases among {', '.join(CASES)}")
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "base"
        git = ["git", "-C", str(ROOT)]
        subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(tree), given.base], check=True)
        try:
            slower = _run(tree, names, given.rounds)
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(tree)], check=False)
    if slower:
        print(f"\nslower than {given.base} by more than {LIMIT}x with {CONFIDENCE:.0%} confidence: {', '.join(slower)}")
        return 1
    print(f"\nno case is slower than {given.base} by more than {LIMIT}x with {CONFIDENCE:.0%} confidence")
    return 0


def _run(tree: Path, names: list[str], rounds: int) -> list[str]:
    slower = []
    print(f"{'case':38}{'time / base':>12}   {CONFIDENCE:.0%} interval of the median")
    with _pair(tree) as pair:
        for name in tqdm(names, desc="cases", disable=None):
            found = compare(*pair, name, rounds)
            failed = is_slower(found)
            for _ in range(TRIES - 1):
                if failed:
                    with _pair(tree) as fresh:
                        found = compare(*fresh, name, rounds)
                    failed = is_slower(found)
            if failed:
                slower.append(name)
            text = found if isinstance(found, str) else f"{found[0]:12.2f}   {found[1]:.2f} to {found[2]:.2f}"
            print(f"{name:38}{text}{'   SLOWER' if failed else ''}", flush=True)
    return slower


def is_slower(found: tuple[float, float, float] | str) -> bool:
    return not isinstance(found, str) and found[1] > LIMIT


@contextlib.contextmanager
def _pair(tree: Path) -> Iterator[tuple[Revision, Revision]]:
    """Processes of this revision and of the base."""
    pair = Revision(ROOT), Revision(tree)
    try:
        yield pair
    finally:
        for revision in pair:
            revision.close()


if __name__ == "__main__":
    sys.exit(main())
