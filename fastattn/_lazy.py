"""Public names that are loaded on first use, so that ``import fastattn`` costs what ``import torch`` costs."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_exports(
    package: str,
    names: Mapping[str, Sequence[str]],
    submodules: Sequence[str] = (),
    extras: Mapping[str, str] | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package whose names live in modules that are not loaded yet.

    An unknown name raises an error that lists the known ones: AttributeError, or ImportError for
    ``from package import name``.

    Args:
        package: the package's ``__name__``.
        names: module -> the public names it gives the package.
        submodules: modules of the package that are public names themselves.
        extras: library -> the extra of fastattn that installs it; where it is missing, a name that needs it raises an
            ImportError that names the extra.
    """
    origin = {name: module for module, exported in names.items() for name in exported}
    known = sorted([*origin, *submodules])

    def load(name: str) -> Any:
        if name in origin:
            try:
                value = getattr(importlib.import_module(origin[name]), name)
            except ModuleNotFoundError as error:
                extra = (extras or {}).get((error.name or "").partition(".")[0])
                if extra is None:
                    raise
                raise ImportError(
                    f'{package}.{name} needs {error.name}: pip install "fastattn[{extra}]"', name=error.name
                ) from error
        elif name in submodules:
            value = importlib.import_module(f"{package}.{name}")
        else:
            message = f"module {package!r} has no attribute {name!r}: it has {', '.join(known)}"
            if _is_import_from(sys._getframe(1)) and importlib.util.find_spec(f"{package}.{name}") is None:
                raise ImportError(message, name=package)
            raise AttributeError(message)
        setattr(sys.modules[package], name, value)
        return value

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *known})

    return load, listed, known


def _is_import_from(caller: Any) -> bool:
    """``from package import name`` asks for the name; it would swallow an AttributeError's message."""
    return caller.f_code.co_name == "_handle_fromlist" and caller.f_globals.get("__name__", "").endswith("_bootstrap")
