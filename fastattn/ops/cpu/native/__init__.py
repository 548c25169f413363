"""Kernels in C++ for the CPU, compiled on first use: the private operators that the functions in ``ops/cpu`` prefer.

``FASTATTN_NATIVE`` decides: ``1`` (default) uses them where they can be built and PyTorch's operators elsewhere, ``0``
never uses them, ``require`` raises where they cannot be built. It is read when an operator first runs.
"""

from __future__ import annotations

import logging
import os
import threading
from types import SimpleNamespace
from typing import Any

import torch

from fastattn.ops.cpu.native import _build

NAMESPACE = "fastattn_native"

_log = logging.getLogger("fastattn")
_lock = threading.Lock()
_decided = False
_operators: Any = None


def operators() -> Any:
    """The native operators as attributes, or None where PyTorch's are to be used.

    The first call may compile, which takes about half a minute once per machine and PyTorch.

    Raises:
        ValueError: ``FASTATTN_NATIVE`` is none of ``0``, ``1`` and ``require``.
        RuntimeError: it is ``require``, and they cannot be built or loaded.
    """
    return _operators if _decided else _decide()


def mode() -> str:
    """What ``FASTATTN_NATIVE`` says."""
    chosen = os.environ.get("FASTATTN_NATIVE", "1")
    if chosen not in ("0", "1", "require"):
        raise ValueError(f"the environment variable FASTATTN_NATIVE must be 0, 1 or require, got {chosen!r}")
    return chosen


def _decide() -> Any:
    global _decided, _operators
    with _lock:
        if _decided:
            return _operators
        chosen, found = mode(), None
        if chosen != "0":
            try:
                found = _load()
            except _build.BuildError as error:
                if chosen == "require":
                    raise RuntimeError(f"FASTATTN_NATIVE=require, but {error}") from error
                _log.warning(
                    "fastattn's CPU kernels are not used, PyTorch's operators are, which is slower: %s. Once that is"
                    " mended, `python -m fastattn.native` builds them; FASTATTN_NATIVE=0 silences this message.",
                    error,
                )
        _operators, _decided = found, True
        return found


def _load() -> Any:
    """Build where needed, load, and make sure that what was loaded is what this code was written for."""
    space = getattr(torch.ops, NAMESPACE)
    expected = _build.key()
    if not torch._C._dispatch_has_kernel(f"{NAMESPACE}::build"):  # modules may be dropped and imported again
        path = _build.library()
        try:
            torch.ops.load_library(str(path))
        except OSError as error:
            raise _build.BuildError(f"{path} cannot be loaded ({error.__cause__ or error}); delete it") from error
    if space.build() != expected:
        raise _build.BuildError("this process has loaded kernels built from other sources; start it anew")
    packets = {name: getattr(space, name) for name in _build.OPERATORS}
    return SimpleNamespace(**{name: packet.default for name, packet in packets.items()})
