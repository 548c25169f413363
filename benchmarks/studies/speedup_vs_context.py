"""Decoding speed against context length: multi-head against low-rank attention (TransMLA, arXiv 2502.07864, Figure 5).

``python -m benchmarks.studies.speedup_vs_context [--quick] [--out DIR] [--predict h200]``

One decoder layer of LLaMA-2-7B's shape (attention and MLP) decodes one token per sequence: multi-head attention over
a full cache (the baseline), low-rank attention (rank 512 + 64 rope dims) with full-rank and with rank-512 queries, and
the latter over a cache compressed to an eighth of the context. Two questions:

- ``latency``: the same batch for all;
- ``throughput``: as many sequences as a device's memory holds beside the weights of all 32 layers (at most 256).

Beside each measurement stands a roofline: every matrix and cache read once at the measured bandwidth, every product at
the measured matrix rate, the slower of the two per part. The same model with a GPU's figures gives the curve to expect
there, marked as a prediction. The published curves are end-to-end serving on a 64 GB device.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.studies import _common as common
from fastattn import CompressedKVCache, LowRankAttention, Rotary
from fastattn.advice import HARDWARE, Hardware, measured_cpu


@dataclass(frozen=True)
class Shape:
    """LLaMA-2-7B's decoder layer, and the low-rank attention in its place."""

    hidden: int = 4096
    layers: int = 32
    heads: int = 32
    dim: int = 128
    mlp: int = 11008
    rank: int = 512
    query_rank: int = 512
    nope: int = 128
    rope: int = 64


LLAMA = Shape()
TINY = Shape(64, 2, 4, 16, 96, 32, 32, 16, 8)
KINDS = ("multi-head", "full-rank Q", "Q = 512", "Q = 512, 1/8 of the tokens")
WEIGHTS = 6.74e9 * 2  # bytes of the model in half precision
MOST_SEQUENCES = 256
MODES = ("latency", "throughput")


@dataclass(frozen=True)
class Part:
    """One matrix product of a step: bytes that are read once per step, bytes per sequence, operations per sequence."""

    shared_bytes: float
    bytes_each: float
    operations_each: float


def parts(kind: str, context: int, shape: Shape = LLAMA) -> list[Part]:
    """What one layer reads and computes for one new token per sequence, in half precision."""

    def matrix(rows: int, columns: int) -> Part:
        return Part(2.0 * rows * columns, 0.0, 2.0 * rows * columns)

    mlp = [matrix(shape.hidden, shape.mlp)] * 3
    if kind == "multi-head":
        cache = Part(0.0, 2.0 * cached(kind, context, shape), 4.0 * context * shape.heads * shape.dim)
        return [*mlp, *[matrix(shape.hidden, shape.hidden)] * 4, cache]
    query = shape.heads * (shape.nope + shape.rope)
    queries = (
        [matrix(shape.hidden, query)]
        if kind == "full-rank Q"
        else [matrix(shape.hidden, shape.query_rank), matrix(shape.query_rank, query)]
    )
    tokens = context // 8 if kind.endswith("tokens") else context
    cache = Part(0.0, 2.0 * cached(kind, context, shape), 2.0 * tokens * shape.heads * (2 * shape.rank + shape.rope))
    return [
        *mlp,
        *queries,
        matrix(shape.hidden, shape.rank + shape.rope),
        matrix(shape.rank, shape.heads * (shape.nope + shape.dim)),
        matrix(shape.heads * shape.dim, shape.hidden),
        cache,
    ]


