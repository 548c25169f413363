"""Operators, on drawn and on partly filled inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.result_cases._common import Results, beyond, draw, held, short
from fastattn import ops

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def operators(results: Results, folder: Path, saved: Path) -> None:
    for dtype in DTYPES:
        results.prefix = f"ops.{short(dtype)}."
        for heads, kv_heads, dim, v_dim in ((4, 4, 32, 32), (6, 2, 64, 48), (8, 1, 24, 40)):
            case = f"{heads}-{kv_heads}-{dim}-{v_dim}"
            for new, slots in ((1, 65), (7, 300), (130, 130), (130, 70)):
                _attention(results, f"{case}.{new}.{slots}", dtype, (heads, kv_heads, dim, v_dim), new, slots)
            _decode(results, case, dtype, (heads, kv_heads, dim, v_dim))
            _scores(results, case, dtype, (heads, kv_heads, dim, v_dim))
            _cache_operators(results, case, dtype, kv_heads, dim, v_dim)
        _latent(results, dtype)


def _attention(
    results: Results, case: str, dtype: torch.dtype, dims: tuple[int, int, int, int], new: int, slots: int
) -> None:
    heads, kv_heads, dim, v_dim = dims
    start, lengths = (torch.tensor(ends, dtype=torch.int32) for ends in ((0, 5), (slots, slots - 9)))
    for causal in (False, True):
        for bounds in ({}, {"key_start": start, "lengths": lengths}):
            query, key, value = (
                draw(2, h, t, d, seed=seed, dtype=dtype).requires_grad_()
                for seed, (h, t, d) in enumerate(((heads, new, dim), (kv_heads, slots, dim), (kv_heads, slots, v_dim)))
            )
            name = f"attention.{case}.causal{causal}.bounds{bool(bounds)}"
            out, lse = ops.attention(query, key, value, causal=causal, return_lse=True, **bounds)
            results.add(name, (out, lse))
            out.backward(draw(*out.shape, seed=9, dtype=dtype))
            results.add(f"{name}.grad", (query.grad, key.grad, value.grad))
    results.add(f"qk_scores.{case}", ops.qk_scores(query.detach(), key.detach(), scale=0.3))


def _decode(results: Results, case: str, dtype: torch.dtype, dims: tuple[int, int, int, int]) -> None:
    heads, kv_heads, dim, v_dim = dims
    key, value = draw(3, kv_heads, 333, dim, seed=1, dtype=dtype), draw(3, kv_heads, 333, v_dim, seed=2, dtype=dtype)
    lengths = torch.tensor([333, 0, 64], dtype=torch.int32)[:, None].expand(3, kv_heads).contiguous()
    parts = []
    for new in (1, 3, 20):
        query = draw(3, heads, new, dim, seed=new, dtype=dtype)
        for causal in (True, False):
            found = ops.decode_attention(query, key, value, lengths, causal=causal, return_lse=True)
            results.add(f"decode_attention.{case}.{new}.causal{causal}", found)
            parts.append(found)
        pair = parts[-2:]
        results.add(f"merge_attention.{case}.{new}", ops.merge_attention([p[0] for p in pair], [p[1] for p in pair]))


def _latent(results: Results, dtype: torch.dtype) -> None:
    for heads, rank, rope in ((4, 64, 16), (16, 128, 32)):
        cache = draw(3, 333, rank + rope, seed=1, dtype=dtype)
        lengths = torch.tensor([333, 0, 64], dtype=torch.int32)
        for new in (1, 4):
            query = draw(3, heads, new, rank, seed=2, dtype=dtype), draw(3, heads, new, rope, seed=3, dtype=dtype)
            for causal in (True, False):
                found = ops.latent_decode(*query, cache, lengths, scale=0.1, causal=causal, return_lse=True)
                results.add(f"latent_decode.{heads}-{rank}-{rope}.{new}.causal{causal}", found)


def _scores(results: Results, case: str, dtype: torch.dtype, dims: tuple[int, int, int, int]) -> None:
    heads, kv_heads, dim, v_dim = dims
    key, value = draw(3, kv_heads, 150, dim, seed=1, dtype=dtype), draw(3, kv_heads, 150, v_dim, seed=2, dtype=dtype)
    lengths = torch.tensor([150, 0, 77], dtype=torch.int32)[:, None].expand(3, kv_heads).contiguous()
    positions = torch.arange(150, dtype=torch.int32).expand(3, kv_heads, 150).contiguous()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    query = draw(3, heads, 90, dim, seed=3, dtype=wide)
    valid = torch.arange(90) < torch.tensor([90, 40, 1])[:, None]
    mean, cov = ops.query_moments(query, valid)
    results.add(f"query_moments.{case}", (mean, cov, *ops.query_moments(query)))
    statistics: dict[str, tuple[Any, ...]] = {
        "mean": (mean,),
        "moments": (mean, cov),
        "samples": (None, None, query[:, :, :20].contiguous()),
    }
    for least in (0, 100):
        scores = {
            "knorm": ops.score_knorm(key, lengths, min_length=least),
            "key_diff": ops.score_key_diff(key, lengths, min_length=least),
        }
        for form, given in statistics.items():
            for weighted in (True, False):
                scores[f"expected-{form}-{weighted}"] = ops.score_expected_attention(
                    key, value, lengths, positions, *given, scale=0.2, epsilon=0.01 * weighted,
                    use_value_norm=weighted, min_length=least,
                )  # fmt: skip
        for name, score in scores.items():
            results.add(f"score.{case}.{name}.{least}", score.masked_fill((lengths < least)[..., None], 0.0))


def _cache_operators(results: Results, case: str, dtype: torch.dtype, kv_heads: int, dim: int, v_dim: int) -> None:
    for width in (v_dim, 0):
        buffers = [torch.zeros(3, kv_heads, 60, d, dtype=dtype) for d in (dim, width)]
        positions = torch.full((3, kv_heads, 60), -1, dtype=torch.int32)
        lengths = torch.zeros(3, kv_heads, dtype=torch.int32)
        position = torch.arange(50, dtype=torch.int32).repeat(3, 1)
        position[1, :20], position[2] = -1, -1  # padding; a row without tokens
        new = [draw(3, kv_heads, 50, d, seed=d + 5, dtype=dtype) for d in (dim, width)]
        ops.cache_append_(*buffers, positions, lengths, *new, position)
        results.add(f"append.{case}.{width}", (*held(buffers, lengths), positions, lengths))
        scores = draw(3, kv_heads, 60, seed=8).round(decimals=1)  # some are equal
        for budget, least in ((40, 50), (25, 0)):
            ops.cache_compact_(*buffers, positions, lengths, scores, budget, min_length=least)
            empty = beyond(lengths, 60)
            kept = (*held(buffers, lengths), positions.masked_fill(empty, -1), lengths)
            results.add(f"compact.{case}.{width}.{budget}", kept)
