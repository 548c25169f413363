"""One decode step of one attention layer of LLaMA-2-7B's shape, multi-head against low-rank.

``python -m benchmarks.low_rank_layer``

Whole layers, projections and rotation included, and the attention core alone, on the CPU this runs on. Layers of one
kind share their weights and their cache's contents, so that every result is checked against another implementation
before anything is timed. Times are medians over rounds in which the contestants take turns; ratios are medians of the
ratios within a round. The roofline is what reading the layer's weights and cache once takes at the bandwidth, or its
products at the matmul rate, measured in the same run; the larger of both.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.lib.timing import speedup, take_turns
from fastattn import LowRankAttention, Rotary
from fastattn.ops import decode_attention, latent_decode

HIDDEN, HEADS, DIM = 4096, 32, 128
RANK, NOPE, ROPE = 512, 128, 64
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# Largest difference to the other implementation of the same layer, relative to the largest output.
TOLERANCE = {torch.bfloat16: 4e-2, torch.float32: 1e-4}
SLOW_ROUNDS = 3
FIRST_BASELINE, LLAMA = "MHA, SDPA", "LlamaAttention, DynamicCache"


@dataclass
class Row:
    """One line of the table."""

    dtype: str
    context: int
    what: str
    ms: float
    roofline_ms: float
    bytes_per_token: int
    speedup_over_sdpa: float
    speedup_over_llama: float | None


@dataclass
class Contestant:
    """``step()`` is timed; ``rounds`` bounds how often."""

    name: str
    step: Callable[[], Tensor]
    weight_bytes: int
    cache_bytes_per_token: int
    flops: float
    slow: bool = False


class MultiHead(nn.Module):
    """Multi-head attention over a preallocated cache, as one would write it in plain PyTorch."""

    def __init__(self, dtype: torch.dtype, capacity: int) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(HIDDEN, HEADS * DIM, bias=False, dtype=dtype))
        self.rotary = Rotary(10000.0 ** (-torch.arange(0, DIM, 2) / DIM))
        self.keys = torch.empty(1, HEADS, capacity, DIM, dtype=dtype)
        self.values = torch.empty_like(self.keys)
        self.length = 0

    def fill(self, keys: Tensor, values: Tensor) -> None:
        self.length = keys.shape[2]
        self.keys[:, :, : self.length], self.values[:, :, : self.length] = keys, values

    def forward(self, hidden: Tensor, ours: bool) -> Tensor:
        position = torch.tensor([[self.length]])
        query, key, value = (
            proj(hidden).view(1, 1, HEADS, DIM).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = self.rotary.rotate(query, position), self.rotary.rotate(key, position)
        self.keys[:, :, self.length : self.length + 1] = key
        self.values[:, :, self.length : self.length + 1] = value
        self.length += 1
        if ours:
            lengths = torch.full((1, HEADS), self.length, dtype=torch.int32)
            out = decode_attention(query, self.keys, self.values, lengths)
        else:
            out = functional.scaled_dot_product_attention(
                query, self.keys[:, :, : self.length], self.values[:, :, : self.length]
            )
        return self.o_proj(out.transpose(1, 2).reshape(1, 1, -1))


def weight_bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def multi_head_contestants(dtype: torch.dtype, context: int, hidden: Tensor, room: int) -> list[Contestant]:
    """The multi-head layer three ways, over the same weights and tokens."""
    from transformers import DynamicCache, LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=HIDDEN, num_attention_heads=HEADS, num_hidden_layers=1)
    config._attn_implementation = "sdpa"
    layer = LlamaAttention(config, 0).to(dtype).eval()
    rotary = LlamaRotaryEmbedding(config=config)
    keys, values = (torch.randn(1, HEADS, context, DIM, dtype=dtype) for _ in range(2))
    plain, decode = MultiHead(dtype, context + room), MultiHead(dtype, context + room)
    for module in (plain, decode):
        module.load_state_dict(layer.state_dict())
        module.fill(keys, values)
    del keys, values
    cache = DynamicCache(config=config)
    cache.update(plain.keys[:, :, :context], plain.values[:, :, :context], 0)
    cache_name = _cache_argument(layer)

    def step_llama() -> Tensor:
        position = torch.tensor([[cache.get_seq_length()]])
        tables = rotary(hidden, position)
        return layer(hidden, position_embeddings=tables, attention_mask=None, **{cache_name: cache})[0]

    item = dtype.itemsize
    common = (weight_bytes(layer), 2 * HEADS * DIM * item, 4 * context * HEADS * DIM + 8 * HIDDEN**2)
    return [
        Contestant(FIRST_BASELINE, lambda: plain(hidden, ours=False), *common),
        Contestant("MHA, decode_attention", lambda: decode(hidden, ours=True), *common),
        Contestant(LLAMA, step_llama, *common, slow=True),
    ]


def low_rank_contestants(
    dtype: torch.dtype, context: int, hidden: Tensor, room: int, q_rank: int | None, with_theirs: bool
) -> list[Contestant]:
    """LowRankAttention and, with ``with_theirs``, DeepseekV3Attention over the same weights and tokens."""
    ours = LowRankAttention(HIDDEN, HEADS, kv_lora_rank=RANK, q_lora_rank=q_rank, dtype=dtype).eval()
    kept = ours.make_cache("streaming_llm", context + room)
    latents = torch.randn(1, 1, context, RANK + ROPE, dtype=dtype)
    kept.update(0, None, latents)
    flops = 2 * context * HEADS * (2 * RANK + ROPE) + 2 * weight_bytes(ours) / dtype.itemsize
    name = "LowRankAttention, " + ("full-rank query" if q_rank is None else f"query rank {q_rank}")
    common = (weight_bytes(ours), (RANK + ROPE) * dtype.itemsize)
    contestants = [Contestant(name, lambda: ours(hidden, cache=kept), *common, flops)]
    if not with_theirs:
        return contestants
    from transformers import DeepseekV3Config, DynamicCache
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        kv_lora_rank=RANK,
        q_lora_rank=q_rank,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=DIM,
        num_hidden_layers=1,
    )
    config._attn_implementation = "sdpa"
    theirs = DeepseekV3Attention(config, 0).to(dtype).eval()
    theirs.load_state_dict(ours.state_dict())
    rotary = DeepseekV3RotaryEmbedding(config=config)
    cache = DynamicCache(config=config)
    if not hasattr(theirs, "expand_kv"):
        return contestants  # before 5.24 it cached full keys and values: that is multi-head attention's cache again
    # Their rotation leaves a rope key with the firsts of all pairs before the seconds.
    rope = torch.cat([latents[..., RANK::2], latents[..., RANK + 1 :: 2]], dim=-1)
    cache.update(latents[..., :RANK], rope, 0)
    cache_name = _cache_argument(theirs)

    def step_theirs() -> Tensor:
        position = torch.tensor([[cache.get_seq_length()]])
        tables = rotary(hidden, position)
        return theirs(hidden, position_embeddings=tables, attention_mask=None, **{cache_name: cache})[0]

    expansion = 2.0 * context * RANK * HEADS * (NOPE + DIM)
    return [
        *contestants,
        Contestant("DeepseekV3Attention, DynamicCache", step_theirs, *common, flops + expansion, True),
    ]


def _cache_argument(layer: nn.Module) -> str:
    """What this release of transformers calls the cache."""
    import inspect

    parameters = inspect.signature(inspect.unwrap(type(layer).forward)).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def check_agreement(contestants: list[Contestant], dtype: torch.dtype) -> None:
    """The first step of all contestants gives the same result."""
    results = [contestant.step().float() for contestant in contestants]
    for contestant, result in zip(contestants[1:], results[1:], strict=True):
        error = ((result - results[0]).abs().max() / results[0].abs().max()).item()
        if not error < TOLERANCE[dtype]:
            raise SystemExit(f"{contestant.name} differs from {contestants[0].name} by {error:.2e}: nothing is timed")


def now() -> float:
    """Seconds: of the wall clock, or of this thread's work where it is the only one (``--one-thread``)."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def interleaved(contestants: list[Contestant], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every contestant in every round; slow ones take part in the first rounds only."""
    every = take_turns({c.name: c.step for c in contestants}, rounds=min(rounds, SLOW_ROUNDS), warmup=1, clock=now)
    quick = {c.name: c.step for c in contestants if not c.slow}
    more = take_turns(quick, rounds=rounds - SLOW_ROUNDS, warmup=0, clock=now) if rounds > SLOW_ROUNDS else {}
    return {name: [1e3 * second for second in times + more.get(name, [])] for name, times in every.items()}