def cached(kind: str, context: int, shape: Shape = LLAMA) -> int:
    """Numbers that one sequence keeps in one layer's cache."""
    if kind == "multi-head":
        return context * 2 * shape.heads * shape.dim
    return (context // 8 if kind.endswith("tokens") else context) * (shape.rank + shape.rope)


def roofline(kind: str, context: int, batch: int, hardware: Hardware, shape: Shape = LLAMA) -> float:
    """Seconds of one layer's step at best."""
    return sum(
        max(
            (part.shared_bytes + batch * part.bytes_each) / hardware.bandwidth,
            batch * part.operations_each / hardware.matrix_rate,
        )
        for part in parts(kind, context, shape)
    )


def sequences(kind: str, context: int, memory: float, shape: Shape = LLAMA) -> int:
    """How many sequences' caches fit beside the weights."""
    room = memory - WEIGHTS
    return max(1, min(MOST_SEQUENCES, int(room / (2 * shape.layers * cached(kind, context, shape)))))


class Layer(nn.Module):
    """A decoder layer without its norms: attention and a gated shape.mlp."""

    def __init__(self, kind: str, dtype: torch.dtype, device: str, shape: Shape = LLAMA) -> None:
        super().__init__()
        self.shape = shape
        options = {"bias": False, "dtype": dtype, "device": device}
        self.low_rank = kind != "multi-head"
        if self.low_rank:
            self.attention: nn.Module = LowRankAttention(
                shape.hidden,
                shape.heads,
                kv_lora_rank=shape.rank,
                q_lora_rank=None if kind == "full-rank Q" else shape.query_rank,
                qk_nope_head_dim=shape.nope,
                qk_rope_head_dim=shape.rope,
                v_head_dim=shape.dim,
                dtype=dtype,
                device=device,
            )
        else:
            self.attention = nn.ModuleList(nn.Linear(shape.hidden, shape.hidden, **options) for _ in range(4))
            self.rotary = Rotary(10000.0 ** (-torch.arange(0, shape.dim, 2) / shape.dim)).to(device)
        self.gate, self.up = (nn.Linear(shape.hidden, shape.mlp, **options) for _ in range(2))
        self.down = nn.Linear(shape.mlp, shape.hidden, **options)

    def forward(self, x: Tensor, cache: CompressedKVCache) -> Tensor:
        if self.low_rank:
            x = x + self.attention(x, cache=cache)
        else:
            project_q, project_k, project_v, project_o = self.attention  # type: ignore[misc]
            position = cache.tokens_seen[:, None]
            query, key, value = (
                project(x).view(x.shape[0], 1, self.shape.heads, self.shape.dim).transpose(1, 2)
                for project in (project_q, project_k, project_v)
            )
            out = cache.attend(0, self.rotary.rotate(query, position), self.rotary.rotate(key, position), value)
            x = x + project_o(out.transpose(1, 2).reshape(x.shape[0], 1, -1))
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))

    def full_cache(self, tokens: int, batch: int, dtype: torch.dtype, device: str) -> CompressedKVCache:
        """A cache that already holds ``tokens`` of every sequence, of random content, with room for 512 steps."""
        options = {"batch_size": batch, "dtype": dtype, "device": device, "interval": 512}
        if self.low_rank:
            cache = self.attention.make_cache("knorm", tokens, **options)  # type: ignore[operator]
        else:
            cache = CompressedKVCache(
                "knorm", tokens, num_layers=1, num_kv_heads=self.shape.heads, head_dim=self.shape.dim, **options
            )
        cache.keys(0).normal_()
        if not self.low_rank:
            cache.values(0).normal_()
        cache.lengths(0).fill_(tokens)
        cache.positions(0)[:, :, :tokens] = torch.arange(tokens, dtype=torch.int32, device=device)
        cache.tokens_seen.fill_(tokens)
        cache.columns.fill_(tokens)
        return cache


def measure(
    context: int, batches: dict[str, int], layers: dict[str, Layer], device: str, rounds: int
) -> dict[str, float]:
    """Median seconds of one layer's step of each kind; the caches are too large for the processor's own."""
    dtype = torch.bfloat16
    steps: dict[str, Callable[[], Tensor]] = {}
    for kind, layer in layers.items():
        tokens = context // 8 if kind.endswith("tokens") else context
        cache = layer.full_cache(tokens, batches[kind], dtype, device)
        x = torch.randn(batches[kind], 1, layer.shape.hidden, dtype=dtype, device=device)
        steps[kind] = lambda layer=layer, x=x, cache=cache: layer(x, cache)  # type: ignore[misc]
        out = steps[kind]()
        if not bool(out.isfinite().all()):
            raise SystemExit(f"{kind} is wrong at context {context}: its output is not finite")
    return common.median_seconds(steps, rounds, device)


def main(arguments: list[str] | None = None) -> None:
    options = common.parser(__doc__.splitlines()[0])
    options.add_argument(
        "--memory-gb", type=float, default=64.0, help="memory that weights and caches share, 10^9 bytes"
    )
    options.add_argument("--predict", nargs="*", default=["a100", "h200"], choices=sorted(HARDWARE))
    given = options.parse_args(arguments)
    given.memory_gb = given.memory_gb or (24.0 if given.quick else 64.0)
    contexts = (1024, 4096) if given.quick else (1024, 2048, 4096, 8192, 16384, 32768)
    study(given, contexts, LLAMA)


def dry_run(out: Path) -> None:
    """Every code path, at a size whose times mean nothing."""
    given = common.parser("").parse_args(["--out", str(out), "--device", "cpu", "--fresh", "--quick"])
    given.memory_gb, given.predict = (WEIGHTS + 1e6) / 1e9, ["h200"]
    study(given, (64, 128), TINY)


