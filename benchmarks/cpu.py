"""The CPU operators against the machine's limits, memory bandwidth and matrix rate, and against their peers.

    python -m benchmarks.cpu [--only decode latent batch score compact qk codes] [--rounds 15] [--threads N]

Every result is checked against float64 before anything is timed. What is compared takes turns within a case, together
with a read of as many bytes and a large matrix product: the limits of that moment. Medians of the rounds' ratios, with
quartiles. Prints a table, its targets, and one line of JSON. Set ``FASTATTN_NATIVE=0`` for PyTorch's operators;
``--processor-time`` counts what the processes of a busy machine do not take away, on one thread.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks import cpu_codes
from benchmarks.cpu_decode import HEAD_DIM, HEADS, KV_HEADS, check, exactly, gqa_case, latent_case
from benchmarks.lib.timing import Spread, speedup, take_turns
from fastattn import ops
from fastattn.ops import reference
from fastattn.ops.cpu import native

F32, BF16 = torch.float32, torch.bfloat16


@dataclass
class Case:
    """Calls by name, the peer first and ours second; what must be read, computed and reached.

    ``targets``: least share of the read bandwidth (``read``), of the matrix rate (``matmul``), or ratio (``peer``).
    """

    name: str
    dtype: torch.dtype
    calls: dict[str, Callable[[], Any]]
    bytes: int
    operations: int
    targets: dict[str, float]
    checked: dict[str, float]  # errors in shares of what is allowed


def _checked(calls: dict[str, Callable[[], Tensor]], exact: Tensor, name: str) -> dict[str, float]:
    (_, plain), *others = calls.items()
    expected = plain()
    return {call: check(f"{name} {call}", run(), expected, exact) for call, run in others}


def decode(slots: int) -> Iterator[Case]:
    for dtype, share, ratio in ((F32, 0.75, 6.0), (BF16, 0.60, 16.0)):
        calls, exact, nbytes, operations = gqa_case(slots, dtype)
        name = f"decode {HEADS}/{KV_HEADS} x {slots}"
        yield Case(name, dtype, calls, nbytes, operations, {"read": share, "peer": ratio}, _checked(calls, exact, name))


def batch(slots: int) -> Iterator[Case]:
    for rows, ratio in ((16, 3.0), (1, 1.5)):
        for dtype in (F32, BF16):
            query = torch.randn(rows, HEADS, 1, HEAD_DIM).to(dtype)
            key, value = (torch.randn(rows, KV_HEADS, 1024, HEAD_DIM).to(dtype) for _ in range(2))
            lengths = torch.full((rows, KV_HEADS), 1024, dtype=torch.int32)
            calls = {
                "sdpa(enable_gqa)": _sdpa(query, key, value),
                "decode_attention": _decode(query, key, value, lengths),
            }
            grouped = query.view(rows, KV_HEADS, -1, HEAD_DIM)
            exact = torch.stack(
                [exactly(grouped[b, h], key[b, h], value[b, h], HEAD_DIM**-0.5) for b in range(rows) for h in range(8)]
            ).view(query.shape)
            name, nbytes = f"decode {rows} rows x 1024", 2 * key.nbytes
            operations = 4 * query.numel() * 1024
            yield Case(name, dtype, calls, nbytes, operations, {"peer": ratio}, _checked(calls, exact, name))


def _sdpa(query: Tensor, key: Tensor, value: Tensor) -> Callable[[], Tensor]:
    return lambda: functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)


def _decode(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Callable[[], Tensor]:
    def call() -> Tensor:
        out = ops.decode_attention(query, key, value, lengths)
        assert isinstance(out, Tensor)
        return out

    return call


def latent(slots: int) -> Iterator[Case]:
    for dtype, share in ((F32, 0.80), (BF16, 0.65)):
        calls, exact, nbytes, operations = latent_case(slots, dtype, HEADS)
        name = f"latent {HEADS} heads x {slots}"
        yield Case(name, dtype, calls, nbytes, operations, {"matmul": share}, _checked(calls, exact, name))


def score(slots: int) -> Iterator[Case]:
    """Against the definitions in plain PyTorch. kvpress has its own environment: ``benchmarks.kvpress_parity``."""
    tokens = min(slots, 16384)
    lengths = torch.full((1, KV_HEADS), tokens, dtype=torch.int32)
    for dtype in (F32, BF16):
        key = torch.randn(1, KV_HEADS, tokens, HEAD_DIM).to(dtype)
        for name in ("score_knorm", "score_key_diff"):
            function, definition = getattr(ops, name), getattr(reference, name)
            calls = {
                "definition": lambda definition=definition, key=key: definition(key, lengths),
                name: lambda function=function, key=key: function(key, lengths),
            }
            case = f"{name} x {tokens}"
            shares = _checked(calls, definition(key.double(), lengths), case)
            yield Case(case, dtype, calls, key.nbytes, 4 * key.numel(), {"peer": 3.0}, shares)


def compact(slots: int) -> Iterator[Case]:
    """Selection included, against copying the kept bytes."""
    tokens, budget = min(slots, 16384), min(slots, 16384) // 4
    for dtype in (F32, BF16):
        key, value = (torch.randn(1, KV_HEADS, tokens, HEAD_DIM).to(dtype) for _ in range(2))
        positions = torch.arange(tokens, dtype=torch.int32).expand(1, KV_HEADS, -1).contiguous()
        scores, lengths = torch.randn(1, KV_HEADS, tokens), torch.empty(1, KV_HEADS, dtype=torch.int32)
        index = scores.topk(budget, -1).indices.sort(-1).values[..., None].expand(-1, -1, -1, HEAD_DIM)
        kept, room = key.gather(2, index), torch.empty_like(key[:, :, :budget])

        def run(
            key: Tensor = key, value: Tensor = value, positions: Tensor = positions, rest: tuple = (lengths, scores)
        ):
            lengths, scores = rest
            lengths.fill_(tokens)
            ops.cache_compact_(key, value, positions, lengths, scores, budget)

        def copy(kept: Tensor = kept, room: Tensor = room) -> None:
            room.copy_(kept)
            room.copy_(kept)

        run()
        if not torch.equal(key[:, :, :budget], kept):
            raise SystemExit("cache_compact_: wrong result")
        calls = {"copy of what is kept": copy, "cache_compact_": run}
        yield Case(f"compact {tokens} -> {budget}", dtype, calls, 4 * kept.nbytes, 0, {"peer": 0.5}, {})


def qk(slots: int) -> Iterator[Case]:
    for dtype in (F32, BF16):
        query, key = (torch.randn(1, HEADS, 512, HEAD_DIM).to(dtype) for _ in range(2))
        calls = {
            "bmm": lambda query=query, key=key: torch.bmm(query[0], key[0].mT)[None],
            "qk_scores": lambda query=query, key=key: ops.qk_scores(query, key),
        }
        exact = query.double() @ key.double().mT
        operations, nbytes = 2 * HEADS * 512 * 512 * HEAD_DIM, 2 * query.nbytes + HEADS * 512 * 512 * dtype.itemsize
        yield Case("qk 32 x 512 x 512", dtype, calls, nbytes, operations, {"peer": 0.97}, _checked(calls, exact, "qk"))


def codes(slots: int) -> Iterator[Case]:
    """Quantised storage against the same numbers in full precision."""
    return (Case(*case) for case in cpu_codes.cases(slots))


CASES = {
    "decode": decode, "batch": batch, "latent": latent, "score": score, "compact": compact, "qk": qk, "codes": codes
}  # fmt: skip


def measure(case: Case, rounds: int, clock: Callable[[], float] | None = None) -> dict[str, Any]:
    """Times the case's calls in turns with its limits; the numbers are of ours against the peer."""
    peer, ours = list(case.calls)[:2]
    data, square = torch.ones(max(case.bytes // 4, 1)), torch.randn(1024, 1024).to(case.dtype)
    limits = {"read": lambda: data.sum(), "matmul": lambda: square @ square}
    seconds = take_turns({**case.calls, **limits}, rounds=rounds, clock=clock)
    read = Spread.of(seconds["read"]).median
    rate = 2 * 1024**3 / Spread.of(seconds["matmul"]).median
    time, ratio = Spread.of(seconds[ours]), speedup(seconds[peer], seconds[ours])
    shares = speedup(seconds["read"], seconds[ours])
    reached = {"peer": ratio.median, "read": shares.median, "matmul": case.operations / time.median / rate}
    return {
        "case": case.name,
        "dtype": str(case.dtype).removeprefix("torch."),
        "peer": peer,
        "ms": asdict(time),
        "peer_ms": asdict(Spread.of(seconds[peer])),
        "ratio": asdict(ratio),
        "of_read": asdict(shares),
        "of_matmul": reached["matmul"],
        "read_gb_per_s": case.bytes / read / 1e9,
        "matmul_gflops": rate / 1e9,
        "error_share": max(case.checked.values(), default=0.0),
        "targets": {name: [least, reached[name]] for name, least in case.targets.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--slots", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--processor-time", action="store_true")
    options = parser.parse_args()
    if options.processor_time and options.threads != 1:
        parser.error("--processor-time needs --threads 1: it adds up what all threads take")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    branch = "native kernels" if native.operators() else "PyTorch's operators"
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {options.threads} threads, {branch}")
    print(f"{'case':24} {'dtype':9} {'ms (quartiles)':>25} {'against':>21} {'ratio (quartiles)':>20}", end="")
    print(f" {'of read':>8} {'of mm':>6} {'read GB/s':>9} {'mm GFLOPS':>9} {'error':>6}  targets")
    results = []
    for name in options.only:
        for case in CASES[name](options.slots):
            row = measure(case, options.rounds, time.process_time if options.processor_time else None)
            results.append(row)
            ms, ratio = row["ms"], row["ratio"]
            spread = f"({ratio['low']:5.2f}-{ratio['high']:5.2f})"
            marks = [
                f"{kind} {least:g}: {'reached' if got >= least else 'missed'}"
                for kind, (least, got) in row["targets"].items()
            ]
            print(
                f"{row['case']:24} {row['dtype']:9} {ms['median'] * 1e3:9.3f} ({ms['low'] * 1e3:6.2f}-"
                f"{ms['high'] * 1e3:6.2f}) {row['peer']:>21} {ratio['median']:6.2f} {spread}"
                f" {row['of_read']['median']:8.0%} {row['of_matmul']:6.0%} {row['read_gb_per_s']:9.1f}"
                f" {row['matmul_gflops']:9.0f} {row['error_share']:6.0%}  {', '.join(marks)}",
                flush=True,
            )
    print(json.dumps({"benchmark": "cpu", "torch": torch.__version__, **vars(options), "results": results}))


if __name__ == "__main__":
    main()
