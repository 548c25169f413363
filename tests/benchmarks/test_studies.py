"""What the studies share, and that a resumed run equals an uninterrupted one."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("matplotlib", reason="the studies plot with matplotlib")
from benchmarks.studies import _common as common
from benchmarks.studies import estimates
from benchmarks.studies import score_vs_cache_size as scores
from benchmarks.studies import speedup_vs_context as speedup
from fastattn.advice import HARDWARE


def rows(path, conditions="here", fresh=False):
    return common.Rows(path, ("a", "b"), ("x",), conditions, fresh)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    points = [(a, b) for a in range(3) for b in ("p", "q")]

    def measure(path, stop_after):
        found = rows(path)
        for a, b in points:
            if stop_after == 0:
                return
            if found.missing(a=a, b=b):
                found.add(a=a, b=b, x=a + len(b) / 3)
                stop_after -= 1

    measure(tmp_path / "whole.csv", 99)
    measure(tmp_path / "resumed.csv", 4)
    with (tmp_path / "resumed.csv").open("a") as file:
        file.write("2,p")  # the interruption cut a line off
    measure(tmp_path / "resumed.csv", 99)
    assert (tmp_path / "resumed.csv").read_text() == (tmp_path / "whole.csv").read_text()
    assert [row["x"] for row in rows(tmp_path / "whole.csv")][:2] == ["0.333333", "0.333333"]


def test_rows_measured_under_other_conditions_are_not_mixed(tmp_path):
    rows(tmp_path / "a.csv", "one machine").add(a=1, b="p", x=1.0)
    with pytest.raises(SystemExit, match="measured under other conditions"):
        rows(tmp_path / "a.csv", "another machine")
    assert rows(tmp_path / "a.csv", "another machine", fresh=True).missing(a=1, b="p")


def test_published_points_are_those_of_the_papers():
    by_context = {int(p["context"]): p for p in common.published("speedup_vs_context")}
    assert len(by_context) == 6
    assert round(speedup._published_ratio(by_context[32768], "full_rank_q"), 2) == 4.99
    assert speedup._published_ratio(by_context[32768], "low") == 5.1
    assert len(common.published("qk_throughput")) == 48


def test_bytes_per_token_are_those_of_the_shapes():
    assert speedup.cached("multi-head", 1) == 8192
    assert speedup.cached("Q = 512", 1) == 576
    assert speedup.cached("Q = 512, 1/8 of the tokens", 8) == 576


def test_the_roofline_predicts_a_gain_that_grows_with_the_context():
    def gain(context, kind):
        speeds = []
        for name in (kind, "multi-head"):
            batch = speedup.sequences(name, context, 64e9)
            speeds.append(batch / speedup.roofline(name, context, batch, HARDWARE["h200"]))
        return speeds[0] / speeds[1]

    assert gain(32768, "Q = 512") > gain(1024, "Q = 512") > 1
    assert gain(32768, "Q = 512") >= gain(32768, "full-rank Q")
    assert gain(32768, "Q = 512, 1/8 of the tokens") > gain(32768, "Q = 512")


def test_mean_and_interval():
    estimate = estimates.mean_and_interval([1.0, 2.0, 3.0])
    assert [round(x, 3) for x in estimate] == [2.0, -0.484, 4.484]  # t(2) = 4.303, s = 1, n = 3
    assert math.isnan(estimates.mean_and_interval([4.0]).low)  # unknown from one value


def test_the_interval_of_a_share_stays_a_share():
    assert [round(x, 3) for x in estimates.share_and_interval([0] * 10)] == [0.0, 0.0, 0.278]  # Wilson's, by hand
    assert [round(x, 3) for x in estimates.share_and_interval([1, 1, 0, 0])] == [0.5, 0.15, 0.85]


def test_a_difference_is_taken_text_by_text_and_decides_who_wins():
    """Texts whose losses lie far apart; one policy is 0.1 above another on each, the rest lose by much."""
    above = {"expected_attention": 0.0, "knorm": 0.1, "streaming_llm": 0.5, "key_diff": 0.6, "full cache": -0.2}
    runs = {
        (policy, 32): {
            (str(seed), depth): {"loss": str(seed + add + 0.01 * seed * (policy == "knorm")), "passkey": "0"}
            for seed in range(5)
            for depth in ("0.1", "0.9")
        }
        for policy, add in above.items()
    }
    excess = scores.difference(runs, ("knorm", 32), ("full cache", 32))
    assert round(excess.mean, 6) == 0.32
    assert excess.low > 0.29  # five texts, not ten runs, and no spread between texts in it
    assert excess.high < 0.35
    none = estimates.share_and_interval([0] * 10)
    loss = {policy: estimates.mean_and_interval([seed + add for seed in range(5)]) for policy, add in above.items()}
    summary = {(policy, 32): {"passkey": none, "loss": loss[policy]} for policy in above}
    assert scores.winners(runs, summary, 32) == ["all", "expected_attention"]
