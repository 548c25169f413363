"""What only a GPU tells by its nature: more than 2^31 elements and 2^17 tokens, replayed and compiled CUDA graphs.

All else that is checked is the operator suite (``python -m pytest tests/ops --device cuda``). Each check raises where a
result is wrong. Inputs are drawn on the CPU and moved: a default device changes nothing.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from benchmarks.device.bench import Bench
from fastattn import ops
from fastattn.ops import reference
from tests._helpers import plain
from tests._helpers.budget import assert_within_budget


def huge(bench: Bench) -> None:
    """Offsets beyond 32 bits: the last head begins after 2^31 elements."""
    heads, capacity, dim, length = (3, 64, 16, 30) if bench.small else (17, 1 << 20, 128, 300)
    key = torch.empty(1, heads, capacity, dim, dtype=torch.bfloat16, device=bench.device)
    value = torch.empty_like(key)
    if not bench.small and (key[:, -1:].storage_offset() < 2**31):
        raise AssertionError("the buffer is too small for the test")
    for tensor, seed in ((key, 0), (value, 1)):
        tensor[:, :, :length] = bench.normal(1, heads, length, dim, dtype=torch.bfloat16, seed=seed)
        tensor[:, :, length : length + 64] = float("nan")
    lengths = torch.full((1, heads), length, dtype=torch.int32, device=bench.device)
    positions = torch.arange(capacity, dtype=torch.int32, device=bench.device).expand(1, heads, -1).contiguous()
    query = bench.normal(1, heads, 1, dim, dtype=torch.bfloat16, seed=2)
    near = (query, key[:, :, :length], value[:, :, :length])
    got = ops.decode_attention(query, key, value, lengths, return_lse=True)
    exact = reference.decode_attention(*(t.double() for t in near), lengths, return_lse=True)
    _compare(
        (
            got,
            exact,
            plain.attention_in_three_ways(
                *near, torch.ones(1, 1, 1, length, dtype=torch.bool, device=bench.device), dim**-0.5
            ),
        )
    )
    found = ops.score_knorm(key, lengths)
    assert_within_budget(
        found[..., :length],
        reference.score_knorm(near[1].double(), lengths),
        reference.score_knorm(near[1], lengths),
        "score_knorm",
    )
    new = bench.normal(1, heads, 1, dim, dtype=torch.bfloat16, seed=3)
    ops.cache_append_(key, value, positions, lengths, new, new, bench.int32([[7]]))
    if not torch.equal(key[:, :, length : length + 1], new):
        raise AssertionError("a token was appended at the wrong place")
    kept = key[:, -1, 1 : length + 1].clone()
    score = torch.arange(capacity, dtype=torch.float32, device=bench.device).expand(1, heads, -1)
    ops.cache_compact_(key, value, positions, lengths, score, length)
    if not torch.equal(key[:, -1, :length], kept):
        raise AssertionError("compaction moved the wrong tokens")


def long(bench: Bench) -> None:
    """More tokens than 2^17: attention, decoding, selection."""
    tokens = 200 if bench.small else 131_073
    query, key, value = _qkv(bench, 1, 4, 1, 3, tokens, 64, 64, torch.bfloat16)
    lengths = bench.int32([[tokens]])
    wide = (query.double(), key.double(), value.double())
    usual = plain.attention_in_three_ways(query, key, value, plain.visible_in_range(3, tokens, True), 64**-0.5)
    exact = reference.decode_attention(*wide, lengths, return_lse=True)
    _compare((ops.decode_attention(query, key, value, lengths, return_lse=True), exact, usual))
    _compare((ops.attention(query, key, value, causal=True, return_lse=True), exact, usual))
    positions = torch.arange(tokens, dtype=torch.int32, device=bench.device)[None, None].contiguous()
    score, budget = -ops.score_knorm(key, lengths), tokens // 2
    expected = score[0, 0].argsort(descending=True, stable=True)[:budget].sort().values  # no ties to speak of
    ops.cache_compact_(key, value, positions, lengths, score, budget)
    same = (positions[0, 0, :budget] == expected).float().mean()
    if not float(same) > 0.999:
        raise AssertionError(f"only {float(same):.4f} of the selected positions are the best")


def replay(bench: Bench) -> None:
    """A captured decode step reads lengths on the device: replays after they changed equal eager steps."""
    capacity, budget = 64, 40
    score = bench.normal(2, 2, capacity, dtype=torch.float32, seed=4)

    def new_state() -> tuple[Tensor, ...]:
        return (
            bench.normal(2, 2, capacity, 64, dtype=torch.float16),
            bench.normal(2, 2, capacity, 64, dtype=torch.float16, seed=1),
            torch.arange(capacity, dtype=torch.int32, device=bench.device).expand(2, 2, -1).contiguous(),
            bench.int32([[35, 35], [20, 20]]),
        )

    query = bench.normal(2, 4, 1, 64, dtype=torch.float16, seed=2)
    new = bench.normal(2, 2, 1, 64, dtype=torch.float16, seed=3)
    position = bench.int32([[99], [99]])

    def step(state: tuple[Tensor, ...]) -> Tensor:
        ops.cache_append_(*state, new, new, position)
        out = ops.decode_attention(query, state[0], state[1], state[3])
        ops.cache_compact_(*state, score, budget, min_length=budget + 8)
        return out  # type: ignore[return-value]

    with torch.no_grad():
        eager, captured = new_state(), new_state()
        step(tuple(t.clone() for t in captured))  # compiles the kernels
        if not bench.cuda:  # no graphs here: the same steps, run
            outs = [(step(eager), step(captured)) for _ in range(20)]
        else:
            torch.cuda.synchronize()
            graph, state = torch.cuda.CUDAGraph(), new_state()
            with torch.cuda.graph(graph):
                out = step(captured)
            for now, before in zip(captured, state, strict=True):
                now.copy_(before)  # capturing runs nothing, but be sure
            outs = []
            for _ in range(20):
                graph.replay()
                outs.append((step(eager), out.clone()))
        for index, (a, b) in enumerate(outs):
            if not torch.equal(a, b):
                raise AssertionError(f"step {index}: a replay differs from eager")
        for a, b in zip(eager[2:], captured[2:], strict=True):
            if not torch.equal(a, b):
                raise AssertionError("positions or lengths differ after replays")


def compiled(bench: Bench) -> None:
    """A small model decodes over evictions with ``mode="reduce-overhead"`` as eagerly, and no graph is skipped."""
    from tests._helpers.compiling import TinyModel, counting, greedy

    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torch._inductor")
    logger.addHandler(handler)
    try:
        with counting(), torch.no_grad():
            torch.manual_seed(0)
            model = TinyModel().to(bench.device).eval()
            prompt = torch.randint(0, 64, (1, 9), device=bench.device)
            options: dict[str, Any] = {"mode": "reduce-overhead"} if bench.cuda else {"backend": "aot_eager"}
            step = torch.compile(model, fullgraph=True, **options)
            for policy in ("knorm", "expected_attention"):
                tokens = []
                for run in (model, step):
                    store = model.make_cache(policy, device=bench.device)
                    logits = model(prompt, torch.arange(9, device=bench.device)[None], store)
                    start = torch.full((1, 1), 9, device=bench.device)
                    tokens.append(greedy(run, model, store, logits[:, -1:].argmax(-1), start, 30))
                if not torch.equal(*tokens):
                    raise AssertionError(f"{policy}: compiled decoding gives other tokens than eager")
            from torch._dynamo.utils import counters

            skips = counters["inductor"]["cudagraph_skips"]
    finally:
        logger.removeHandler(handler)
    skipped = [message for message in records if "skipping cudagraphs" in message.lower()]
    if skips or skipped:
        raise AssertionError(f"CUDA graphs were skipped {skips} times: {skipped[:2]}")


def _qkv(
    bench: Bench,
    batch: int,
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
    k_dim: int,
    v_dim: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        bench.normal(batch, heads, queries, k_dim, dtype=dtype),
        bench.normal(batch, kv_heads, keys, k_dim, dtype=dtype, seed=1),
        bench.normal(batch, kv_heads, keys, v_dim, dtype=dtype, seed=2),
    )


def _compare(*results: tuple[Any, Any, list[tuple[Tensor, Tensor]]]) -> None:
    """``(got, exact, plain results)`` of one or several calls, each ``(out, lse)``, within the error budget.

    Several calls of one kind count together: the largest error of few numbers is a matter of luck.
    """
    for index, what in enumerate(("out", "lse")):
        got, exact = (torch.cat([r[part][index].flatten() for r in results]) for part in (0, 1))
        usual = [torch.cat([r[2][way][index].flatten() for r in results]) for way in range(len(results[0][2]))]
        assert_within_budget(got, exact, usual, what)


# Name -> operator, case, check. An operator is timed only if all that checks it passes.
CHECKS = {
    "huge": ("decode_attention", "more than 2^31 elements", huge),
    "long": ("decode_attention", "131,073 tokens", long),
    "replay": ("cache", "graph replay after the lengths change", replay),
    "compiled": ("cache", "compiled decoding with CUDA graphs", compiled),
}
