"""Keep what ``make bench`` measured: ``python -m benchmarks.history out/bench.json``.

Adds one line of JSON to ``benchmarks/results/history.jsonl`` (date, revision, machine, versions; per case the median
time, the share of the roofline and the speedup over plain PyTorch) and draws ``benchmarks/results/history.png``: the
speedup over plain PyTorch of every case over the runs. Times of different machines are not comparable; that ratio is,
roughly.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.studies import _common as common

RESULTS = Path(__file__).resolve().parent / "results"


def record(report: dict[str, Any], revision: str) -> dict[str, Any]:
    """One line of history from pytest-benchmark's report."""
    cases = {}
    for benchmark in report["benchmarks"]:
        extra = benchmark["extra_info"]
        cases[benchmark["params"]["name"]] = {
            "median_us": round(1e6 * benchmark["stats"]["median"], 2),
            "iqr_us": round(1e6 * benchmark["stats"]["iqr"], 2),
            "share_of_roofline": round(extra["share_of_roofline"], 4),
            "speedup_over_plain": round(extra["speedup_over_plain"], 3),
        }
    if not cases:
        raise SystemExit("the report holds no benchmark")
    extra = report["benchmarks"][0]["extra_info"]
    return {
        "date": report["datetime"][:10],
        "revision": revision,
        "machine": report["machine_info"]["cpu"].get("brand_raw", report["machine_info"]["machine"]),
        "threads": extra["threads"],
        "torch": extra["torch"],
        "python": report["machine_info"]["python_version"],
        "cases": cases,
    }


def plot(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Speedup over plain PyTorch, a small panel per operator or module."""
    groups: dict[str, list[str]] = {}
    for name in lines[-1]["cases"]:
        groups.setdefault(name.rstrip("0123456789").rsplit("-", 1)[0].split("-")[0], []).append(name)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = 4
    rows = -(-len(groups) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(4 * columns, 2.6 * rows), squeeze=False, layout="constrained"
    )
    labels = [f"{line['date'][5:]}\n{line['revision'][:7]}" for line in lines]
    for axis, (group, names) in zip(axes.flat, groups.items(), strict=False):
        for name, color in zip(names, common.COLORS, strict=False):
            points = [
                (i, line["cases"][name]["speedup_over_plain"]) for i, line in enumerate(lines) if name in line["cases"]
            ]
            axis.plot(*zip(*points, strict=True), marker="o", markersize=4, color=color, label=name)
        axis.axhline(1.0, color="#777777", linewidth=0.8, linestyle="--")
        axis.set_xticks(range(len(lines)), labels, fontsize=7)
        axis.set_yscale("log")
        axis.set_title(group, fontsize=10)
        axis.legend(fontsize=7, frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in list(axes.flat)[len(groups) :]:
        axis.set_visible(False)
    figure.supylabel("speedup over plain PyTorch, same run (log scale; dashed: level)", fontsize=9)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("report", type=Path, help="what pytest --benchmark-json wrote")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=RESULTS.parent, check=False)
    line = record(json.loads(given.report.read_text()), git.stdout.strip() or "unknown")
    given.results.mkdir(parents=True, exist_ok=True)
    history = given.results / "history.jsonl"
    with history.open("a") as file:
        file.write(json.dumps(line) + "\n")
    plot([json.loads(text) for text in history.read_text().splitlines()], given.results / "history.png")
    print(f"added to {history}")


if __name__ == "__main__":
    main()
