"""Each kernel's time against the best PyTorch has, and against what the device's memory and matrix units allow."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.device.bench import Bench
from fastattn import ops
from fastattn.ops import reference

BF16 = torch.bfloat16


@dataclass
class Entry:
    """One thing to time. ``kernel`` is the name its correctness checks have."""

    kernel: str
    case: str
    ours: Callable[[], Any]
    equivalents: dict[str, Callable[[], Any]]
    bytes: float
    operations: float
    target: str = ""


@dataclass
class Measured:
    """Seconds: medians."""

    kernel: str
    case: str
    seconds: float
    equivalents: dict[str, float | str]
    bandwidth_share: float
    attainable_share: float
    matrix_share: float
    tflops: float
    target: str
    error: str | None = None
    extra: dict[str, float] = field(default_factory=dict)


class Clock:
    """Median time of a call with a cold cache: a buffer larger than any cache is written before each run.

    On a GPU a short call is timed by replaying a CUDA graph of it, since launches from Python would take longer than
    the kernels: the time of flushes and calls in turn, less the time of as many flushes alone.
    """

    SHORT = 200e-6
    REPEATS = 8

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        size = 1 << (18 if bench.small else 28)
        self.flush = torch.empty(size, dtype=torch.uint8, device=bench.device)

    def __call__(self, call: Callable[[], Any], budget: float = 0.25) -> float:
        call()
        self._wait()
        first = self._once(call)
        if self.bench.cuda and first < self.SHORT:
            try:
                return self._replayed(call)
            except RuntimeError as problem:  # what allocates by itself or waits for the device can't be captured
                print(f"timed by launches, not by a graph: {str(problem).splitlines()[0][:100]}", flush=True)
                self._wait()
        runs = 2 if self.bench.small else max(5, min(50, int(budget / max(first, 1e-6))))
        return statistics.median(self._once(call) for _ in range(runs))

    def _wait(self) -> None:
        if self.bench.cuda:
            torch.cuda.synchronize()

    def _once(self, call: Callable[[], Any]) -> float:
        self.flush.zero_()
        if not self.bench.cuda:
            begin = time.perf_counter()
            call()
            return time.perf_counter() - begin
        return self._between_events(call)

    def _between_events(self, call: Callable[[], Any]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return 1e-3 * start.elapsed_time(end)

    def _replayed(self, call: Callable[[], Any]) -> float:
        both, alone = self._captured(call), self._captured(None)
        times = [(self._between_events(both.replay), self._between_events(alone.replay)) for _ in range(15)]
        return max(statistics.median(a - b for a, b in times) / self.REPEATS, 1e-9)

    def _captured(self, call: Callable[[], Any] | None) -> Any:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(self.REPEATS):
                self.flush.zero_()
                if call is not None:
                    call()
        graph.replay()
        self._wait()
        return graph


def ceilings(bench: Bench, clock: Clock) -> tuple[float, float]:
    """Bytes per second of a copy (reading and writing counted), operations per second of a bfloat16 product."""
    source = torch.ones(1 << (16 if bench.small else 30), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() / clock(lambda: target.copy_(source))
    n = 64 if bench.small else 8192
    a, b = (bench.normal(n, n, dtype=BF16, seed=seed) for seed in range(2))
    return bandwidth, 2.0 * n**3 / clock(lambda: a @ b)


def attainable_share(traffic: float, operations: float, bandwidth: float, rate: float) -> float:
    """The largest share of ``bandwidth`` that a kernel can reach which moves ``traffic`` bytes and multiplies.

    Memory and matrix units work at the same time: the slower of both decides.
    """
    memory = traffic / bandwidth
    return memory / max(memory, operations / rate)


def measure(entry: Entry, clock: Clock, bandwidth: float, rate: float) -> Measured:
    seconds = clock(entry.ours)
    equivalents: dict[str, float | str] = {}
    for name, call in entry.equivalents.items():
        try:
            equivalents[name] = clock(call)
        except Exception as error:  # a backend may not take this shape
            equivalents[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
    return Measured(
        entry.kernel,
        entry.case,
        seconds,
        equivalents,
        entry.bytes / seconds / bandwidth,
        attainable_share(entry.bytes, entry.operations, bandwidth, rate),
        entry.operations / seconds / rate,
        entry.operations / seconds / 1e12,
        entry.target,
    )


def entries(bench: Bench) -> dict[str, list[Callable[[], Entry]]]:
    """Makers of what to time, by operator, one at a time so that memory is freed in between."""
    small = bench.small
    rows = 2 if small else 16
    tokens = (64,) if small else (2048, 8192)
    slots = 64 if small else 32768
    attention = [lambda t=t, b=b: _attention(bench, t, backward=b) for t in tokens for b in (False, True)]
    names = ("knorm", "key_diff", "expected_attention")
    return {
        "decode_attention": [lambda s=s: _decode(bench, rows, s) for s in ((64,) if small else (1024, 4096, 32768))],
        "latent_decode": [
            lambda h=h: _latent(bench, rows, h, 64 if small else 16384) for h in ((16, 128) if small else (16, 32, 128))
        ],
        "attention": attention,
        "qk_scores": [lambda: _qk(bench)],
        "scores": [lambda n=name: _score(bench, n, slots) for name in names],
        "query_moments": [lambda: _moments(bench)],
        "cache": [lambda: _compact(bench), lambda: _append(bench)],
    }


def _sdpa(backend: SDPBackend, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Callable[[], Tensor]:
    def call() -> Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(query, key, value, enable_gqa=True, **options)

    return call


def _flex(bench: Bench, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Callable[[], Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    run = torch.compile(flex_attention) if bench.cuda else flex_attention
    mask = None
    if causal:
        count = query.shape[2]
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, count, count, device=bench.device)
    return lambda: run(query, key, value, block_mask=mask, enable_gqa=True)


def _decode(bench: Bench, batch: int, slots: int) -> Entry:
    heads, kv_heads, dim = 32, 8, 128
    query = bench.normal(batch, heads, 1, dim, dtype=BF16)
    key, value = (bench.noise(batch, kv_heads, slots, dim, dtype=BF16) for _ in range(2))
    lengths = torch.full((batch, kv_heads), slots, dtype=torch.int32, device=bench.device)
    folded = query.view(batch, kv_heads, heads // kv_heads, dim)
    return Entry(
        "decode_attention",
        f"B={batch} H={heads}/{kv_heads} D={dim} {slots} slots",
        lambda: ops.decode_attention(query, key, value, lengths),
        {
            "SDPA flash": _sdpa(SDPBackend.FLASH_ATTENTION, query, key, value),
            "SDPA cuDNN": _sdpa(SDPBackend.CUDNN_ATTENTION, query, key, value),
            "SDPA flash, folded": _sdpa(SDPBackend.FLASH_ATTENTION, folded, key, value),
            "FlexAttention": _flex(bench, query, key, value, causal=False),
        },
        4.0 * batch * kv_heads * slots * dim,
        4.0 * batch * heads * slots * dim,
        ">= 85% of bandwidth",
    )


def _latent(bench: Bench, batch: int, heads: int, slots: int) -> Entry:
    rank, rope = 512, 64
    query = bench.normal(batch, heads, 1, rank + rope, dtype=BF16)
    store = bench.noise(batch, slots, rank + rope, dtype=BF16)
    lengths = torch.full((batch,), slots, dtype=torch.int32, device=bench.device)

    def plain() -> Tensor:
        weights = torch.softmax(192**-0.5 * (query[:, :, 0] @ store.mT).float(), dim=-1)
        return weights.to(BF16) @ store[..., :rank]

    return Entry(
        "latent_decode",
        f"B={batch} H={heads} {rank}+{rope} {slots} slots",
        lambda: ops.latent_decode(query[..., :rank], query[..., rank:], store, lengths, scale=192**-0.5),
        {"bmm, softmax, bmm": plain},
        2.0 * batch * slots * (rank + rope),
        2.0 * batch * heads * slots * (2 * rank + rope),
        ">= 300 TFLOP/s" if heads == 128 else ">= 75% of bandwidth",
    )


def _attention(bench: Bench, tokens: int, backward: bool) -> Entry:
    batch, heads, dim = (1, 2, 32) if bench.small else (2, 32, 128)
    query, key, value = (
        bench.normal(batch, heads, tokens, dim, dtype=BF16, seed=i).requires_grad_(backward) for i in range(3)
    )
    backends = {
        "SDPA flash": SDPBackend.FLASH_ATTENTION,
        "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
        "SDPA memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
    equivalents = {name: _sdpa(backend, query, key, value, is_causal=True) for name, backend in backends.items()}
    equivalents["FlexAttention"] = _flex(bench, query, key, value, causal=True)

    def ours() -> Any:
        return ops.attention(query, key, value, causal=True)

    operations = 2.0 * batch * heads * tokens**2 * dim  # both products, half of the square
    traffic = 8.0 * batch * heads * tokens * dim
    if not backward:
        return Entry(
            "attention",
            f"B={batch} H={heads} D={dim} causal {tokens}",
            ours,
            equivalents,
            traffic,
            operations,
            ">= SDPA flash, >= 70% of cuDNN",
        )
    grad = bench.normal(batch, heads, tokens, dim, dtype=BF16, seed=5)

    def gradient_of(forward: Callable[[], Any]) -> Callable[[], Any]:
        results: list[Tensor] = []

        def run() -> Any:
            if not results:
                results.append(forward())
            return torch.autograd.grad(results[0], (query, key, value), grad, retain_graph=True)

        return run

    return Entry(
        "attention_backward",
        f"B={batch} H={heads} D={dim} causal {tokens}",
        gradient_of(ours),
        {name: gradient_of(equivalent) for name, equivalent in equivalents.items()},
        2.5 * traffic,
        2.5 * operations,
        ">= 60% of cuDNN",
    )


def _qk(bench: Bench) -> Entry:
    batch, heads, tokens, dim = (1, 2, 64, 32) if bench.small else (4, 32, 2048, 128)
    query, key = (bench.normal(batch, heads, tokens, dim, dtype=BF16, seed=i) for i in range(2))
    flat_query, flat_key = query.flatten(0, 1), key.flatten(0, 1)
    return Entry(
        "qk_scores",
        f"B={batch} H={heads} D={dim} {tokens}",
        lambda: ops.qk_scores(query, key),
        {"torch.bmm": lambda: torch.bmm(flat_query, flat_key.mT)},
        2.0 * batch * heads * (2 * tokens * dim + tokens**2),
        2.0 * batch * heads * tokens**2 * dim,
        ">= 95% of torch.bmm",
    )


def _score(bench: Bench, name: str, slots: int) -> Entry:
    batch, heads, kv_heads, dim = (1, 4, 2, 32) if bench.small else (4, 32, 8, 128)
    key, value = (bench.noise(batch, kv_heads, slots, dim, dtype=BF16) for _ in range(2))
    lengths = torch.full((batch, kv_heads), slots, dtype=torch.int32, device=bench.device)
    if name != "expected_attention":
        function, definition = getattr(ops, f"score_{name}"), getattr(reference, f"score_{name}")
        passes = 1 if name == "knorm" else 2
        traffic = 2.0 * passes * batch * kv_heads * slots * dim
        case = f"{name} B={batch} Hkv={kv_heads} D={dim} {slots}"
        return Entry(
            "scores",
            case,
            lambda: function(key, lengths),
            {"plain PyTorch": lambda: definition(key, lengths)},
            traffic,
            2.0 * traffic,
            ">= 70% of bandwidth",
        )
    positions = torch.arange(slots, dtype=torch.int32, device=bench.device).expand(batch, kv_heads, -1).contiguous()
    mean, cov = reference.query_moments(bench.normal(batch, heads, 256, dim, dtype=torch.float32))
    options = {"query_mean": mean, "query_cov": cov, "scale": dim**-0.5}
    return Entry(
        "scores",
        f"{name} B={batch} H={heads}/{kv_heads} D={dim} {slots}",
        lambda: ops.score_expected_attention(key, value, lengths, positions, **options),
        {"plain PyTorch": lambda: reference.score_expected_attention(key, value, lengths, positions, **options)},
        *expected_attention_work(batch, heads, kv_heads, slots, dim),
        ">= 70% of the attainable share",
    )


def expected_attention_work(batch: int, heads: int, kv_heads: int, slots: int, dim: int) -> tuple[float, float]:
    """Bytes and operations of Expected Attention's moment form with bfloat16 keys.

    Every head multiplies every key with its float32 covariance, in three products of bfloat16 pieces, and the product
    with the key. Keys and values are read once.
    """
    return 4.0 * batch * kv_heads * slots * dim, 2.0 * batch * heads * slots * dim * (3 * dim + 2)


def _moments(bench: Bench) -> Entry:
    batch, heads, tokens, dim = (1, 2, 64, 32) if bench.small else (2, 32, 8192, 128)
    queries = bench.normal(batch, heads, tokens, dim, dtype=BF16)
    return Entry(
        "query_moments",
        f"B={batch} H={heads} D={dim} {tokens}",
        lambda: ops.query_moments(queries),
        {"plain PyTorch": lambda: reference.query_moments(queries)},
        4.0 * batch * heads * tokens * dim,
        2.0 * batch * heads * tokens * dim**2,
    )


def _cache_state(bench: Bench, slots: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, kv_heads, dim = (1, 2, 32) if bench.small else (8, 8, 128)
    key, value = (bench.noise(batch, kv_heads, slots, dim, dtype=BF16) for _ in range(2))
    positions = torch.arange(slots, dtype=torch.int32, device=bench.device).expand(batch, kv_heads, -1).contiguous()
    return key, value, positions, torch.zeros(batch, kv_heads, dtype=torch.int32, device=bench.device)


def _compact(bench: Bench) -> Entry:
    slots, budget = (96, 64) if bench.small else (4224, 4096)
    key, value, positions, lengths = _cache_state(bench, slots)
    score = bench.noise(*positions.shape, dtype=torch.float32)

    def ours() -> None:
        lengths.fill_(slots)
        ops.cache_compact_(key, value, positions, lengths, score, budget)

    def plain() -> None:
        index = score.topk(budget, -1).indices.sort(-1).values
        wide = index[..., None].expand(-1, -1, -1, key.shape[3])
        key[:, :, :budget], value[:, :, :budget] = key.gather(2, wide), value.gather(2, wide)

    traffic = 8.0 * key[:, :, :budget].numel()
    return Entry("cache", f"compact {slots} to {budget}", ours, {"topk, gather": plain}, traffic, 0.0)


def _append(bench: Bench) -> Entry:
    slots = 96 if bench.small else 4224
    key, value, positions, lengths = _cache_state(bench, slots)
    new, position = key[:, :, :1].clone(), torch.full((key.shape[0], 1), 5, dtype=torch.int32, device=bench.device)

    def ours() -> None:
        lengths.fill_(slots // 2)
        ops.cache_append_(key, value, positions, lengths, new, new, position)

    def plain() -> None:
        key[:, :, slots // 2 : slots // 2 + 1], value[:, :, slots // 2 : slots // 2 + 1] = new, new

    return Entry("cache", "append 1 token", ours, {"slice assignment": plain}, 8.0 * new.numel(), 0.0)
