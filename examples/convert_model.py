"""Convert SmolLM2-135M into a low-rank model at many ranks, rope dims and by both methods, and draw what it costs.

    python -m examples.convert_model --output out/conversion

Real weights and real text, no downloads. The model is calibrated once; every conversion reuses the statistics.
With ``--methods loss_optimal curvature`` the curvature of the loss is gathered once, which takes minutes; ranks and
rope dims then differ between layers, and with ``--refit`` output projections are refitted. Calibration and held-out
text are different help topics of Python's documentation. Prints one row per conversion and the full report of
the last one; saves ``conversion.json`` and, with matplotlib, ``conversion.png``.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path
from typing import Any

import torch

from examples import smollm2
from fastattn import LowRankConfig, to_low_rank_
from fastattn.convert import calibrate, calibrate_curvature, held_out_loss

RANKS = (64, 96, 128, 160, 224, 288)
ROPE_DIMS = (32, 64, 96)
METHODS = ("loss_optimal", "plain_svd")
STYLES = {"loss_optimal": "o-", "plain_svd": "s--", "curvature": "^-"}


def split_text(tokenizer: Any, calibration_tokens: int, held_out_tokens: int, length: int) -> tuple[torch.Tensor, ...]:
    """Disjoint sequences ``[N, length]``: the first three quarters of the text for calibration, the last held out."""
    ids = tokenizer(smollm2.long_text(), return_tensors="pt", verbose=False).input_ids[0]
    border = ids.numel() * 3 // 4
    parts = []
    for part, wanted in ((ids[:border], calibration_tokens), (ids[border:], held_out_tokens)):
        sequences = part[: part.numel() // length * length].view(-1, length)
        count = min(max(wanted // length, 1), len(sequences))
        spread = torch.linspace(0, len(sequences) - 1, count).round().long()
        parts.append(sequences[spread])
    return tuple(parts)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="values of kv_lora_rank")
    parser.add_argument("--rope-dims", type=int, nargs="+", default=ROPE_DIMS, help="values of qk_rope_head_dim")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=tuple(STYLES))
    parser.add_argument("--refit", action="store_true", help="with curvature: fit the output projections too")
    parser.add_argument("--calibration-tokens", type=int, default=16384)
    parser.add_argument("--held-out-tokens", type=int, default=2048)
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--output", type=Path, default=Path("out/conversion"))
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    started = time.perf_counter()
    model, tokenizer = smollm2.load()
    calibration, held_out = split_text(
        tokenizer, arguments.calibration_tokens, arguments.held_out_tokens, arguments.length
    )
    gather = calibrate_curvature if "curvature" in arguments.methods else calibrate
    statistics = gather(model, calibration)
    original = held_out_loss(model, held_out)
    print(f"{calibration.numel()} calibration and {held_out.numel()} held-out tokens; original loss {original:.4f}")
    print(f"{'method':>12} {'rope':>5} {'rank':>5} {'loss':>8} {'bytes/token':>12} {'less':>6} {'seconds':>8}")
    rows, report = [], None
    for rope_dim in arguments.rope_dims:
        for method in arguments.methods:
            for rank in arguments.ranks:
                options = {"rank_allocation": "global", "refit": arguments.refit} if method == "curvature" else {}
                config = LowRankConfig(
                    kv_lora_rank=rank, qk_rope_head_dim=rope_dim, method=method, statistics="parallel", **options
                )
                converted = copy.deepcopy(model)
                report = to_low_rank_(converted, config, statistics, progress=False)
                loss = held_out_loss(converted, held_out)
                saved = 1 - report.cache_bytes_after / report.cache_bytes_before
                rows.append(
                    {
                        "method": method,
                        "qk_rope_head_dim": rope_dim,
                        "kv_lora_rank": rank,
                        "loss": loss,
                        "cache_bytes": report.cache_bytes_after,
                        "cache_bytes_original": report.cache_bytes_before,
                        "joint_error": sum(layer.joint_error for layer in report.layers) / len(report.layers),
                    }
                )
                print(
                    f"{method:>12} {rope_dim:>5} {rank:>5} {loss:>8.4f} {report.cache_bytes_after:>12} {saved:>6.1%} "
                    f"{report.seconds:>8.1f}",
                    flush=True,
                )
    print(report or "")
    arguments.output.mkdir(parents=True, exist_ok=True)
    result = {
        "original_loss": original,
        "calibration_tokens": calibration.numel(),
        "held_out_tokens": held_out.numel(),
        "rows": rows,
    }
    (arguments.output / "conversion.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(result, arguments.output / "conversion.png")
    print(f"{time.perf_counter() - started:.0f} s; saved to {arguments.output}")


def draw(result: dict[str, Any], path: Path) -> None:
    """Held-out loss over cached bytes, one panel per number of rope dims."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        print("no figure: matplotlib is not installed")
        return
    rope_dims = sorted({row["qk_rope_head_dim"] for row in result["rows"]})
    figure = Figure(figsize=(4 * len(rope_dims), 3.5), layout="constrained")
    axes = figure.subplots(1, len(rope_dims), sharey=True, squeeze=False)[0]
    for axis, rope_dim in zip(axes, rope_dims, strict=True):
        for method, style in STYLES.items():
            rows = [r for r in result["rows"] if (r["qk_rope_head_dim"], r["method"]) == (rope_dim, method)]
            if not rows:
                continue
            axis.plot([r["kv_lora_rank"] for r in rows], [r["loss"] for r in rows], style, label=method)
        axis.axhline(result["original_loss"], color="gray", linewidth=1, label="original")
        axis.set(title=f"{rope_dim} rope dims", xlabel="kv_lora_rank")
        axis.set_yscale("log")
    axes[0].set_ylabel("held-out loss (nats per token)")
    axes[0].legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