def ratio(times: dict[str, list[float]], slower: str, faster: str) -> float:
    """Median over common rounds of how many times faster ``faster`` was."""
    rounds = min(len(times[slower]), len(times[faster]))
    return speedup(times[slower][:rounds], times[faster][:rounds]).median


@dataclass
class Machine:
    """Measured in this run: bytes and FLOPs per second."""

    bandwidth: float
    matmul: float

    @classmethod
    def measure(cls, dtype: torch.dtype) -> Machine:
        vector, matrix = torch.ones(2**26), torch.randn(2048, 2048, dtype=dtype)
        best = {"read": float("inf"), "matmul": float("inf")}
        for _ in range(8):
            start = now()
            vector.sum()
            best["read"] = min(best["read"], now() - start)
            start = now()
            matrix @ matrix
            best["matmul"] = min(best["matmul"], now() - start)
        return cls(vector.numel() * 4 / best["read"], 2 * 2048**3 / best["matmul"])

    def roofline_ms(self, read: float, flops: float) -> float:
        return 1e3 * max(read / self.bandwidth, flops / self.matmul)


def measure_layers(dtype: torch.dtype, context: int, rounds: int, machine: Machine) -> list[Row]:
    torch.manual_seed(0)
    hidden, room = torch.randn(1, 1, HIDDEN, dtype=dtype), rounds + 8
    groups = [
        multi_head_contestants(dtype, context, hidden, room),
        low_rank_contestants(dtype, context, hidden, room, None, with_theirs=True),
        low_rank_contestants(dtype, context, hidden, room, 512, with_theirs=False),
    ]
    for group in groups:
        check_agreement(group, dtype)
    contestants = [contestant for group in groups for contestant in group]
    times = interleaved(contestants, rounds)
    return [
        Row(
            str(dtype).removeprefix("torch."),
            context,
            c.name,
            median(times[c.name]),
            machine.roofline_ms(c.weight_bytes + context * c.cache_bytes_per_token, c.flops),
            c.cache_bytes_per_token,
            ratio(times, FIRST_BASELINE, c.name),
            ratio(times, LLAMA, c.name),
        )
        for c in contestants
    ]


