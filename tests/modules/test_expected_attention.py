"""Expected Attention through CompressedKVCache.attend: options, few queries, both of its forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastattn import ExpectedAttention, Rotary
from fastattn.modules.policies import CacheState, QueryWindow
from tests._helpers import exact_policies
from tests._helpers.policy_caches import (
    DIM,
    INV_FREQ,
    KV_HEADS,
    Sequence,
    chosen,
    expected_scores,
    feed,
    kept,
    make,
)

OPTIONS = [
    {},
    {"use_covariance": False},
    {"use_value_norm": False},
    {"epsilon": 0.05},
    {"n_sink": 0},
    {"n_sink": 9},
    {"n_future_positions": 1},
]
ROTARIES = [
    {},
    {"interleave": True},
    {"attention_factor": 1.3},
    {"inv_freq": INV_FREQ[:5], "start": 4, "interleave": True},
]


def exact_options(options: dict[str, Any]) -> dict[str, Any]:
    return {"n_future" if name == "n_future_positions" else name: value for name, value in options.items()}


@pytest.mark.parametrize("rotary", ROTARIES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_expected_attention_of_a_prompt(options: dict[str, Any], rotary: dict[str, Any]) -> None:
    turn = Rotary(**{"inv_freq": INV_FREQ, **rotary})
    cache, sequence = make(ExpectedAttention(**options), 20, rotary=turn), Sequence(60)
    feed(cache, sequence, [60], scale=0.4)
    for head in range(KV_HEADS):
        scores = expected_scores(sequence, list(range(60)), range(60), head, turn, scale=0.4, **exact_options(options))
        assert kept(cache)[head] == exact_policies.keep(scores, 20)


@pytest.mark.parametrize("window", [5, DIM - 1, DIM, 40])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_expected_attention_while_decoding(options: dict[str, Any], window: int) -> None:
    """Few queries are scored as samples, many by their moments: the definition knows no difference."""
    sequence, rotary = Sequence(70), Rotary(INV_FREQ)
    cache = make(ExpectedAttention(query_window=window, **options), 20, interval=8)
    slots = [list(range(30)) for _ in range(KV_HEADS)]
    feed(cache, sequence, [30])
    for head in range(KV_HEADS):
        scores = expected_scores(sequence, slots[head], range(30), head, rotary, **exact_options(options))
        slots[head] = chosen(slots[head], scores, 20)
    rotated = sequence.rotated(rotary)
    for now in range(30, 70):
        cache.attend(0, *(t[:, :, now : now + 1] for t in rotated))
        for head in range(KV_HEADS):
            if len(slots[head]) == 28:
                queries = range(max(0, now - window), now)
                scores = expected_scores(sequence, slots[head], queries, head, rotary, **exact_options(options))
                slots[head] = chosen(slots[head], scores, 20)
            slots[head] = [*slots[head], now]
        assert kept(cache) == slots, f"after position {now}"


def test_sample_form_equals_moment_form() -> None:
    """A window one short of the head dim is scored as samples, with one query to spare by moments."""
    sequence = Sequence(60, dtype=torch.float64)
    scores: dict[str, Tensor] = {}

    class Spy(ExpectedAttention):
        def score(self, state: Any) -> Tensor:
            result = super().score(state)
            scores[self.form] = result
            return result

        def _statistics(self, queries: Tensor, valid: Tensor, state: Any) -> Any:
            valid = valid & (torch.arange(valid.shape[1]) >= valid.shape[1] - 12)  # the same twelve queries
            statistics = super()._statistics(queries, valid, state)
            self.form = "moments" if statistics[2] is None else "samples"
            return statistics

    for window in (DIM - 1, 30):
        cache = make(Spy(query_window=window), 20, interval=39, dtype=torch.float64)
        feed(cache, sequence, [1] * 60)
    assert set(scores) == {"moments", "samples"}
    torch.testing.assert_close(scores["samples"], scores["moments"], rtol=1e-10, atol=0)


def state_of(sequence: Sequence, budget: int, query_positions: list[int]) -> CacheState:
    """All of a sequence cached, with a window of its newest queries that claims those positions (-1: none)."""
    rotary = Rotary(INV_FREQ)
    query, key, value = sequence.rotated(rotary)
    tokens, newest = key.shape[2], len(query_positions)
    return CacheState(
        keys=key,
        values=value,
        positions=torch.arange(tokens, dtype=torch.int32).repeat(1, KV_HEADS, 1),
        lengths=torch.full((1, KV_HEADS), tokens, dtype=torch.int32),
        tokens_seen=torch.tensor([tokens]),
        next_position=torch.tensor([tokens]),
        scale=DIM**-0.5,
        rotary=rotary,
        min_length=budget,
        window=QueryWindow(query[:, :, tokens - newest :], torch.tensor([query_positions], dtype=torch.int32)),
    )


@pytest.mark.parametrize("covariance", [True, False])
def test_fewer_than_two_query_samples_use_the_mean_alone(covariance: bool) -> None:
    cache, sequence = make(ExpectedAttention(query_window=1, use_covariance=covariance), 20, interval=20), Sequence(41)
    feed(cache, sequence, [1] * 41)
    for head in range(KV_HEADS):
        scores = expected_scores(sequence, list(range(40)), range(39, 40), head, Rotary(INV_FREQ), use_covariance=False)
        assert kept(cache)[head] == [*exact_policies.keep(scores, 20), 40]


@pytest.mark.parametrize("window", [[-1] * 6, [-1, -1, 0, 1, 2, 3], [-1] * 40], ids=["none", "sinks", "none, moments"])
def test_no_query_sample_falls_back_to_recency(window: list[int]) -> None:
    score = ExpectedAttention(query_window=len(window)).score(state_of(Sequence(50), 20, window))
    assert not score.isnan().any()
    for head in range(KV_HEADS):
        assert exact_policies.keep(score[0, head], 20) == [0, 1, 2, 3, *range(34, 50)]


def test_a_window_partly_of_sinks_counts_the_others() -> None:
    sequence = Sequence(50)
    for missing in (-1, 2):
        window = [missing] * 3 + list(range(47, 50))
        score = ExpectedAttention(query_window=6).score(state_of(sequence, 20, window))
        for head in range(KV_HEADS):
            exact = expected_scores(sequence, list(range(50)), range(47, 50), head, Rotary(INV_FREQ))
            torch.testing.assert_close(score[0, head].double(), exact, rtol=1e-4, atol=0)
