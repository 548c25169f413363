"""Builds fastattn's CPU kernels ahead of their first use, for images and continuous integration.

    python -m fastattn.native

Prints what was built and from what. Exits with 1, and says why, where they cannot be built.
"""

from __future__ import annotations

import sys
import time

import torch

from fastattn.ops.cpu.native import _build, mode, operators


def main() -> int:
    if mode() == "0":
        print("FASTATTN_NATIVE=0: nothing is built", file=sys.stderr)
        return 1
    start = time.perf_counter()
    if operators() is None:  # the message has been logged
        return 1
    seconds = time.perf_counter() - start
    print(f"{_build.library()} ({seconds:.1f} s)")
    print(f"torch {torch.__version__}, vector types {torch.backends.cpu.get_cpu_capability()}")
    print(f"operators: {', '.join(_build.OPERATORS)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
