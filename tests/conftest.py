"""Settings that every test shares."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

# No wall-clock limits: machines differ and are shared. CI draws the same examples every time, a developer new ones.
settings.register_profile("fastattn", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("ci", parent=settings.get_profile("fastattn"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "fastattn")

_INTERPRETER = Path(__file__).parent / "triton" / "interpreter"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Triton reads TRITON_INTERPRET when it is imported: those tests run in a process of their own (see Makefile)."""
    return True if collection_path == _INTERPRETER and os.environ.get("TRITON_INTERPRET") != "1" else None


def pytest_report_header() -> str | None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return "tests/triton/interpreter: not collected, run them with TRITON_INTERPRET=1 (make test-interpreter)"