def measure_cores(dtype: torch.dtype, context: int, rounds: int, machine: Machine) -> list[Row]:
    """The attention alone, over caches of the same number of tokens."""
    torch.manual_seed(0)
    query = torch.randn(1, HEADS, 1, DIM, dtype=dtype)
    keys, values = (torch.randn(1, HEADS, context, DIM, dtype=dtype) for _ in range(2))
    latent, rope = torch.randn(1, HEADS, 1, RANK, dtype=dtype), torch.randn(1, HEADS, 1, ROPE, dtype=dtype)
    cache = torch.randn(1, context, RANK + ROPE, dtype=dtype)
    per_head = torch.full((1, HEADS), context, dtype=torch.int32)
    scale = (NOPE + ROPE) ** -0.5
    mha_flops, mla_flops = 4.0 * context * HEADS * DIM, 2.0 * context * HEADS * (2 * RANK + ROPE)
    mha_bytes, mla_bytes = 2 * HEADS * DIM * dtype.itemsize, (RANK + ROPE) * dtype.itemsize
    sdpa = functional.scaled_dot_product_attention
    exact = sdpa(
        torch.cat([latent, rope], -1).float(), *[x[:, None].float() for x in (cache, cache[..., :RANK])], scale=scale
    )
    found = latent_decode(latent, rope, cache, per_head[:, 0], scale=scale).float()
    if not (found - exact).abs().max() < TOLERANCE[dtype] * exact.abs().max():
        raise SystemExit("latent_decode differs from scaled_dot_product_attention: nothing is timed")
    contestants = [
        Contestant("core: SDPA", lambda: sdpa(query, keys, values), 0, mha_bytes, mha_flops),
        Contestant(
            "core: decode_attention", lambda: decode_attention(query, keys, values, per_head), 0, mha_bytes, mha_flops
        ),
        Contestant(
            "core: latent_decode",
            lambda: latent_decode(latent, rope, cache, per_head[:, 0], scale=scale),
            0,
            mla_bytes,
            mla_flops,
        ),
    ]
    times = interleaved(contestants, rounds)
    return [
        Row(
            str(dtype).removeprefix("torch."),
            context,
            c.name,
            median(times[c.name]),
            machine.roofline_ms(context * c.cache_bytes_per_token, c.flops),
            c.cache_bytes_per_token,
            ratio(times, contestants[0].name, c.name),
            None,
        )
        for c in contestants
    ]


def print_table(rows: list[Row]) -> None:
    print(
        f"{'dtype':9} {'context':>7}  {'what':37} {'ms':>9} {'roofline':>9} {'B/token':>8} {'vs SDPA':>8} "
        f"{'vs Llama':>8}"
    )
    for row in rows:
        llama = "" if row.speedup_over_llama is None else f"{row.speedup_over_llama:7.2f}x"
        print(
            f"{row.dtype:9} {row.context:7}  {row.what:37} {row.ms:9.2f} {row.roofline_ms:9.2f} "
            f"{row.bytes_per_token:8} {row.speedup_over_sdpa:7.2f}x {llama:>8}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16384, 32768])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument(
        "--one-thread", action="store_true", help="one thread and its CPU time: for a machine that others use"
    )
    parser.add_argument("--json", help="write the rows to this file")
    arguments = parser.parse_args()
    if arguments.one_thread:
        torch.set_num_threads(1)
    rows: list[Row] = []
    with torch.no_grad():
        for name in arguments.dtypes:
            machine = Machine.measure(DTYPES[name])
            print(
                f"{name}: {torch.get_num_threads()} threads, {machine.bandwidth / 1e9:.1f} GB/s, "
                f"{machine.matmul / 1e9:.0f} GFLOP/s",
                flush=True,
            )
            for context in arguments.contexts:
                rows += measure_layers(DTYPES[name], context, arguments.rounds, machine)
                rows += measure_cores(DTYPES[name], context, arguments.rounds, machine)
                print(f"  {context} tokens done", flush=True)
    print_table(rows)
    line = json.dumps([asdict(row) for row in rows])
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
