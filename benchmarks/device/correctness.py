"""Every kernel against float64, on whatever device there is. Each check raises where a result is wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fastattn import ops
from fastattn.ops import reference
from tests._helpers import plain
from tests._helpers.budget import assert_within_budget
from tests._helpers.draw import normal, poison_slots_

HALF = (torch.float16, torch.bfloat16)
DTYPES = (*HALF, torch.float32)
Check = Callable[[], None]


class Bench:
    """Where the checks run, and how large."""

    def __init__(self, device: str, small: bool) -> None:
        self.device, self.small = device, small
        self.cuda = torch.device(device).type == "cuda"

    def normal(self, *shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
        return normal(*shape, dtype=dtype, seed=seed).to(self.device)

    def int32(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


def checks(bench: Bench) -> Iterator[tuple[str, str, Check]]:
    """``(kernel, case, check)``. A kernel's timings are taken only if all its checks pass."""
    for dtype in DTYPES:
        short = str(dtype).removeprefix("torch.")
        for dims in ((128, 128), (192, 128), (64, 64), (96, 96), (256, 256), (40, 24)):
            case = f"{short} {dims[0]}/{dims[1]}"
            yield "attention", case, lambda d=dims, t=dtype: attention(bench, *d, t)
            yield "attention_backward", case, lambda d=dims, t=dtype: backward(bench, *d, t)
            yield "decode_attention", case, lambda d=dims, t=dtype: decode(bench, *d, t)
        for rank, rope in ((512, 64), (448, 128), (256, 64)):
            for heads in (8, 32, 128):
                case = f"{short} {rank}+{rope}, {heads} heads"
                yield "latent_decode", case, lambda r=rank, p=rope, h=heads, t=dtype: latent(bench, r, p, h, t)
        yield "merge_attention", short, lambda t=dtype: merge(bench, t)
        for dim in (64, 80, 128, 576):
            yield "qk_scores", f"{short} {dim}", lambda d=dim, t=dtype: qk(bench, d, t)
        for dim in (64, 128, 576):
            yield "scores", f"{short} {dim}", lambda d=dim, t=dtype: scores(bench, d, t)
            yield "query_moments", f"{short} {dim}", lambda d=dim, t=dtype: moments(bench, d, t)
        yield "cache", short, lambda t=dtype: cache(bench, t)
    yield "decode_attention", "more than 2^31 elements", lambda: huge(bench)
    yield "decode_attention", "131,073 tokens", lambda: long(bench)
    yield "cache", "graph replay after the lengths change", lambda: replay(bench)
    yield "cache", "compiled decoding with CUDA graphs", lambda: compiled(bench)


def _edges(bench: Bench) -> tuple[int, ...]:
    return (17, 33) if bench.small else (127, 128, 129, 300)


def attention(bench: Bench, k_dim: int, v_dim: int, dtype: torch.dtype) -> None:
    found: list[Any] = []
    for keys in _edges(bench):
        for queries, causal in ((keys, True), (keys + 5, True), (3, False)):
            query, key, value = _qkv(bench, 3, 4, 2, queries, keys, k_dim, v_dim, dtype)
            start, end = bench.int32([0, 1, keys]), bench.int32([keys, keys - 1, keys])  # the last row sees nothing
            slots = torch.arange(keys, device=bench.device)
            outside = (slots < start[:, None]) | (slots >= end[:, None])
            for tensor in (key, value):
                tensor.masked_fill_(outside[:, None, :, None], float("nan"))
            options = {"causal": causal, "key_start": start, "lengths": end}
            got = ops.attention(query, key, value, return_lse=True, **options)
            exact = reference.attention(query.double(), key.double(), value.double(), return_lse=True, **options)
            visible = plain.visible_in_range(queries, keys, causal, start, end)
            found.append((got, exact, plain.attention_in_three_ways(query, key, value, visible, k_dim**-0.5)))
    _compare(*found)


