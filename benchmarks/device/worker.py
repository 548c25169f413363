"""One part of the device check: ``python -m benchmarks.device.worker KIND NAME --out DIR --device D [--small]``."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.device import parts


def attempt(
    out: Path, step: str, part: str, kernel: str, case: str, check: Callable[[], dict[str, Any] | None]
) -> bool:
    """Run ``check`` and append its line: what it returns, or what it raised. True where it raised nothing."""
    begin, error, more = time.perf_counter(), None, None
    try:
        more = check()
    except (Exception, SystemExit) as problem:
        where = traceback.extract_tb(problem.__traceback__)[-1]
        error = f"{type(problem).__name__}: {str(problem)[:300]} ({Path(where.filename).name}:{where.lineno})"
        print(error, flush=True)
    line = {"step": step, "part": part, "kernel": kernel, "case": case}
    parts.append(out, **line, error=error, seconds=round(time.perf_counter() - begin, 2), **(more or {}))
    return error is None


def check(name: str, out: Path, device: str, small: bool) -> bool:
    import torch

    from benchmarks.device.bench import Bench
    from benchmarks.device.correctness import CHECKS

    kernel, case, function = CHECKS[name]

    def run() -> None:
        with torch.device(device):  # the definitions' own helper tensors
            function(Bench(device, small))

    return attempt(out, "correctness", name, kernel, case, run)


def ceilings(out: Path, device: str, small: bool) -> bool:
    from benchmarks.device import timing
    from benchmarks.device.bench import Bench

    def measure() -> dict[str, Any]:
        bench = Bench(device, small)
        bandwidth, rate = timing.ceilings(bench, timing.Clock(bench))
        return {"bandwidth": bandwidth, "rate": rate}

    return attempt(out, "timing", "ceilings", "", "ceilings", measure)


def time_operator(name: str, out: Path, device: str, small: bool) -> bool:
    import torch

    from benchmarks.device import timing
    from benchmarks.device.bench import Bench

    bench = Bench(device, small)
    clock = timing.Clock(bench)
    known = [line for line in parts.read(out) if line["part"] == "ceilings" and "rate" in line]
    bandwidth, rate = (known[-1]["bandwidth"], known[-1]["rate"]) if known else timing.ceilings(bench, clock)
    good = True
    for index, make in enumerate(timing.entries(bench)[name]):

        def measure(make: Callable[[], timing.Entry] = make) -> dict[str, Any]:
            entry = make()
            with torch.set_grad_enabled(entry.kernel == "attention_backward"):
                measured = asdict(timing.measure(entry, clock, bandwidth, rate))
            found = {"timed": measured}
            del entry
            if bench.cuda:
                torch.cuda.empty_cache()
            return found

        good &= attempt(out, "timing", name, name, f"shape {index}", measure)
    return good


def study(name: str, out: Path, device: str, small: bool) -> bool:
    def run() -> dict[str, Any]:
        module = importlib.import_module(f"benchmarks.studies.{name}")
        if small:
            module.dry_run(out)
        else:
            module.main(["--out", str(out), "--device", device, "--fresh"])
        text = (out / f"{name}.txt").read_text()
        (out / f"{name}.txt").unlink()  # it is in the table and in the JSON
        return {"text": text}

    return attempt(out, "studies", name, "", name, run)


def fault(name: str, out: Path) -> bool:
    """What may happen to a part: a dry run shows that everything else is reported."""

    def misbehave() -> None:
        if name == "raises":
            raise ValueError("an injected fault")
        if name == "exits":
            raise SystemExit(3)
        if name == "quits":
            os._exit(3)  # as a library does that ends its process
        if name == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        while name == "hangs":
            time.sleep(1)

    return attempt(out, "faults", name, "", name, misbehave)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kind", choices=("check", "ceilings", "timing", "study", "fault"))
    parser.add_argument("name")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args(arguments)
    where = (given.out, given.device, given.small)
    if given.kind == "fault":
        return int(not fault(given.name, given.out))
    if given.kind == "ceilings":
        return int(not ceilings(*where))
    run = {"check": check, "timing": time_operator, "study": study}[given.kind]
    return int(not run(given.name, *where))


if __name__ == "__main__":
    sys.exit(main())
