"""A pytest plugin: one line in the device check's file for each test of the operator suite, as it finishes.

In a dry run it also counts what a GPU would have to compile: the kernels that the launchers would start for every call
of the suite, specialized as the just-in-time compiler would.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.device import parts

_OUT, _PART, _KERNEL = (os.environ.get(f"FASTATTN_DEVICE_CHECK_{name}", "") for name in ("OUT", "PART", "KERNEL"))
_COUNT = os.environ.get("FASTATTN_DEVICE_CHECK_COUNT") == "1"
_kernels: set[str] = set()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    if not _COUNT or "opcheck" in item.name or "fakes" in item.name:  # these bring modes of their own
        yield
        return
    from benchmarks.device.compilations import Counting

    with Counting() as counting:
        yield
    _kernels.update(counting.kernels)


def pytest_sessionfinish() -> None:
    if _COUNT:
        parts.append(Path(_OUT), step="compilations", part=_PART, kernels=sorted(_kernels))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not (report.when == "call" or report.failed or (report.when == "setup" and report.skipped)):
        return
    error = None
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        error = " ".join((crash.message if crash else str(report.longrepr)).split())[:300]
    line = {"step": "correctness", "part": _PART, "kernel": _KERNEL, "case": report.nodeid.partition("::")[2]}
    skipped = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else None
    parts.append(Path(_OUT), **line, error=error, skipped=skipped, seconds=round(report.duration, 2))
