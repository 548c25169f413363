"""Quantised keys and values: 8 or 4 bits per number, with scales."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn import validation as check
from fastattn.ops import _formats


def quantize(vectors: Tensor, storage: str) -> tuple[Tensor, Tensor]:
    r"""Codes and scales of vectors, each quantised by itself.

    - ``"int8"``: :math:`s = \max|x| / 127`, codes :math:`x / s` rounded half to even, within 127.
    - ``"fp8"``: :math:`s = \max|x| / 448`, codes in e4m3fn (arXiv 2209.05433), saturating, kept as bytes.
    - ``"int4"``: the vector goes through a normalised Hadamard transform, in blocks of the largest power of two that
      divides ``D``, which spreads outliers (arXiv 2404.00456). Each group of 32 numbers then has a scale :math:`m / -8`
      in float16, with :math:`m` its number of largest magnitude, and codes :math:`x / s` rounded, from -8 to 7. A byte
      holds two codes, each plus 8: number ``j`` of a group in its low half and number ``j + 16`` in its high half.

    A vector of zeros has scale 0; one that holds NaN or inf has scale NaN, so that nothing computed from it is finite.

    Args:
        vectors: ``[..., D]``, float16, bfloat16, float32 or float64.
        storage: one of the above.

    Returns:
        ``codes`` int8 or uint8 ``[..., D]`` with ``scale`` float32 ``[...]``; for ``"int4"`` uint8 ``[..., D / 2]``
        with float16 ``[..., D / 32]``.

    Raises:
        TypeError, ValueError: an argument of another type, an unknown storage, or a ``D`` that it cannot take.
    """
    if not isinstance(vectors, Tensor):
        raise TypeError(f"vectors must be a tensor [... D], got {type(vectors).__name__}")
    if vectors.dim() == 0:
        raise ValueError("vectors must have shape [... D], got []")
    check.check_same_kind("vectors", vectors)
    check_storage(storage)
    check_dim("vectors", vectors.shape[-1], storage)
    check.refuse_forward_mode("quantize", vectors)
    wide = vectors if vectors.dtype == torch.float64 else vectors.float()
    return _formats.encode(wide.detach(), storage)


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The vectors that :func:`quantize`'s codes and scales stand for, the Hadamard transform undone.

    Args:
        codes: ``[..., D]`` int8, uint8 or float8_e4m3fn, or ``[..., D / 2]`` uint8.
        scale: float32 ``[...]``, or float16 ``[..., D / 32]`` for int4.
        dtype: of the result, a float dtype; computed in float32 (float64) before it is rounded.

    Raises:
        TypeError, ValueError: not that.
    """
    check_codes("codes", codes, "scale", scale)
    if dtype not in check.FLOATS:
        raise TypeError(f"dtype must be float16, bfloat16, float32 or float64, got {dtype}")
    return _formats.numbers(codes, scale, torch.float64 if dtype == torch.float64 else torch.float32).to(dtype)


def check_storage(storage: object) -> None:
    """``storage`` is the name of a format."""
    if not isinstance(storage, str):
        raise TypeError(f"storage must be one of {list(_formats.STORAGES)}, got {type(storage).__name__}")
    if storage not in _formats.STORAGES:
        raise ValueError(f"storage must be one of {list(_formats.STORAGES)}, got {storage!r}")


def check_dim(name: str, dim: int, storage: str) -> None:
    """Vectors of ``dim`` numbers can be stored so."""
    if storage == "int4" and (dim == 0 or dim % _formats.GROUP):
        raise ValueError(
            f"{name} must have a head dim that is a multiple of {_formats.GROUP} for storage 'int4', whose groups have "
            f"as many numbers, got {dim}: 'int8' and 'fp8' take any"
        )


def check_codes(name: str, codes: Tensor, scale_name: str, scale: object) -> str:
    """The format of codes and scales that fit each other."""
    if not isinstance(codes, Tensor):
        raise TypeError(f"{name} must be a tensor of codes, got {type(codes).__name__}")
    if not isinstance(scale, Tensor):
        raise TypeError(f"{scale_name} must be a tensor of scales, got {type(scale).__name__}")
    storage = _formats.storage_of(codes, scale)
    if storage is None:
        raise TypeError(
            f"{name} and {scale_name} must be int8, uint8 or float8_e4m3fn codes [... D] with float32 scales [...], or "
            f"uint8 codes [... D/2] with float16 scales [... D/32], got {codes.dtype} {list(codes.shape)} and "
            f"{scale.dtype} {list(scale.shape)}"
        )
    shape = list(codes.shape[:-1])
    if storage == "int4":
        shape.append(2 * codes.shape[-1] // _formats.GROUP)
        if codes.shape[-1] % (_formats.GROUP // 2):
            raise ValueError(f"{name} must hold whole groups of {_formats.GROUP} codes, got {list(codes.shape)}")
    if list(scale.shape) != shape:
        raise ValueError(
            f"{scale_name} must have shape {shape} for {name} {list(codes.shape)}, got {list(scale.shape)}"
        )
    check.check_device(scale_name, scale, name, codes)
    return storage


def code_columns(codes: Tensor, storage: str) -> int:
    """Numbers of a vector whose codes these are."""
    return 2 * codes.shape[-1] if storage == "int4" else codes.shape[-1]
