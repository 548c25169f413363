"""Tables and the figure of an evaluation: one panel per model, exact answers against cache size."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

from benchmarks.studies import _common as common
from benchmarks.studies.estimates import share_and_interval
from benchmarks.studies.reasoning.evaluate import FULL

TITLES = {
    "gqa": "grouped-query attention",
    "low_rank": "low-rank attention, full-rank query",
    "low_rank_query": "low-rank attention, low-rank query",
}


def read(rows: common.Rows) -> dict[str, dict[tuple[str, int], dict[str, str]]]:
    """Rows by model, then by policy and size."""
    found: dict[str, dict[tuple[str, int], dict[str, str]]] = {}
    for row in rows:  # type: ignore[attr-defined]
        found.setdefault(row["model"], {})[row["policy"], int(row["size"])] = row
    return found


def hits(row: dict[str, str]) -> list[int]:
    return [int(bit) for bit in row["solved"]]


def sign_test(first: list[int], second: list[int]) -> float:
    """Two-sided probability that two runs on the same problems differ as much by chance (exact McNemar)."""
    wins = sum(a > b for a, b in zip(first, second, strict=True))
    losses = sum(a < b for a, b in zip(first, second, strict=True))
    n, least = wins + losses, min(wins, losses)
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(least + 1)) / 2**n)


def order(found: dict[tuple[str, int], dict[str, str]], size: int) -> str:
    """Policies at one size, best first: ``>`` where neighbors differ at the 5% level, ``~`` where they cannot be told
    apart.
    """
    policies = sorted((p for p, s in found if s == size and p != FULL), key=lambda p: -sum(hits(found[p, size])))
    parts = policies[:1]
    for before, after in itertools.pairwise(policies):
        differ = sign_test(hits(found[before, size]), hits(found[after, size])) < 0.05
        parts += [">" if differ else "~", after]
    return " ".join(parts)


def report(rows: common.Rows, out: Path) -> str:
    """Write ``reasoning.txt`` and ``reasoning.png``; returns the table."""
    models = read(rows)
    text = "\n\n".join(_table(kind, found) for kind, found in models.items())
    text += "\n\nIn brackets: Wilson's 95% interval. >: neighbors differ on the same problems (exact McNemar test, 5%);"
    text += " ~: they may not."
    shown, axes = common.figure(len(models), width=5.0)
    for axis, (kind, found) in zip(axes, models.items(), strict=True):
        _panel(axis, kind, found)
    common.finish(out, "reasoning", text, shown, rows.conditions)
    return text


def _table(kind: str, found: dict[tuple[str, int], dict[str, str]]) -> str:
    body = [
        [size, policy, "{:.3f} ({:.3f}-{:.3f})".format(*share_and_interval(hits(row))), row["steps"], row["words"]]
        for (policy, size), row in sorted(found.items(), key=lambda item: (item[0][1], -sum(hits(item[1]))))
    ]
    at_sizes = sorted({size for policy, size in found if policy != FULL})
    lines = [f"{size:>5}  {order(found, size)}" for size in at_sizes]
    return "\n".join(
        [
            TITLES.get(kind, kind),
            common.table(["tokens kept", "policy", "solved", "steps right", "words"], body),
            "",
            *lines,
        ]
    )


def _panel(axis: Any, kind: str, found: dict[tuple[str, int], dict[str, str]]) -> None:
    policies = list(dict.fromkeys(policy for policy, _ in found if policy != FULL))
    styles = ["-", "--"]
    ends = []
    for index, policy in enumerate(policies):
        line = sorted((size, share_and_interval(hits(row))) for (p, size), row in found.items() if p == policy)
        color = common.COLORS[index % len(common.COLORS)]
        at, shares = [size for size, _ in line], [share for _, share in line]
        axis.plot(
            at, [s.mean for s in shares], styles[index // len(common.COLORS)], color=color, marker="o", markersize=3
        )
        axis.fill_between(at, [s.low for s in shares], [s.high for s in shares], color=color, alpha=0.12)
        ends.append((at[-1], shares[-1].mean, policy.replace("_", " "), color))
    full = next(row for (policy, _), row in found.items() if policy == FULL)
    axis.axhline(sum(hits(full)) / len(hits(full)), color="#777777", linestyle=":", linewidth=1)
    axis.set(xscale="log", xlabel="tokens kept per layer and head", ylabel="exact answers", ylim=(-0.03, 1.05))
    axis.set_title(f"{TITLES.get(kind, kind)} (dotted: full cache)")
    ticks = sorted({size for policy, size in found if policy != FULL})
    axis.set_xticks(ticks, [str(size) for size in ticks])
    axis.minorticks_off()
    axis.set_xlim(ticks[0] * 0.9, ticks[-1] * 3.2)
    common.label_ends(axis, ends)
