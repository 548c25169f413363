"""What the studies share: rows that survive an interruption, tables, conditions and plots."""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.timing import take_turns

PUBLISHED = Path(__file__).parent / "published"
# Okabe and Ito's colors, told apart by people with any color vision.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def parser(description: str) -> argparse.ArgumentParser:
    """Options that every study has."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--quick", action="store_true", help="small sizes: under 3 minutes on 2 cores")
    options.add_argument("--out", type=Path, default=Path("out"), help="folder for CSV, PNG and table")
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--fresh", action="store_true", help="measure again what an earlier run has measured")
    return options


class Rows:
    """Results in a CSV file, one line per measured point, written as soon as it is known.

    A study asks :meth:`missing` before it measures a point, so that an interrupted run goes on where it stopped.
    A file made under other conditions (another machine, other versions) is not mixed with new points: it raises.
    """

    def __init__(self, path: Path, keys: Sequence[str], values: Sequence[str], conditions: str, fresh: bool) -> None:
        self.path, self.keys, self.columns = path, list(keys), [*keys, *values]
        self.conditions = conditions
        self.rows: dict[tuple[str, ...], dict[str, str]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if fresh or not path.exists():
            self._write_all()
            return
        lines = path.read_text().splitlines()
        conditions_then = lines[0].removeprefix("# ") if lines else ""
        if conditions_then != conditions:
            raise SystemExit(
                f"{path} was measured under other conditions:\n  {conditions_then}\n  now: {conditions}\n"
                "Give --fresh to replace it, or another --out."
            )
        for row in csv.DictReader(lines[1:]):
            if None not in row.values():  # a line cut off by the interruption is measured again
                self.rows[self._key(row)] = row
        self._write_all()

    def _key(self, row: dict[str, Any]) -> tuple[str, ...]:
        return tuple(str(row[key]) for key in self.keys)

    def missing(self, **point: Any) -> bool:
        """True where this point is not yet measured."""
        return self._key(point) not in self.rows

    def add(self, **row: Any) -> None:
        """Record a point, on disk at once."""
        text = {column: _text(row[column]) for column in self.columns}
        self.rows[self._key(row)] = text
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self.columns).writerow(text)

    def __iter__(self) -> Iterable[dict[str, str]]:  # type: ignore[override]
        return iter(list(self.rows.values()))

    def _write_all(self) -> None:
        temporary = self.path.with_suffix(".tmp")
        with temporary.open("w", newline="") as file:
            file.write(f"# {self.conditions}\n")
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(self.rows.values())
        os.replace(temporary, self.path)


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def published(name: str) -> list[dict[str, str]]:
    """Rows of a published figure, kept beside the studies with their source."""
    lines = [line for line in (PUBLISHED / f"{name}.csv").read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


def conditions(device: str, **more: Any) -> str:
    """Where and how something was measured, in one line for plots and files."""
    if torch.device(device).type == "cuda":
        where = torch.cuda.get_device_name(device)
    else:
        where = f"{_processor()}, {torch.get_num_threads()} threads"
    extra = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in more.items())
    return f"{where}; torch {torch.__version__}; {extra}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def median_seconds(calls: Mapping[str, Callable[[], object]], rounds: int, device: str) -> dict[str, float]:
    """Median seconds of each call; the calls take turns, and a GPU is waited for."""

    def waited(call: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            call()
            torch.cuda.synchronize(device)

        return run if torch.device(device).type == "cuda" else call

    seconds = take_turns({name: waited(call) for name, call in calls.items()}, rounds=rounds, warmup=1)
    return {name: statistics.median(values) for name, values in seconds.items()}


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table in plain text, numbers to the right."""
    lines = [list(header), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(text)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def finish(out: Path, name: str, text: str, figure: Any, note: str) -> None:
    """Write the table and the plot, and show the table."""
    out.mkdir(parents=True, exist_ok=True)
    note = f"{note}; {datetime.date.today().isoformat()}"
    (out / f"{name}.txt").write_text(f"{text}\n\n{note}\n")
    figure.text(0.01, 0.005, note, fontsize=6.5, color="#555555", wrap=True)
    figure.savefig(out / f"{name}.png", dpi=150)
    print(f"\n{text}\n\n{note}\n\nwritten: {out / name}.csv, .png, .txt")


def figure(columns: int, width: float = 5.6, height: float = 4.6) -> tuple[Any, list[Any]]:
    """A row of axes with room for the conditions below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown, axes = pyplot.subplots(1, columns, figsize=(width * columns, height), squeeze=False)
    shown.subplots_adjust(left=0.09 if columns == 1 else 0.06, right=0.97, bottom=0.17, top=0.9, wspace=0.22)
    for axis in axes[0]:
        axis.title.set_fontsize(9)
        axis.grid(True, which="major", color="#dddddd", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    return shown, list(axes[0])


def label_ends(axis: Any, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Direct labels ``(x, y, text, color)`` at the ends of lines, moved apart where they would overlap."""
    to_pixels, height = axis.transData.transform, axis.bbox.height
    placed: list[float] = []
    for x, y, text, color in sorted(ends, key=lambda end: end[1]):
        pixel = to_pixels((x, y))[1]
        at = max([pixel, *(other + 0.045 * height for other in placed)])
        placed.append(at)
        shift = (at - pixel) * 72 / axis.figure.dpi
        axis.annotate(text, (x, y), xytext=(5, shift), textcoords="offset points", color=color, fontsize=8, va="center")