def backward(bench: Bench, k_dim: int, v_dim: int, dtype: torch.dtype) -> None:
    keys = _edges(bench)[-1]
    tensors = _qkv(bench, 2, 4, 2, keys, keys, k_dim, v_dim, dtype)
    end = bench.int32([keys, keys - 3])
    grad = bench.normal(2, 4, keys, v_dim, dtype=dtype, seed=9)

    def gradients(function: Callable[..., Tensor], wide: torch.dtype) -> list[Tensor]:
        leaves = [tensor.to(wide, copy=True).requires_grad_() for tensor in tensors]
        function(*leaves).backward(grad.to(wide))
        return [leaf.grad for leaf in leaves]  # type: ignore[misc]

    options = {"causal": True, "lengths": end}
    got = gradients(lambda q, k, v: ops.attention(q, k, v, **options), dtype)  # type: ignore[arg-type,return-value]
    exact = gradients(lambda q, k, v: reference.attention(q, k, v, **options), torch.float64)  # type: ignore[arg-type,return-value]
    visible = plain.visible_in_range(keys, keys, True, None, end)
    usual = gradients(lambda q, k, v: plain.attention(q, k, v, visible, k_dim**-0.5)[0], dtype)
    for name, a, b, c in zip(("query", "key", "value"), got, exact, usual, strict=True):
        largest = float(b.abs().max())
        assert_within_budget(a, b, c, f"gradient of {name}", cancelling=largest)


def decode(bench: Bench, k_dim: int, v_dim: int, dtype: torch.dtype) -> None:
    capacity, found = (64 if bench.small else 2100), []
    for queries, causal in ((1, True), (4, True), (8, False)):
        query, key, value = _qkv(bench, 4, 8, 2, queries, capacity, k_dim, v_dim, dtype)
        lengths = bench.int32([[0, 1], [capacity, capacity - 1], [33, 32], [31, capacity]])
        poison_slots_(key, lengths), poison_slots_(value, lengths)
        got = ops.decode_attention(query, key, value, lengths, causal=causal, return_lse=True)
        wide = (query.double(), key.double(), value.double())
        exact = reference.decode_attention(*wide, lengths, causal=causal, return_lse=True)
        visible = plain.visible_in_cache(queries, capacity, lengths, causal, 4)
        found.append((got, exact, plain.attention_in_three_ways(query, key, value, visible, k_dim**-0.5)))
    _compare(*found)


def latent(bench: Bench, rank: int, rope: int, heads: int, dtype: torch.dtype) -> None:
    capacity, found = (40 if bench.small else 1100), []
    for queries in (1, 2, 4):
        query = bench.normal(3, heads, queries, rank + rope, dtype=dtype)
        store = bench.normal(3, capacity, rank + rope, dtype=dtype, seed=1)
        lengths, scale = bench.int32([0, capacity, 33]), 192**-0.5
        poison_slots_(store, lengths)
        parts = (query[..., :rank], query[..., rank:])
        got = ops.latent_decode(*parts, store, lengths, scale=scale, return_lse=True)
        wide = [part.double() for part in parts]
        exact = reference.latent_decode(*wide, store.double(), lengths, scale=scale, return_lse=True)
        key = store[:, None]
        visible = plain.visible_in_cache(queries, capacity, lengths[:, None], True, heads)
        found.append((got, exact, plain.attention_in_three_ways(query, key, key[..., :rank], visible, scale)))
    _compare(*found)


def merge(bench: Bench, dtype: torch.dtype) -> None:
    outs = [bench.normal(2, 4, 5, 96, dtype=dtype, seed=i) for i in range(3)]
    lses = [bench.normal(2, 4, 5, dtype=torch.float32, seed=i + 9) for i in range(3)]
    lses[0][0], lses[1][:, 1], lses[2][0] = -torch.inf, -torch.inf, -torch.inf
    for out, lse in zip(outs, lses, strict=True):
        out.masked_fill_(lse.isinf()[..., None], 0.0)
    got = ops.merge_attention(outs, lses)
    exact = reference.merge_attention([o.double() for o in outs], [s.double() for s in lses])
    _compare((got, exact, [reference.merge_attention(outs, lses)]))


def qk(bench: Bench, dim: int, dtype: torch.dtype) -> None:
    for tokens in _edges(bench):
        query = bench.normal(2, tokens, 4, dim, dtype=dtype).transpose(1, 2)
        key = bench.normal(2, 2, tokens + 1, dim, dtype=dtype, seed=1)
        exact = reference.qk_scores(query.double(), key.double(), scale=0.5)
        usual = 0.5 * (query @ key.repeat_interleave(2, 1).mT)
        got = ops.qk_scores(query, key, scale=0.5)
        assert_within_budget(got, exact, usual, "scores", cancelling=0.5 * dim)


