"""What the benchmark suite and ``bench-compare`` time: every operator, module and integration at two or three sizes.

A case makes its inputs, checks its result against a reference, and says how many bytes it must move and how many
operations it must do. It uses fastattn's public names only, so that it runs on older revisions as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import fastattn
from fastattn import ops
from fastattn.ops import reference

BF16, F32 = torch.bfloat16, torch.float32


@dataclass
class Case:
    """One thing to time.

    Attributes:
        call: what is timed; gives the result.
        baseline: the same in plain PyTorch, timed in turns with ``call``.
        exact: the float64 definition's result, or None where ``baseline``'s is the yardstick.
        tolerance: largest difference allowed, relative to the largest value.
        bytes: that must move between memory and processor.
        operations: that must be done (a multiply-add counts two).
        moves_on: every call changes the state that the next one starts from; the case was checked when it was made.
    """

    call: Callable[[], Any]
    baseline: Callable[[], Any]
    exact: Callable[[], Any] | None
    tolerance: float
    bytes: float
    operations: float
    moves_on: bool = False

    def check(self) -> None:
        """Raise unless the result is right."""
        if self.moves_on:
            return
        got, expected = self.call(), (self.exact or self.baseline)()
        got, expected = got.double(), expected.double()
        finite = expected.isfinite()
        error = float((got - expected)[finite].abs().max() / expected[finite].abs().max())
        if not error <= self.tolerance:
            raise AssertionError(f"wrong by {error:.1e} of the largest value, {self.tolerance:.1e} is allowed")


def _tolerance(dtype: torch.dtype) -> float:
    return 3e-2 if dtype == BF16 else 1e-4


def _normal(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def attention(batch: int, heads: int, kv_heads: int, tokens: int, dim: int, dtype: torch.dtype) -> Case:
    query, key = _normal(batch, heads, tokens, dim, dtype=dtype), _normal(batch, kv_heads, tokens, dim, dtype=dtype)
    value = key.flip(2)
    return Case(
        lambda: ops.attention(query, key, value, causal=True),
        lambda: functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True),
        lambda: reference.attention(query.double(), key.double(), value.double(), causal=True),
        _tolerance(dtype),
        dtype.itemsize * batch * tokens * dim * 2.0 * (heads + kv_heads),
        2.0 * batch * heads * tokens**2 * dim,
    )


def decode(batch: int, heads: int, kv_heads: int, slots: int, dim: int, dtype: torch.dtype) -> Case:
    query, key = _normal(batch, heads, 1, dim, dtype=dtype), _normal(batch, kv_heads, slots, dim, dtype=dtype)
    value, lengths = key.flip(2), torch.full((batch, kv_heads), slots, dtype=torch.int32)
    return Case(
        lambda: ops.decode_attention(query, key, value, lengths),
        lambda: functional.scaled_dot_product_attention(query, key, value, enable_gqa=True),
        lambda: reference.decode_attention(query.double(), key.double(), value.double(), lengths),
        _tolerance(dtype),
        2.0 * dtype.itemsize * batch * kv_heads * slots * dim,
        4.0 * batch * heads * slots * dim,
    )


def latent(batch: int, heads: int, slots: int, dtype: torch.dtype, rank: int = 512, rope: int = 64) -> Case:
    query, cache = _normal(batch, heads, 1, rank + rope, dtype=dtype), _normal(batch, slots, rank + rope, dtype=dtype)
    lengths, scale = torch.full((batch,), slots, dtype=torch.int32), 192**-0.5
    first, last = query.split([rank, rope], dim=-1)

    def plain() -> Tensor:
        weights = torch.softmax(scale * (query[:, :, 0] @ cache.mT), dim=-1)
        return (weights @ cache[..., :rank])[:, :, None]

    return Case(
        lambda: ops.latent_decode(first, last, cache, lengths, scale=scale),
        plain,
        lambda: reference.latent_decode(first.double(), last.double(), cache.double(), lengths, scale=scale),
        _tolerance(dtype),
        float(dtype.itemsize * batch * slots * (rank + rope)),
        2.0 * batch * heads * slots * (2 * rank + rope),
    )


def qk(batch: int, heads: int, tokens: int, dim: int, dtype: torch.dtype) -> Case:
    query, key = (
        _normal(batch, heads, tokens, dim, dtype=dtype),
        _normal(batch, heads, tokens, dim, dtype=dtype).flip(2),
    )
    return Case(
        lambda: ops.qk_scores(query, key),
        lambda: query @ key.mT,
        lambda: reference.qk_scores(query.double(), key.double()),
        _tolerance(dtype),
        dtype.itemsize * batch * heads * (2.0 * tokens * dim + tokens**2),
        2.0 * batch * heads * tokens**2 * dim,
    )


def merge(parts: int, heads: int, tokens: int, dim: int) -> Case:
    outs, lses = list(_normal(parts, 1, heads, tokens, dim)), list(_normal(parts, 1, heads, tokens))
    return Case(
        lambda: ops.merge_attention(outs, lses)[0],
        lambda: reference.merge_attention(outs, lses)[0],
        lambda: reference.merge_attention([o.double() for o in outs], [s.double() for s in lses])[0],
        1e-5,
        4.0 * (parts + 1) * heads * tokens * dim,
        2.0 * parts * heads * tokens * dim,
    )


def score(name: str, kv_heads: int, slots: int, dim: int, dtype: torch.dtype) -> Case:
    key, lengths = _normal(1, kv_heads, slots, dim, dtype=dtype), torch.full((1, kv_heads), slots, dtype=torch.int32)
    function, definition = getattr(ops, f"score_{name}"), getattr(reference, f"score_{name}")
    read = float(dtype.itemsize * kv_heads * slots * dim)
    return Case(
        lambda: function(key, lengths),
        lambda: definition(key, lengths),
        lambda: definition(key.double(), lengths),
        1e-4,
        read,
        4.0 * kv_heads * slots * dim,
    )


def expected_attention(heads: int, kv_heads: int, slots: int, dim: int) -> Case:
    key, lengths = _normal(1, kv_heads, slots, dim), torch.full((1, kv_heads), slots, dtype=torch.int32)
    value, queries = key.flip(2), _normal(1, heads, 128, dim)
    positions = torch.arange(slots, dtype=torch.int32).expand(1, kv_heads, -1)
    mean, cov = ops.query_moments(queries)

    def definition(key: Tensor, value: Tensor, mean: Tensor, cov: Tensor) -> Tensor:
        return reference.score_expected_attention(key, value, lengths, positions, mean, cov, scale=dim**-0.5)

    return Case(
        lambda: ops.score_expected_attention(key, value, lengths, positions, mean, cov, scale=dim**-0.5),
        lambda: definition(key, value, mean, cov),
        lambda: definition(key.double(), value.double(), mean.double(), cov.double()),
        1e-4,
        8.0 * kv_heads * slots * dim,
        2.0 * heads * slots * dim * (dim + 2),
    )


def moments(heads: int, tokens: int, dim: int) -> Case:
    queries = _normal(1, heads, tokens, dim)
    return Case(
        lambda: ops.query_moments(queries)[1],
        lambda: reference.query_moments(queries)[1],
        lambda: reference.query_moments(queries.double())[1],
        1e-4,
        4.0 * heads * tokens * dim,
        2.0 * heads * tokens * dim * dim,
    )


def append(kv_heads: int, slots: int, dim: int) -> Case:
    key, value = _normal(1, kv_heads, slots, dim), _normal(1, kv_heads, slots, dim)
    positions = torch.arange(slots, dtype=torch.int32).expand(1, kv_heads, -1).contiguous()
    lengths, new = torch.zeros(1, kv_heads, dtype=torch.int32), _normal(1, kv_heads, 1, dim)
    position = torch.full((1, 1), 7, dtype=torch.int32)

    def run() -> Tensor:
        lengths.fill_(slots // 2)
        ops.cache_append_(key, value, positions, lengths, new, new, position)
        return key

    def plain() -> Tensor:
        key[:, :, slots // 2 : slots // 2 + 1] = new
        value[:, :, slots // 2 : slots // 2 + 1] = new
        positions[:, :, slots // 2] = 7
        lengths.fill_(slots // 2 + 1)
        return key

    return Case(run, plain, None, 0.0, 16.0 * kv_heads * dim, 0.0)


def compact(kv_heads: int, slots: int, budget: int, dim: int) -> Case:
    key, value = _normal(1, kv_heads, slots, dim), _normal(1, kv_heads, slots, dim)
    scores = _normal(1, kv_heads, slots)
    positions = torch.arange(slots, dtype=torch.int32).expand(1, kv_heads, -1).contiguous()
    lengths = torch.zeros(1, kv_heads, dtype=torch.int32)

    untouched = key.clone()

    def expected() -> Tensor:
        index = scores.topk(budget, -1).indices.sort(-1).values
        kept = untouched.gather(2, index[..., None].expand(-1, -1, -1, dim))
        return torch.cat([kept, untouched[:, :, budget:]], dim=2)

    def run() -> Tensor:
        lengths.fill_(slots)
        ops.cache_compact_(key, value, positions, lengths, scores, budget)
        return key

    def plain() -> Tensor:
        index = scores.topk(budget, -1).indices.sort(-1).values
        wide = index[..., None].expand(-1, -1, -1, dim)
        key[:, :, :budget], value[:, :, :budget] = key.gather(2, wide), value.gather(2, wide)
        positions[:, :, :budget] = positions.gather(2, index)
        lengths.fill_(budget)
        return key

    return Case(run, plain, expected, 0.0, 16.0 * kv_heads * budget * dim, 0.0)


def cache_step(policy: str, heads: int, kv_heads: int, budget: int, dim: int) -> Case:
    """One layer's decode step, evictions included."""
    rotary = fastattn.Rotary(10000.0 ** -(torch.arange(dim // 2) / (dim // 2)))
    cache = fastattn.CompressedKVCache(
        policy, budget, num_layers=1, num_kv_heads=kv_heads, head_dim=dim, interval=32, rotary=rotary
    )
    query, key = _normal(1, heads, budget, dim), _normal(1, kv_heads, budget, dim)
    cache.attend(0, query, key, key)
    plain_key = torch.cat([key, key[:, :, :1]], dim=2)

    def plain() -> Tensor:
        return functional.scaled_dot_product_attention(query[:, :, :1], plain_key, plain_key, enable_gqa=True)

    step = (query[:, :, :1], key[:, :, :1], key[:, :, :1])
    fresh = fastattn.CompressedKVCache("knorm", budget, num_layers=1, num_kv_heads=kv_heads, head_dim=dim)
    fresh.attend(0, query, key, key)
    first = fresh.attend(0, *step)
    if float((first - plain()).abs().max()) > 1e-4:
        raise AssertionError("a cache within its budget attends differently from plain attention")
    read, operations = 8.0 * kv_heads * budget * dim, 4.0 * heads * budget * dim
    return Case(lambda: cache.attend(0, *step), plain, None, 0.0, read, operations, moves_on=True)


def low_rank_step(hidden: int, heads: int, context: int) -> Case:
    """One decode step of a whole layer, against the same layer expanded."""
    torch.manual_seed(0)
    layer = fastattn.LowRankAttention(
        hidden, heads, kv_lora_rank=128, q_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64
    ).eval()
    x = _normal(1, context + 1, hidden)
    cache = layer.make_cache("knorm", context, interval=1 << 12)
    layer(x[:, :context], cache=cache)
    expected = layer(x)[:, -1:]
    got = layer(x[:, -1:], cache=cache)
    if float((got - expected).abs().max()) > 1e-3 * float(expected.abs().max()):
        raise AssertionError("a decode step differs from the expanded layer")
    return Case(
        lambda: layer(x[:, -1:], cache=cache),
        lambda: layer(x)[:, -1:],
        None,
        0.0,
        4.0 * (context * 160 + sum(p.numel() for p in layer.parameters())),
        2.0 * sum(p.numel() for p in layer.parameters()),
        moves_on=True,
    )


# What a user can time at shapes of their own.
SHAPED: dict[str, Callable[..., Case]] = {
    "attention": attention,
    "decode": decode,
    "latent": latent,
    "qk": qk,
    "merge": merge,
    "expected_attention": expected_attention,
    "moments": moments,
    "append": append,
    "compact": compact,
}
DTYPES = {"bf16": BF16, "f32": F32}

CASES: dict[str, Callable[[], Case]] = {
    "attention-512-f32": lambda: attention(1, 8, 2, 512, 64, F32),
    "attention-1024-bf16": lambda: attention(1, 16, 4, 1024, 128, BF16),
    "decode-2048-f32": lambda: decode(1, 32, 8, 2048, 128, F32),
    "decode-8192-bf16": lambda: decode(1, 32, 8, 8192, 128, BF16),
    "decode-batch8-bf16": lambda: decode(8, 16, 4, 1024, 128, BF16),
    "latent-2048-f32": lambda: latent(1, 32, 2048, F32),
    "latent-8192-bf16": lambda: latent(1, 32, 8192, BF16),
    "qk-256-f32": lambda: qk(1, 16, 256, 64, F32),
    "qk-512-bf16": lambda: qk(1, 32, 512, 128, BF16),
    "merge-2-parts": lambda: merge(2, 32, 256, 64),
    "merge-8-parts": lambda: merge(8, 32, 16, 128),
    "knorm-8192-bf16": lambda: score("knorm", 8, 8192, 128, BF16),
    "knorm-1024-f32": lambda: score("knorm", 3, 1024, 64, F32),
    "key-diff-8192-bf16": lambda: score("key_diff", 8, 8192, 128, BF16),
    "key-diff-1024-f32": lambda: score("key_diff", 3, 1024, 64, F32),
    "expected-attention-1024": lambda: expected_attention(9, 3, 1024, 64),
    "expected-attention-4096": lambda: expected_attention(32, 8, 4096, 64),
    "moments-128": lambda: moments(32, 128, 128),
    "moments-2048": lambda: moments(9, 2048, 64),
    "append-1151": lambda: append(3, 1151, 64),
    "append-8191": lambda: append(8, 8191, 128),
    "compact-1152": lambda: compact(3, 1152, 1024, 64),
    "compact-4224": lambda: compact(8, 4224, 4096, 128),
    "cache-step-knorm-1024": lambda: cache_step("knorm", 9, 3, 1024, 64),
    "cache-step-expected-attention-1024": lambda: cache_step("expected_attention", 9, 3, 1024, 64),
    "low-rank-step-512": lambda: low_rank_step(512, 8, 512),
    "low-rank-step-1024": lambda: low_rank_step(1024, 16, 1024),
}
