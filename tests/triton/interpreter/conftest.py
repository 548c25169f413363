"""Kernels run through Triton's interpreter, which must be chosen before triton is imported: a process of its own."""

from __future__ import annotations

import os
from typing import Any

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETING else ["test_*.py"]


def pytest_configure(config: Any) -> None:
    # the interpreter of triton 3.6 turns one-element arrays into numbers the old way
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array:DeprecationWarning")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not INTERPRETING:
        terminalreporter.write_line(
            "tests/triton/interpreter was not run: an interpreting process cannot compile, so it is one of its own: "
            "TRITON_INTERPRET=1 python -m pytest tests/triton/interpreter"
        )
