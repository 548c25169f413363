"""What every launcher shares: wrapping kernels for tracing, the chip a tensor lives on, recording launches."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastattn.ops import _register

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Target:
    """What the tables of :mod:`fastattn.ops.triton.configs` need to know about a chip.

    Attributes:
        family: key into the tables: ``sm_80``, ``sm_86`` (also 89 and 120), ``sm_90``, ``sm_100`` or ``gfx942``.
        processors: streaming multiprocessors or compute units.
    """

    family: str
    processors: int


# Shared memory of one block in bytes; a family's configs fit into it.
SHARED_MEMORY = {
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "gfx942": 64 * 1024,
}
TYPICAL = {
    "sm_80": Target("sm_80", 108),
    "sm_86": Target("sm_86", 84),
    "sm_90": Target("sm_90", 132),
    "sm_100": Target("sm_100", 148),
    "gfx942": Target("gfx942", 304),
}

_OPTIONS = ("num_warps", "num_stages")
_assumed: Target | None = None
_launches: list[Launch] | None = None


@dataclass(frozen=True)
class Launch:
    """One recorded kernel launch: arguments by name, launch options, number of programs."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]
    grid: tuple[int, ...]


def kernel(jit_function: Any) -> Any:
    """The kernel to call: itself in eager mode, wrapped so that the graph shows it while a launcher is traced."""
    if _launches is not None:
        return _Recorder(jit_function, _launches)
    return torch.library.wrap_triton(jit_function) if _register.tracing() else jit_function


class _Recorder:
    """Stands in for a kernel and notes its launches instead of running them."""

    def __init__(self, jit_function: Any, launches: list[Launch]) -> None:
        self._kernel, self._launches = jit_function, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            names = self._kernel.arg_names
            options: dict[str, int] = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
            arguments = dict(zip(names, args, strict=False)) | kwargs
            self._launches.append(Launch(self._kernel, arguments, options, grid))

        return launch


@contextlib.contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """Launchers called inside (on meta tensors, say) list the kernels they would launch and run none."""
    global _launches
    previous, _launches = _launches, []
    try:
        yield _launches
    finally:
        _launches = previous


@contextlib.contextmanager
def assume_target(target: Target) -> Iterator[None]:
    """Choose configs as if every tensor were on ``target`` (for offline compilation and tests)."""
    global _assumed
    previous, _assumed = _assumed, target
    try:
        yield
    finally:
        _assumed = previous


def target_of(tensor: Tensor) -> Target:
    """The chip ``tensor`` lives on. CPU tensors, which only tests bring here, count as on sm_90."""
    if _assumed is not None:
        return _assumed
    if tensor.device.type != "cuda":
        return TYPICAL["sm_90"]
    return _device_target(tensor.device.index if tensor.device.index is not None else torch.cuda.current_device())


@functools.cache
def _device_target(index: int) -> Target:
    from triton.runtime import driver

    # what Triton itself asks: shared memory includes what a kernel must opt in to
    properties = driver.active.utils.get_device_properties(index)
    shared = int(properties["max_shared_mem"])
    family = "gfx942" if torch.version.hip else _family(torch.cuda.get_device_capability(index)[0], shared)
    if shared < SHARED_MEMORY[family]:
        raise RuntimeError(
            f"fastattn's kernels need {SHARED_MEMORY[family]} bytes of shared memory per block, "
            f"{torch.cuda.get_device_name(index)} has {shared}"
        )
    return Target(family, int(properties["multiprocessor_count"]))


def _family(major: int, shared: int) -> str:
    """The table for an NVIDIA chip: its own generation's where it fits, else the largest one that does."""
    if major == 9 and shared >= SHARED_MEMORY["sm_90"]:
        return "sm_90"
    if major == 10 and shared >= SHARED_MEMORY["sm_100"]:
        return "sm_100"
    return "sm_80" if shared >= SHARED_MEMORY["sm_80"] else "sm_86"


def check_dtype(operator: str, name: str, tensor: Tensor) -> None:
    """The kernels have no float64: matrix units round it away and the CPU operators offer it."""
    if tensor.dtype not in FLOATS:
        raise TypeError(
            f"{operator} on a GPU takes float16, bfloat16 or float32, got {name} of {tensor.dtype}"
            " (float64 works on CPU tensors)"
        )


def check_dim(operator: str, name: str, value: int, largest: int) -> None:
    """``value`` is a head dim or rank that the kernels support."""
    if not 1 <= value <= largest:
        raise ValueError(f"{operator} on a GPU supports {name} of 1 to {largest}, got {value}")


def next_power_of_two(value: int, minimum: int = 1) -> int:
    """The smallest power of two that is at least ``value`` and ``minimum``."""
    return max(minimum, 1 << max(0, value - 1).bit_length())


def split_columns(columns: int) -> tuple[int, int]:
    """Two powers of two that cover a head dim with little waste: ``(192) -> (128, 64)``, ``(100) -> (128, 0)``.

    A tile of Triton has a power of two of columns and a matrix product needs 16 of them.
    """
    first = max(16, 1 << (columns.bit_length() - 1))
    if first >= columns:
        return first, 0
    second = next_power_of_two(columns - first, 16)
    return (first, second) if second < first else (2 * first, 0)