def scores(bench: Bench, dim: int, dtype: torch.dtype) -> None:
    capacity = 40 if bench.small else 1100
    key = bench.normal(3, 2, capacity, dim, dtype=dtype)
    value = bench.normal(3, 2, capacity, 64, dtype=dtype, seed=1)
    lengths = bench.int32([[capacity, 33], [1, 32], [31, capacity - 1]])
    poison_slots_(key, lengths), poison_slots_(value, lengths)
    positions = torch.arange(capacity, dtype=torch.int32, device=bench.device).expand(3, 2, -1).contiguous()
    queries = bench.normal(3, 4, 20, dim, dtype=torch.float32, seed=2)
    mean, cov = reference.query_moments(queries)
    forms: list[dict[str, Tensor]] = [
        {"query_mean": mean},
        {"query_mean": mean, "query_cov": cov},
        {"query_samples": queries},
    ]
    calls = [("score_knorm", (key, lengths), {}), ("score_key_diff", (key, lengths), {})]
    calls += [
        ("score_expected_attention", (key, value, lengths, positions), {**form, "scale": dim**-0.5}) for form in forms
    ]
    for name, arguments, options in calls:
        wide = tuple(a.double() if a.is_floating_point() else a for a in arguments)
        wide_options = {k: v.double() if isinstance(v, Tensor) else v for k, v in options.items()}  # type: ignore[attr-defined]
        exact = getattr(reference, name)(*wide, **wide_options)
        usual = getattr(reference, name)(*arguments, **options)
        assert_within_budget(getattr(ops, name)(*arguments, **options), exact, usual, name)


def moments(bench: Bench, dim: int, dtype: torch.dtype) -> None:
    queries = bench.normal(3, 4, 133, dim, dtype=dtype) + 3
    valid = torch.arange(133, device=bench.device) < bench.int32([133, 1, 0])[:, None]
    queries.masked_fill_(~valid[:, None, :, None], float("nan"))
    got, usual = ops.query_moments(queries, valid), reference.query_moments(queries, valid)
    exact = reference.query_moments(queries.double(), valid)
    for name, a, b, c in zip(("mean", "covariance"), got, exact, usual, strict=True):
        assert_within_budget(a, b, c, name)


def cache(bench: Bench, dtype: torch.dtype) -> None:
    """Append and compact, equal to the definition to the bit: ties, NaN and infinities among the scores."""
    capacity, budget = (48, 20) if bench.small else (1300, 1024)
    for kind in ("random", "ties", "special"):
        new = (bench.normal(2, 3, 7, 64, dtype=dtype, seed=5), bench.normal(2, 3, 7, 32, dtype=dtype, seed=6))
        position = bench.int32([[-1, -1, 9, 10, 11, 12, 13], [0, 1, 2, 3, 4, 5, -1]])
        score = bench.normal(2, 3, capacity, dtype=torch.float32, seed=7)
        if kind == "ties":
            score = score.round()
        if kind == "special":
            score[..., ::5], score[..., 1::5], score[..., 2::5] = float("nan"), float("inf"), -float("inf")
            score[..., 3::5] = 0.0
            score[..., 3::10] = -0.0
        states = []
        for module in (ops, reference):
            state = (
                bench.normal(2, 3, capacity, 64, dtype=dtype),
                bench.normal(2, 3, capacity, 32, dtype=dtype, seed=1),
                torch.arange(capacity, dtype=torch.int32, device=bench.device).expand(2, 3, -1).contiguous(),
                bench.int32([[capacity - 7, budget, 5], [budget - 7, capacity - 9, 0]]),
            )
            module.cache_append_(*state, *new, position)
            module.cache_compact_(*state, score, budget, min_length=budget + 1)
            states.append(state)
        filled = torch.arange(capacity, device=bench.device) < states[0][3][..., None]
        for got, expected in zip(*states, strict=True):
            if got.dim() == 4:
                got, expected = (t.masked_fill(~filled[..., None], 0) for t in (got, expected))
            if got.shape == filled.shape:
                got, expected = (t.masked_fill(~filled, -1) for t in (got, expected))
            if not torch.equal(got, expected):
                raise AssertionError(f"cache differs from its definition ({kind} scores)")


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
