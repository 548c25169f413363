"""Registration of operators with ``torch.library``: the one place that knows how PyTorch dispatches.

An operator has one schema, one fake (shapes and strides only) and up to two implementations:

- ``cpu``: an opaque function. It may look at the data (skip rows, slice to the longest length), in eager mode
  and inside a compiled graph alike, because torch.compile never traces into it.
- ``triton``: a launcher, that is PyTorch operations around Triton kernels. In eager mode it runs as it is. Under
  torch.compile it is traced into the graph, so that Inductor sees the kernels, fuses the PyTorch operations around
  them and knows exactly which buffers they write. torch.export keeps the operator whole.

Both are named ``"module:function"`` and imported on first use: importing fastattn never imports triton. They choose the
dtypes that they compute in: they run without autocast, which would round their products.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

NAMESPACE = "fastattn"

# Operator name -> the library that holds its registrations. Kept with the namespace, which outlives this module: where
# modules are reloaded, or dropped and imported again, an operator's previous registrations are removed first.
_libraries: dict[str, torch.library.Library] = vars(getattr(torch.ops, NAMESPACE)).setdefault("_libraries", {})

# Operator name -> its launcher, for tools that ask which kernels a call would launch.
launchers: dict[str, Callable[..., Any]] = {}

_force_triton = False  # test switch: CPU tensors take the Triton branch
_tracing = False  # a launcher is being traced: kernels must be wrapped


def tracing() -> bool:
    """True while a launcher is being traced into a graph by torch.compile."""
    return _tracing


@contextlib.contextmanager
def force_triton() -> Iterator[None]:
    """Send CPU tensors to the Triton launchers (for the interpreter and for graph capture in tests)."""
    global _force_triton
    previous, _force_triton = _force_triton, True
    try:
        yield
    finally:
        _force_triton = previous


class _Lazy:
    """The function that ``"module:function"`` names, imported when it is first called.

    Attributes:
        function: the function, None before.
    """

    def __init__(self, target: str) -> None:
        self._module, _, self._name = target.partition(":")
        self.function: Callable[..., Any] | None = None

    def load(self) -> Callable[..., Any]:
        """Import the function and keep it."""
        try:
            self.function = getattr(importlib.import_module(self._module), self._name)
        except ImportError as error:
            if error.name is not None and error.name.split(".")[0] == "triton":
                raise ImportError("fastattn's GPU operators need the package triton, which is not installed") from error
            raise
        return self.function

    def __call__(self, *args: Any) -> Any:
        return (self.function or self.load())(*args)


def register(
    name: str,
    schema: str,
    *,
    cpu: str,
    triton: str,
    fake: Callable[..., Any],
) -> Any:
    """Register ``fastattn::name`` and return its overload.

    Args:
        name: operator name without namespace.
        schema: arguments and results, as in ``"(Tensor query, float scale) -> Tensor"``.
        cpu: ``"module:function"`` of the CPU implementation.
        triton: ``"module:function"`` of the launcher.
        fake: gives empty results with the real shapes, strides and dtypes.
    """
    if name in _libraries:
        _libraries.pop(name)._destroy()
    library = _libraries[name] = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    run_cpu, run_triton = _Lazy(cpu), _Lazy(triton)
    launchers[name] = run_triton

    def cpu_kernel(*args: Any) -> Any:
        lazy = run_triton if _force_triton else run_cpu
        run = lazy.function or lazy.load()  # not through its __call__: this runs on every step
        if torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                return run(*args)
        return run(*args)

    def cuda_kernel(*args: Any) -> Any:
        # Triton launches on the current device, not on the tensors'
        device = _device_of(args)
        if device.index == torch.cuda.current_device() and not torch.is_autocast_enabled("cuda"):
            return (run_triton.function or run_triton.load())(*args)
        with torch.cuda.device(device), torch.autocast("cuda", enabled=False):
            return run_triton(*args)

    library.impl(name, cpu_kernel, "CPU")
    library.impl(name, cuda_kernel, "CUDA")
    qualified = f"{NAMESPACE}::{name}"
    torch.library.register_fake(qualified, fake, lib=library)
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    _make_launcher_visible(library, qualified, overload, run_triton)
    return overload


def register_opaque(name: str, schema: str, run: Callable[..., Any]) -> Any:
    """Register ``fastattn::name``, which a compiled graph holds whole on every device, and return its overload.

    ``run`` is PyTorch that gives contiguous results; it serves as the fake as well.
    """
    if name in _libraries:
        _libraries.pop(name)._destroy()
    library = _libraries[name] = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", run, lib=library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _make_launcher_visible(
    library: torch.library.Library, qualified: str, overload: Any, launcher: Callable[..., Any]
) -> None:
    """Trace the launcher instead of the operator when torch.compile functionalizes a graph for a GPU."""
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    def decompose(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        global _tracing
        from torch.export._trace import custom_triton_ops_decomposition_disabled

        arguments = _bind(overload, args, kwargs)
        device_type = _device_of(arguments).type
        on_gpu = device_type == "cuda"
        if not (on_gpu or _force_triton) or custom_triton_ops_decomposition_disabled():
            return mode.__torch_dispatch__(op, types, args, kwargs)
        previous, _tracing = _tracing, True
        try:
            with mode, torch.autocast(device_type, enabled=False):
                return launcher(*arguments)
        finally:
            _tracing = previous

    torch.library.register_torch_dispatch(qualified, FunctionalTensorMode, decompose, lib=library)


def _device_of(arguments: Sequence[Any]) -> torch.device:
    """Where an operator's first argument lives: a tensor, or a list of tensors."""
    first = arguments[0]
    return (first if isinstance(first, torch.Tensor) else first[0]).device


def _bind(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """All arguments by position, with the schema's defaults."""
    schema = overload._schema.arguments
    return [*args, *(kwargs.get(argument.name, argument.default_value) for argument in schema[len(args) :])]


def register_backward(name: str, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
    """Give ``fastattn::name`` a gradient."""
    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup_context, lib=_libraries[name])