def study(given: argparse.Namespace, contexts: tuple[int, ...], shape: Shape) -> None:
    hardware = measured_cpu() if given.device == "cpu" else _gpu(given.device)
    note = common.conditions(
        given.device,
        phase="decode",
        layers=f"1 of {shape.layers} timed",
        dtype="bfloat16",
        mode="eager, median of interleaved rounds",
        memory=f"{given.memory_gb:g} GB, at most {MOST_SEQUENCES} sequences",
    )
    rows = common.Rows(
        given.out / "speedup_vs_context.csv",
        ("mode", "context", "kind"),
        ("batch", "milliseconds", "roofline_ms"),
        note,
        given.fresh,
    )
    with torch.no_grad():
        torch.manual_seed(0)
        layers: dict[str, Layer] = {}
        for mode, context in tqdm([(m, c) for m in MODES for c in contexts], desc="decoder layer"):
            if not any(rows.missing(mode=mode, context=context, kind=kind) for kind in KINDS):
                continue
            layers = layers or {kind: Layer(kind, torch.bfloat16, given.device, shape).eval() for kind in KINDS}
            memory = 1e9 * given.memory_gb
            batches = {kind: sequences(kind, context, memory, shape) if mode == "throughput" else 1 for kind in KINDS}
            times = measure(context, batches, layers, given.device, 3 if given.quick else 9)
            for kind, seconds in times.items():
                rows.add(
                    mode=mode,
                    context=context,
                    kind=kind,
                    batch=batches[kind],
                    milliseconds=1e3 * seconds,
                    roofline_ms=1e3 * roofline(kind, context, batches[kind], hardware, shape),
                )
    report(rows, given, note)


def _gpu(device: str) -> Hardware:
    name = torch.cuda.get_device_name(device).lower()
    for key, known in HARDWARE.items():
        if key in name:
            return known
    raise SystemExit(f"no figures for {name}: add it to fastattn.advice.HARDWARE")


def report(rows: common.Rows, given: argparse.Namespace, note: str) -> None:
    found = {(r["mode"], int(r["context"]), r["kind"]): r for r in rows}  # type: ignore[attr-defined]
    contexts = sorted({key[1] for key in found})

    def speed(mode: str, context: int, kind: str, column: str) -> float:
        """Tokens per second of one layer."""
        row = found[mode, context, kind]
        return int(row["batch"]) / float(row[column]) * 1e3

    body = []
    curves: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for mode, context, kind in found:
        ratio, bound = (
            speed(mode, context, kind, column) / speed(mode, context, KINDS[0], column)
            for column in ("milliseconds", "roofline_ms")
        )
        row = found[mode, context, kind]
        body.append(
            [mode, context, kind, row["batch"], float(row["milliseconds"]), float(row["roofline_ms"]), ratio, bound]
        )
        curves.setdefault((mode, kind), []).append((context, ratio, bound))
    text = common.table(
        ["mode", "context", "attention", "batch", "ms/step", "roofline ms", "speedup", "roofline speedup"], body
    )
    text += "\n\nPrediction, not measured: speedup in throughput at the given memory, from a device's figures\n"
    text += common.table(["device", "context", *KINDS[1:]], list(predictions(given, contexts)))
    shown, axes = common.figure(2)
    reference = common.published("speedup_vs_context")
    for axis, mode in zip(axes, MODES, strict=True):
        ends = []
        for kind, color in zip(KINDS, common.COLORS, strict=False):
            contexts_of, measured, bounds = zip(*curves[mode, kind], strict=True)
            axis.plot(contexts_of, measured, color=color, marker="o", markersize=4, linewidth=1.4)
            axis.plot(contexts_of, bounds, "--", color=color, linewidth=0.9)
            ends.append((contexts_of[-1], measured[-1], kind, color))
        if mode == "throughput":
            for column, text_label, style in (
                ("full_rank_q", "published, full-rank Q", ":"),
                ("low", "published, Q = 512", "-."),
            ):
                line = [(int(p["context"]), _published_ratio(p, column)) for p in reference]
                axis.plot(*zip(*line, strict=True), style, color="#999999", linewidth=1.4)
                ends.append((*line[-1], text_label, "#555555"))
        axis.set(
            title=("Same batch of 1: latency of a layer" if mode == "latency" else "Same memory: tokens per second")
            + " (dashed: roofline)",
            xlabel="context (tokens)",
            ylabel="speedup over multi-head attention",
            xscale="log",
            yscale="log",
        )
        ticks = sorted({*contexts, *(int(p["context"]) for p in reference if mode == "throughput")})
        axis.set_xticks(ticks, [f"{context / 1024:g}k" for context in ticks])
        axis.set_yticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
        axis.minorticks_off()
        axis.set_xlim(ticks[0] * 0.9, ticks[-1] * 5)
        common.label_ends(axis, ends)
    common.finish(given.out, "speedup_vs_context", text, shown, note)


def predictions(given: argparse.Namespace, contexts: list[int]) -> list[list[object]]:
    lines: list[list[object]] = []
    for name in given.predict:
        for context in contexts:
            tokens_per_second = {}
            for kind in KINDS:
                batch = sequences(kind, context, 1e9 * given.memory_gb)
                tokens_per_second[kind] = batch / roofline(kind, context, batch, HARDWARE[name])
            lines.append(
                [name, context, *(tokens_per_second[kind] / tokens_per_second[KINDS[0]] for kind in KINDS[1:])]
            )
    return lines


def _published_ratio(point: dict[str, str], column: str) -> float:
    if column == "low":
        return float(point["low_rank_q_512_ratio"])
    return float(point[column]) / float(point["baseline"])


if __name__ == "__main__":
    main()
