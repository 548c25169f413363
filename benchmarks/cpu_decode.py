"""Decoding over a long cache on a CPU: ``decode_attention`` and ``latent_decode`` against plain PyTorch.

    python -m benchmarks.cpu_decode [--slots 32768] [--rounds 15] [--threads N]

Every result is checked against float64 before anything is timed. The calls take turns; ratios are medians of the
rounds' ratios, with quartiles. GB/s counts the cache once per call; the bandwidth it is compared with is a sum over as
many bytes, measured in the same turns. Prints a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.lib.timing import Spread, speedup, take_turns
from fastattn import ops

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
RANK, ROPE_DIM = 512, 64
# The least ratio to scaled_dot_product_attention(enable_gqa=True) that decode_attention aims at.
TARGETS = {torch.bfloat16: 6.0, torch.float32: 3.0}


def check(name: str, ours: Tensor, plain: Tensor, exact: Tensor) -> float:
    """Error of ``ours`` in units of what is allowed: twice plain PyTorch's plus one rounding unit; raises above 1."""
    error, plain_error = ((t.double() - exact).abs().max().item() for t in (ours, plain))
    unit = torch.finfo(ours.dtype).eps * 2.0 ** math.floor(math.log2(exact.abs().max().item()))
    share = error / (2 * plain_error + unit)
    if not share <= 1:
        raise SystemExit(f"{name}: wrong result, error {error:.3e}, plain PyTorch {plain_error:.3e}, unit {unit:.3e}")
    return share


def exactly(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attention of ``query [rows, D]`` over one head in float64; the whole of it at once would take gigabytes."""
    return torch.softmax(scale * query.double() @ key.double().mT, dim=-1) @ value.double()


def gqa_case(slots: int, dtype: torch.dtype) -> tuple[dict[str, Callable[[], Tensor]], Tensor, int, int]:
    """Calls by name (plain first, ours second), the exact result, bytes of cache, floating-point operations."""
    query = torch.randn(1, HEADS, 1, HEAD_DIM).to(dtype)
    key, value = (torch.randn(1, KV_HEADS, slots, HEAD_DIM).to(dtype) for _ in range(2))
    lengths = torch.full((1, KV_HEADS), slots, dtype=torch.int32)
    folded = query.view(1, KV_HEADS, -1, HEAD_DIM)
    calls = {
        "sdpa(enable_gqa)": lambda: functional.scaled_dot_product_attention(query, key, value, enable_gqa=True),
        "decode_attention": lambda: ops.decode_attention(query, key, value, lengths),
        "sdpa, folded heads": lambda: functional.scaled_dot_product_attention(folded, key, value).view(query.shape),
    }
    exact = torch.stack(
        [exactly(*group, HEAD_DIM**-0.5) for group in zip(folded[0], key[0], value[0], strict=True)]
    ).view(1, HEADS, 1, HEAD_DIM)
    return calls, exact, 2 * key.nbytes, 4 * HEADS * slots * HEAD_DIM


def latent_case(slots: int, dtype: torch.dtype, heads: int) -> tuple[dict[str, Callable[[], Tensor]], Tensor, int, int]:
    latent, rope = torch.randn(1, heads, 1, RANK).to(dtype), torch.randn(1, heads, 1, ROPE_DIM).to(dtype)
    cache = torch.randn(1, slots, RANK + ROPE_DIM).to(dtype)
    lengths = torch.full((1,), slots, dtype=torch.int32)
    scale = (128 + ROPE_DIM) ** -0.5 / 4  # scores of the size that trained models have

    def plain() -> Tensor:
        query = torch.cat([latent, rope], dim=-1)[:, :, 0]
        scores = torch.bmm(query, cache.mT) * scale
        return torch.bmm(torch.softmax(scores, dim=-1, dtype=torch.float32).to(dtype), cache[..., :RANK])[:, :, None]

    calls = {
        "bmm, softmax, bmm": plain,
        "latent_decode": lambda: ops.latent_decode(latent, rope, cache, lengths, scale=scale),
    }
    rows = torch.cat([latent, rope], dim=-1)[0, :, 0]
    exact = exactly(rows, cache[0], cache[0, :, :RANK], scale).view(1, heads, 1, RANK)
    return calls, exact, cache.nbytes, 2 * heads * slots * (2 * RANK + ROPE_DIM)


def measure(
    case: str, calls: dict[str, Callable[[], Tensor]], exact: Tensor, nbytes: int, flops: int, rounds: int
) -> list[dict[str, Any]]:
    """Check every call, then time them in turns with a read of as many bytes and a large matrix product."""
    (plain_name, plain), *others = calls.items()
    expected = plain()
    shares = {plain_name: 0.5} | {name: check(f"{case} {name}", call(), expected, exact) for name, call in others}
    dtype = expected.dtype
    bytes_read = torch.ones(nbytes // 4)
    square = torch.randn(1024, 1024).to(dtype)
    seconds = take_turns({**calls, "read": lambda: bytes_read.sum(), "matmul": lambda: square @ square}, rounds=rounds)
    bandwidth = nbytes / Spread.of(seconds["read"]).median
    rate = 2 * 1024**3 / Spread.of(seconds["matmul"]).median
    rows = []
    for name in calls:
        time, ratio = Spread.of(seconds[name]), speedup(seconds[plain_name], seconds[name])
        rows.append(
            {
                "case": case,
                "dtype": str(dtype).removeprefix("torch."),
                "call": name,
                "ms": time.median * 1e3,
                "ms_quartiles": [time.low * 1e3, time.high * 1e3],
                "ratio": ratio.median,
                "ratio_quartiles": [ratio.low, ratio.high],
                "gb_per_s": nbytes / time.median / 1e9,
                "share_of_bandwidth": nbytes / time.median / bandwidth,
                "share_of_matmul": flops / time.median / rate,
                "share_of_error_budget": shares[name],
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {options.threads} threads, {options.slots} slots, {options.rounds} rounds")
    print(f"{'case':18} {'dtype':9} {'call':20} {'ms (quartiles)':>24} {'ratio (quartiles)':>20}", end="")
    print(f" {'GB/s':>6} {'of read':>8} {'of mm':>6} {'of budget':>9}")
    results = []
    for dtype in TARGETS:
        cases: list[tuple[str, Any]] = [("32/8 heads, 128", gqa_case(options.slots, dtype))]
        cases += [(f"latent, {heads} heads", latent_case(options.slots, dtype, heads)) for heads in (32, 128)]
        for case, inputs in cases:
            for row in measure(case, *inputs, options.rounds):
                results.append(row)
                (low, high), (ratio_low, ratio_high) = row["ms_quartiles"], row["ratio_quartiles"]
                print(
                    f"{row['case']:18} {row['dtype']:9} {row['call']:20} {row['ms']:8.2f} ({low:6.2f}-{high:6.2f})"
                    f" {row['ratio']:6.2f} ({ratio_low:5.2f}-{ratio_high:5.2f})  {row['gb_per_s']:6.1f}"
                    f" {row['share_of_bandwidth']:8.0%} {row['share_of_matmul']:6.0%}"
                    f" {row['share_of_error_budget']:9.0%}",
                    flush=True,
                )
    for row in results:
        if row["call"] == "decode_attention":
            target = TARGETS[getattr(torch, row["dtype"])]
            verdict = "reached" if row["ratio"] >= target else "missed"
            print(f"target for {row['dtype']}: {target:g}x of sdpa(enable_gqa): {verdict} ({row['ratio']:.2f}x)")
    print(json.dumps({"benchmark": "cpu_decode", "torch": torch.__version__, **vars(options), "results": results}))


if __name__ == "__main__":
    main()
