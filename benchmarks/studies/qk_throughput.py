"""Key-query product throughput against hidden size and heads (Anthony et al., arXiv 2401.14489).

``python -m benchmarks.studies.qk_throughput [--quick] [--out DIR]``

``batch * heads`` products ``(s, d) x (d, s)``: the library's ``bmm``, this project's ``qk_scores``, and the fused
``attention`` that never writes the scores (its operations are those of both its products). Results are checked before
they are timed; throughput is that of the median run, where the published points are the slowest of 200. On a GPU the
sweep is the published one (batch 4, s = 2048, hidden sizes up to 32768); on a CPU s and the heads are reduced.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.studies import _common as common
from fastattn import ops
from fastattn.advice import HARDWARE, Hardware, measured_cpu

HEADS = (24, 32, 40, 64, 80, 96)
KINDS = ("bmm", "qk_scores", "attention")


def sizes(device: str, quick: bool) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    """batch, s, heads, head dims."""
    if device.startswith("cuda"):
        return 4, 2048, HEADS[::5] if quick else HEADS, (64, 128, 256, 512) if quick else (64, 128, 192, 256, 384, 512)
    return (1, 256, (24, 96), (32, 64, 80, 128, 256)) if quick else (1, 512, HEADS, (32, 64, 80, 96, 128, 256, 512))


def measure(batch: int, s: int, heads: int, dim: int, dtype: torch.dtype, device: str, rounds: int) -> dict[str, float]:
    """Median seconds of each kind, after comparing their results."""
    query, key, value = (torch.randn(batch, heads, s, dim, device=device).to(dtype) for _ in range(3))
    flat_query, flat_key = query.flatten(0, 1), key.flatten(0, 1)
    exact = (query[:1, :1, :8].double() @ key[:1, :1].double().mT)[0, 0]
    allowed = 4 * torch.finfo(dtype).eps * float(exact.abs().max()) + 1e-4
    for name, got in (
        ("bmm", torch.bmm(flat_query, flat_key.mT)[0, :8]),
        ("qk_scores", ops.qk_scores(query, key)[0, 0, :8]),
    ):
        error = float((got.double() - exact).abs().max())
        if not error <= allowed:
            raise SystemExit(
                f"{name} is wrong at heads {heads}, head dim {dim}: error {error:.2e}, allowed {allowed:.2e}"
            )
    return common.median_seconds(
        {
            "bmm": lambda: torch.bmm(flat_query, flat_key.mT),
            "qk_scores": lambda: ops.qk_scores(query, key),
            "attention": lambda: ops.attention(query, key, value),
        },
        rounds,
        device,
    )


def hardware(device: str) -> Hardware | None:
    if device == "cpu":
        return measured_cpu()
    name = torch.cuda.get_device_name(device).lower()
    return next((known for key, known in HARDWARE.items() if key in name), None)


def main(arguments: list[str] | None = None) -> None:
    options = common.parser(__doc__.splitlines()[0]).parse_args(arguments)
    study(options, *sizes(options.device, options.quick))


def dry_run(out: Path) -> None:
    """Every code path, at a size whose times mean nothing."""
    options = common.parser("").parse_args(["--out", str(out), "--device", "cpu", "--fresh", "--quick"])
    study(options, 1, 32, (2, 4), (32, 64))


def study(options: argparse.Namespace, batch: int, s: int, heads_list: tuple[int, ...], dims: tuple[int, ...]) -> None:
    dtype = torch.bfloat16
    note = common.conditions(
        options.device,
        batch=batch,
        s=s,
        dtype="bfloat16",
        mode="eager, median of interleaved runs",
    )
    rows = common.Rows(
        options.out / "qk_throughput.csv",
        ("heads", "head_dim", "kind"),
        ("hidden_size", "milliseconds", "tflops", "roofline_tflops"),
        note,
        options.fresh,
    )
    known: Hardware | None = None
    points = [(a, d) for a in heads_list for d in dims if a * d <= 32768]
    for heads, dim in tqdm(points, desc="key-query products"):
        if not any(rows.missing(heads=heads, head_dim=dim, kind=kind) for kind in KINDS):
            continue
        known = known or hardware(options.device)  # measured in the run that it is compared with
        times = measure(batch, s, heads, dim, dtype, options.device, 5 if options.quick else 15)
        for kind, seconds in times.items():
            products = 2 if kind == "attention" else 1
            operations = products * 2.0 * batch * heads * s * s * dim
            rows.add(
                heads=heads,
                head_dim=dim,
                kind=kind,
                hidden_size=heads * dim,
                milliseconds=1e3 * seconds,
                tflops=operations / seconds / 1e12,
                roofline_tflops=roofline(known, s, dim),
            )
    report(rows, options, s, note)


def report(rows: common.Rows, options: argparse.Namespace, s: int, note: str) -> None:
    measured = {(int(r["heads"]), int(r["head_dim"]), r["kind"]): r for r in rows}  # type: ignore[attr-defined]
    found = {key: float(row["tflops"]) for key, row in measured.items()}
    bounds = {
        key[1]: float(row["roofline_tflops"]) for key, row in measured.items() if row["roofline_tflops"] != "None"
    }
    heads_list, dims = (sorted({key[i] for key in found}) for i in (0, 1))
    header = ["heads", "head dim", "hidden", *(f"{kind} TFLOP/s" for kind in KINDS), "roofline", "FLOP/byte"]
    body = []
    for heads in heads_list:
        for dim in dims:
            if (heads, dim, "bmm") in found:
                body.append(
                    [
                        heads,
                        dim,
                        heads * dim,
                        *(found[heads, dim, kind] for kind in KINDS),
                        bounds.get(dim),
                        s * dim / (2 * dim + s),
                    ]
                )
    shown, (left, right) = common.figure(2)
    plot_published(left)
    ends = []
    for kind, color in zip(KINDS, common.COLORS, strict=False):
        for heads in heads_list:
            line = [(dim, found[heads, dim, kind]) for dim in dims if (heads, dim, kind) in found]
            style = "-" if heads == heads_list[0] else "--" if heads == heads_list[-1] else ":"
            right.plot(*zip(*line, strict=True), style, color=color, marker="o", markersize=3, linewidth=1.2)
        ends.append((*line[-1], kind, color))
    if bounds:
        right.plot(dims, [bounds[dim] for dim in dims], color="#777777", linewidth=1)
        ends.append((dims[-1], bounds[dims[-1]], "roofline", "#777777"))
    right.set(
        title=f"Measured here: {heads_list[0]} heads solid, {heads_list[-1]} dashed",
        xlabel="head dim h/a",
        ylabel="TFLOP/s (10$^{12}$ operations per second)",
        xscale="log",
    )
    right.set_xticks(dims, [str(dim) for dim in dims])
    right.minorticks_off()
    right.set_xlim(dims[0] * 0.9, dims[-1] * 1.45)
    right.set_ylim(bottom=0)
    common.label_ends(right, ends)
    common.finish(options.out, "qk_throughput", common.table(header, body), shown, note)  # type: ignore[attr-defined]


def roofline(known: Hardware | None, s: int, dim: int) -> float | None:
    """TFLOP/s that bandwidth or matrix rate allow, whichever is lower: s d / (2 d + s) FLOP per byte at 2 bytes."""
    if known is None:
        return None
    return min(known.matrix_rate, known.bandwidth * s * dim / (2 * dim + s)) / 1e12


def plot_published(axis: object) -> None:
    points = common.published("qk_throughput")
    ends = []
    for heads, color in zip(HEADS, common.COLORS, strict=False):
        line = [(int(p["hidden_size"]), float(p["tflops"])) for p in points if int(p["heads"]) == heads]
        axis.plot(*zip(*line, strict=True), color=color, marker="o", markersize=3, linewidth=1.2)  # type: ignore[attr-defined]
        ends.append((*line[-1], f"a = {heads}", color))
    axis.set(  # type: ignore[attr-defined]
        title="Published: A100, s = 2048, batch 4 (arXiv 2401.14489)",
        xlabel="hidden size h",
        ylabel="TFLOP/s",
        xlim=(0, 37500),
        ylim=(0, 260),
    )
    common.label_ends(axis, ends)


if __name__ == "__main__":
    main()
