"""Formats of quantised keys and values: codes and scales, told apart by their dtypes.

Integer arithmetic alone writes and reads them, so that any device can. A token's scale is chosen when it is quantised.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fastattn.validation import hides_values

STORAGES = ("int8", "fp8", "int4")
GROUP = 32  # dims that share a scale of int4
LARGEST = {"int8": 127.0, "fp8": 448.0}  # code of a vector's largest number


def code_width(storage: str, dim: int) -> int:
    """Bytes of the codes of a vector of ``dim`` numbers."""
    return dim // 2 if storage == "int4" else dim


def code_dtype(storage: str) -> torch.dtype:
    """What a cache holds codes in. The bits of e4m3fn are kept as bytes, which every operation moves."""
    return torch.int8 if storage == "int8" else torch.uint8


def scale_dtype(storage: str) -> torch.dtype:
    """Of the scales."""
    return torch.float16 if storage == "int4" else torch.float32


def storage_of(codes: Tensor, scale: Tensor) -> str | None:
    """The format of ``codes`` and ``scale``, None where they are of none."""
    if scale.dtype == torch.float16 and codes.dtype == torch.uint8 and scale.dim() == codes.dim():
        return "int4"
    if scale.dtype == torch.float32 and scale.dim() == codes.dim() - 1:
        found = {torch.int8: "int8", torch.uint8: "fp8", torch.float8_e4m3fn: "fp8"}
        return found.get(codes.dtype)
    return None


def block_of(dim: int) -> int:
    """The largest power of two that divides ``dim``: numbers that one Hadamard transform mixes."""
    return dim & -dim


def hadamard(vectors: Tensor, block: int | None = None) -> Tensor:
    """The normalised Hadamard transform of every block of :func:`block_of` (or ``block``) numbers; its own inverse."""
    block = block_of(vectors.shape[-1]) if block is None else block
    make = _matrix if hides_values() else _cached_matrix
    matrix = make(block, vectors.dtype, vectors.device)
    return (vectors.unflatten(-1, (-1, block)) @ matrix).flatten(-2)


def _matrix(block: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    matrix = torch.ones(1, 1, dtype=dtype, device=device)
    while matrix.shape[0] < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return matrix / block**0.5


_cached_matrix = functools.lru_cache(maxsize=32)(_matrix)


def encode(vectors: Tensor, storage: str) -> tuple[Tensor, Tensor]:
    """Codes and scales of float32 (float64) ``vectors [..., D]``. A vector that is not finite gets a scale of NaN."""
    if storage == "int4":
        return _encode_int4(vectors)
    most = vectors.abs().amax(-1)
    scale = torch.where(most.isfinite(), most, float("nan")).float() / LARGEST[storage]
    quotient = vectors / torch.where(scale > 0, scale, 1.0)[..., None]
    limit = LARGEST[storage]
    if storage == "int8":
        return quotient.nan_to_num(nan=0.0).round().clamp(-limit, limit).to(torch.int8), scale
    return quotient.clamp(-limit, limit).to(torch.float8_e4m3fn).view(torch.uint8), scale


def _encode_int4(vectors: Tensor) -> tuple[Tensor, Tensor]:
    groups = hadamard(vectors).unflatten(-1, (-1, GROUP))
    # The largest number of a group becomes -8, of the 16 codes the one without a partner.
    index = groups.abs().argmax(-1, keepdim=True)
    most = groups.gather(-1, index)[..., 0]
    bad = ~groups.isfinite().all(-1).all(-1, keepdim=True)
    scale = (most / -8).clamp(-65504, 65504).masked_fill(bad, float("nan")).to(torch.float16)
    divisor = scale.to(groups.dtype)
    codes = groups / torch.where(divisor.abs() > 0, divisor, 1.0)[..., None]
    codes = (codes.nan_to_num(nan=0.0).round().clamp(-8, 7) + 8).to(torch.uint8)
    low, high = codes[..., : GROUP // 2], codes[..., GROUP // 2 :]
    return (low | (high << 4)).flatten(-2), scale


def decode(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``scale * code`` in ``dtype``; of int4 still transformed."""
    if scale.dim() == codes.dim():
        packed = codes.unflatten(-1, (-1, GROUP // 2))
        numbers = torch.cat([packed & 15, packed >> 4], -1).to(dtype) - 8
        return (numbers * scale.to(dtype)[..., None]).flatten(-2)
    if codes.dtype != torch.int8:
        return _from_e4m3(codes.view(torch.uint8), dtype) * scale.to(dtype)[..., None]
    return codes.to(dtype) * scale.to(dtype)[..., None]


def numbers(codes: Tensor, scale: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """What codes stand for, float32 or float64, or without a scale the numbers that they are."""
    if scale is None:
        return codes
    decoded = decode(codes, scale, dtype)
    return hadamard(decoded) if scale.dim() == codes.dim() else decoded


def _from_e4m3(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers whose e4m3fn bits these are, by way of float16, whose exponent is biased by 8 more: exact."""
    signed = codes.view(torch.int8).to(torch.int16) << 7  # sign extended: bit 7 is copied to bit 15 and above 14
    half = (signed & -16385).view(torch.float16)  # the copy in bit 14 is an exponent's bit
    numbers = half.to(dtype) * 256
    return numbers.masked_fill_((codes & 127) == 127, float("nan"))
