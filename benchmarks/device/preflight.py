"""What must be there before a check can run: one sentence that says what is missing and what to do."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re

import torch


def problem() -> str | None:
    """Why no check can run here, or None."""
    return _without_gpu() or triton_problem(_wanted_triton(), _found("triton")) or _device_problem()


def _without_gpu() -> str | None:
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        return f"no GPU here: PyTorch {torch.__version__} is built for CPUs; install a CUDA build, or give --dry-run"
    return "no GPU here: PyTorch finds no driver or device; see that nvidia-smi lists one, or give --dry-run"


def _found(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _wanted_triton() -> str | None:
    """The version of Triton that this PyTorch asks for, where its package says so."""
    for requirement in importlib.metadata.requires("torch") or []:
        match = re.match(r"(?:pytorch-)?triton\s*\(?==\s*([\w.+]+)", requirement)
        if match:
            return match[1]
    return None


def triton_problem(wanted: str | None, found: str | None) -> str | None:
    """Why the installed Triton can't be used with the installed PyTorch, or None."""
    version = f"=={wanted}" if wanted else ""
    if found is None:
        return f"the kernels need Triton, which is not installed: pip install triton{version}"
    if wanted and found.partition("+")[0] != wanted.partition("+")[0]:
        fit = f"does not fit PyTorch {torch.__version__}, which asks for {wanted}: pip install triton=={wanted}"
        return f"Triton {found} {fit}"
    return None


def _device_problem() -> str | None:
    from fastattn.ops.triton import _launch

    try:
        _launch.target_of(torch.empty(1, device="cuda"))
    except Exception as error:  # a driver that is too old, a device with too little shared memory
        return (
            f"this GPU can't run the kernels: {' '.join(str(error).split())[:300]}; take another one or give --dry-run"
        )
    return None
