"""The device check's JSON, table and plot, made from its lines: also from those of an interrupted run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.device import parts
from benchmarks.studies import _common as common


def gather(out: Path) -> dict[str, Any]:
    """The lines of ``out`` by step."""
    lines = parts.read(out)
    result: dict[str, Any] = {}
    for line in lines:
        if line["step"] == "conditions":
            result.update({key: value for key, value in line.items() if key not in ("step", "part")})
    checks = [line for line in lines if not line.get("ended") or line.get("error")]
    result["correctness"] = [line for line in checks if line["step"] == "correctness"]
    result["ceilings"] = [line for line in checks if line["part"] == "ceilings"]
    result["timing"] = [
        {**line.pop("timed", {}), **line} if line.get("error") else line["timed"]
        for line in checks
        if line["step"] == "timing" and (line.get("error") or "timed" in line)
    ]
    result["studies"] = {
        line["part"]: line.get("text") or f"FAILED: {line['error']}" for line in checks if line["step"] == "studies"
    }
    result["faults"] = {
        line["part"]: line["error"] for line in checks if line["step"] == "faults" and line.get("error")
    }
    compiled = [kernel for line in lines if line["step"] == "compilations" for kernel in line["kernels"]]
    result["compilations"] = len(set(compiled))
    named = ("correctness", "timing", "studies")
    result["unfinished"] = sorted(
        {f"{line['step']} {line['part']}" for line in lines if line["step"] in named}
        - {f"{line['step']} {line['part']}" for line in lines if line.get("ended")}
    )
    return result


def failures(result: dict[str, Any]) -> list[str]:
    """One sentence for each check that failed."""
    rows = [row for row in (*result["correctness"], *result["timing"], *result["ceilings"]) if row.get("error")]
    found = [f"{row['part']}, {row['case']}: {row['error']}" for row in rows]
    return found + [f"{name}: {text}" for name, text in result["studies"].items() if text.startswith("FAILED")]


def write(out: Path) -> dict[str, Any]:
    """Write ``device_check.json``, ``.txt`` and ``.png`` from the lines of ``out``."""
    result = gather(out)
    names = ("device", "torch", "triton", "date")
    note = ", ".join(f"{name} {result[name]}" for name in names if name in result)
    passed = sum(1 for row in result["correctness"] if not row.get("error") and not row.get("skipped"))
    skipped = sum(1 for row in result["correctness"] if row.get("skipped"))
    failed = failures(result)
    counted = f"correctness: {passed} of {len(result['correctness'])} checks passed, {skipped} skipped"
    texts = [note, counted, timing_table(result), *result["studies"].values()]
    if result["compilations"]:
        texts.append(
            f"kernels that these checks would compile on a GPU (sm_90): {result['compilations']} distinct ones"
        )
    if result["faults"]:
        texts.append("injected faults:\n" + "\n".join(f"{name}: {text}" for name, text in result["faults"].items()))
    if failed:
        texts.append("FAILED\n" + "\n".join(failed))
    if result["unfinished"]:
        texts.append("interrupted: " + ", ".join(result["unfinished"]))
    text = "\n\n".join(texts)
    (out / "device_check.json").write_text(json.dumps(result, indent=1))
    (out / "device_check.txt").write_text(text + "\n")
    plot(result, out, note)
    print(f"\n{text}\n\nwritten to {out}")
    return result


def _times(row: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row["equivalents"].items() if isinstance(value, float)}


def timing_table(result: dict[str, Any]) -> str:
    rows = []
    for row in result["timing"]:
        if row.get("error"):
            rows.append([row["kernel"], row["case"], row["error"], "", "", "", "", "", ""])
            continue
        times = _times(row)
        best = min(times, key=lambda name: times[name]) if times else ""
        rows.append(
            [
                row["kernel"],
                row["case"],
                f"{1e6 * row['seconds']:.0f}",
                f"{100 * row['bandwidth_share']:.0f}%",
                f"{100 * row['attainable_share']:.0f}%",
                f"{row['tflops']:.0f}",
                best,
                f"{times[best] / row['seconds']:.2f}x" if best else "",
                row["target"],
            ]
        )
    header = [
        "kernel",
        "case",
        "us",
        "of bandwidth",
        "attainable",
        "TFLOP/s",
        "best PyTorch",
        "faster than it",
        "target",
    ]
    return common.table(header, rows)


def plot(result: dict[str, Any], out: Path, note: str) -> None:
    """Times of the PyTorch equivalents over ours."""
    rows = [row for row in result["timing"] if not row.get("error")]
    if not rows:
        return
    figure, (axis,) = common.figure(1, width=11, height=0.42 * len(rows) + 1.6)
    figure.subplots_adjust(left=0.34, bottom=0.16)
    for index, row in enumerate(rows):
        for name, value in _times(row).items():
            axis.plot(value / row["seconds"], index, "|", markersize=12, color="#D55E00")
            axis.annotate(name, (value / row["seconds"], index), fontsize=6, rotation=25, color="#888888")
    axis.axvline(1.0, color="#0072B2")
    axis.set_yticks(range(len(rows)), [f"{row['kernel']} {row['case']}" for row in rows], fontsize=7)
    axis.invert_yaxis()
    axis.set(xscale="log", xlabel="time of the PyTorch equivalents over this project's (right of 1: slower than ours)")
    figure.text(0.01, 0.01, note, fontsize=6.5, color="#555555")
    figure.savefig(out / "device_check.png", dpi=150)
