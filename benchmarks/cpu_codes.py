"""The cases of :mod:`benchmarks.cpu` over quantised storage: codes against the same numbers in full precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.cpu_decode import HEAD_DIM, HEADS, KV_HEADS, RANK, ROPE_DIM, check, exactly
from fastattn import ops
from fastattn.ops import reference

STORAGES = ("int8", "fp8", "int4")
# The least speed of int8 decoding against the same cache in full precision; the others have no target.
TARGETS = {("int8", torch.bfloat16): 1.0, ("int8", torch.float32): 1.5}


class CodeCase(NamedTuple):
    """Name, the peer's dtype, calls (the peer first), bytes read, operations, targets, shares of the error budget."""

    name: str
    dtype: torch.dtype
    calls: dict[str, Callable[[], Any]]
    nbytes: int
    operations: int
    targets: dict[str, float]
    checked: dict[str, float]


def _nbytes(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def decode(slots: int) -> Iterator[CodeCase]:
    query = torch.randn(1, HEADS, 1, HEAD_DIM)
    lengths = torch.full((1, KV_HEADS), slots, dtype=torch.int32)
    for storage in STORAGES:
        key, key_scale = ops.quantize(torch.randn(1, KV_HEADS, slots, HEAD_DIM), storage)
        value, value_scale = ops.quantize(torch.randn(1, KV_HEADS, slots, HEAD_DIM), storage)
        for dtype in (torch.bfloat16, torch.float32):
            asked = query.to(dtype)
            rows = asked.view(KV_HEADS, -1, HEAD_DIM)
            exact = torch.stack(
                [
                    exactly(
                        rows[h],
                        ops.dequantize(key[0, h], key_scale[0, h], torch.float64),
                        ops.dequantize(value[0, h], value_scale[0, h], torch.float64),
                        HEAD_DIM**-0.5,
                    )
                    for h in range(KV_HEADS)
                ]
            ).view(query.shape)
            plain = ops.dequantize(key, key_scale, dtype), ops.dequantize(value, value_scale, dtype)
            name, peer = f"decode {storage} x {slots}", f"{dtype}".removeprefix("torch.")

            def full(asked: Tensor = asked, plain: tuple[Tensor, Tensor] = plain) -> Any:
                return ops.decode_attention(asked, *plain, lengths)

            def coded(
                asked: Tensor = asked,
                held: tuple[Tensor, ...] = (key, value),
                scales: tuple[Tensor, ...] = (key_scale, value_scale),
            ) -> Any:
                return ops.decode_attention(asked, *held, lengths, key_scale=scales[0], value_scale=scales[1])

            shares = {storage: check(name, coded(), full(), exact)}
            least = TARGETS.get((storage, dtype))
            nbytes = _nbytes(key, value, key_scale, value_scale)
            targets = {} if least is None else {"peer": least}
            yield CodeCase(
                name,
                dtype,
                {f"{peer} cache": full, storage: coded},
                nbytes,
                4 * HEADS * slots * HEAD_DIM,
                targets,
                shares,
            )


def latent(slots: int) -> Iterator[CodeCase]:
    lengths, scale = torch.full((1,), slots, dtype=torch.int32), (128 + ROPE_DIM) ** -0.5 / 4
    query = torch.randn(1, HEADS, 1, RANK + ROPE_DIM)
    for storage in STORAGES:
        codes, cache_scale = ops.quantize(torch.randn(1, slots, RANK + ROPE_DIM), storage)
        cache = ops.dequantize(codes[0], cache_scale[0], torch.float64)
        for dtype in (torch.bfloat16, torch.float32):
            asked = query.to(dtype)
            exact = exactly(asked[0, :, 0], cache, cache[:, :RANK], scale).view(1, HEADS, 1, RANK)
            parts = asked[..., :RANK], asked[..., RANK:]
            name, peer = f"latent {storage} x {slots}", f"{dtype}".removeprefix("torch.")

            plain = cache[None].to(dtype)

            def full(parts: Any = parts, plain: Tensor = plain) -> Any:
                return ops.latent_decode(*parts, plain, lengths, scale=scale)

            def coded(parts: Any = parts, codes: Tensor = codes, cache_scale: Tensor = cache_scale) -> Any:
                return ops.latent_decode(*parts, codes, lengths, scale=scale, cache_scale=cache_scale)

            shares = {storage: check(name, coded(), full(), exact)}
            operations = 2 * HEADS * slots * (2 * RANK + ROPE_DIM)
            calls = {f"{peer} cache": full, storage: coded}
            yield CodeCase(name, dtype, calls, _nbytes(codes, cache_scale), operations, {}, shares)


def score(slots: int) -> Iterator[CodeCase]:
    tokens = min(slots, 16384)
    lengths = torch.full((1, KV_HEADS), tokens, dtype=torch.int32)
    for storage in STORAGES:
        codes, scale = ops.quantize(torch.randn(1, KV_HEADS, tokens, HEAD_DIM), storage)
        plain = ops.dequantize(codes, scale)
        exact = reference.score_key_diff(codes, lengths, key_scale=scale)
        calls = {
            "float32 keys": lambda plain=plain: ops.score_key_diff(plain, lengths),
            storage: lambda codes=codes, scale=scale: ops.score_key_diff(codes, lengths, key_scale=scale),
        }
        name = f"key_diff {storage} x {tokens}"
        shares = {storage: check(name, calls[storage](), reference.score_key_diff(plain, lengths), exact)}
        yield CodeCase(name, torch.float32, calls, _nbytes(codes, scale), 4 * plain.numel(), {}, shares)


def cases(slots: int) -> Iterator[CodeCase]:
    """All of them."""
    yield from decode(slots)
    yield from latent(slots)
    yield from score(slots)
