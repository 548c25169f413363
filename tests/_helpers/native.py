"""Choosing between the native kernels and PyTorch's operators in a test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest

from fastattn.ops.cpu import native


@contextlib.contextmanager
def without_native() -> Iterator[None]:
    """PyTorch's operators, as where nothing can be compiled."""
    with mock.patch.multiple(native, _decided=True, _operators=None):
        yield


def needs_native() -> None:
    """Skip, and say so, where FASTATTN_NATIVE=0 asks for the other branch."""
    if native.mode() == "0":
        pytest.skip("FASTATTN_NATIVE=0: the native kernels are not to be used")
    assert native.operators() is not None, "the native kernels cannot be built: see the message logged"
