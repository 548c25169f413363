"""The definition of quantised storage, for :mod:`fastattn.ops.reference`."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def quantize(vectors: Tensor, storage: str) -> tuple[Tensor, Tensor]:
    """See :func:`fastattn.ops.quantize`."""
    rows = (vectors if vectors.dtype == torch.float64 else vectors.float()).reshape(-1, vectors.shape[-1])
    codes, scales = [], []
    for row in rows:
        if storage != "int4":
            largest = {"int8": 127.0, "fp8": 448.0}[storage]
            most = row.abs().max()
            scale = (most if most.isfinite() else most * float("nan")).float() / largest
            number = (row / scale if scale > 0 else row).clamp(-largest, largest)
            as_int = number.nan_to_num(nan=0.0).round().to(torch.int8)
            codes.append(as_int if storage == "int8" else number.to(torch.float8_e4m3fn).view(torch.uint8))
            scales.append(scale)
            continue
        pairs, of_groups = [], []
        for group in _transform(row).split(32):
            most = group[group.abs().argmax()]
            scale = (
                (most / -8).to(torch.float16) if bool(row.isfinite().all()) else most.new_tensor(float("nan")).half()
            )
            divisor = scale.to(row.dtype) if scale != 0 else 1.0
            code = (group / divisor).nan_to_num(nan=0.0).round().clamp(-8, 7).int() + 8
            pairs.append((code[:16] + 16 * code[16:]).to(torch.uint8))
            of_groups.append(scale)
        codes.append(torch.cat(pairs))
        scales.append(torch.stack(of_groups))
    leading = vectors.shape[:-1]
    return torch.stack(codes).unflatten(0, leading), torch.stack(scales).unflatten(0, leading)


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """See :func:`fastattn.ops.dequantize`."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if scale.dtype == torch.float32:
        numbers = codes.view(torch.float8_e4m3fn) if codes.dtype == torch.uint8 else codes
        return (scale.to(wide)[..., None] * numbers.to(wide)).to(dtype)
    groups = codes.unflatten(-1, (-1, 16)).int()
    numbers = torch.cat([groups % 16, groups // 16], -1).to(wide) - 8
    return _transform((scale.to(wide)[..., None] * numbers).flatten(-2)).to(dtype)


def _transform(vectors: Tensor) -> Tensor:
    """Walsh and Hadamard's transform of blocks of the largest power of two that divides the dim, normalised."""
    dim = vectors.shape[-1]
    block = math.gcd(dim, 1 << 30)
    index = torch.arange(block)
    bits = [((index[:, None] & index) >> bit) & 1 for bit in range(block.bit_length())]
    parity = torch.stack(bits).sum(0) % 2
    matrix = (1.0 - 2.0 * parity).to(vectors) / math.sqrt(block)
    return torch.cat([part @ matrix for part in vectors.split(block, dim=-1)], dim=-1)
