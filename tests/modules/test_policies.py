"""Policies through CompressedKVCache.attend: the cases with known right answers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fastattn import ExpectedAttention, KeyDiff, Knorm, Policy, Rotary, StreamingLLM
from tests._helpers import exact_policies
from tests._helpers.policy_caches import (
    DIM,
    INV_FREQ,
    KV_HEADS,
    POLICIES,
    Sequence,
    chosen,
    expected_scores,
    feed,
    kept,
    make,
    small,
)


@pytest.mark.parametrize("policy", POLICIES)
def test_within_the_budget_nothing_changes_bit_for_bit(policy: str) -> None:
    cache, sequence = make(small(policy), 20), Sequence(20)
    feed(cache, sequence, [12, 1, 1, 6])
    _, key, value = sequence.rotated(Rotary(INV_FREQ))
    assert kept(cache) == [list(range(20))] * KV_HEADS
    assert torch.equal(cache.keys(0)[:, :, :20], key)
    assert torch.equal(cache.values(0)[:, :, :20], value)


@pytest.mark.parametrize("policy", [StreamingLLM, ExpectedAttention, Knorm, KeyDiff])
def test_budget_below_the_sinks_zero_or_negative(policy: type) -> None:
    for budget in (0, -1):
        with pytest.raises(ValueError, match=f"budget must be at least 1, got {budget}"):
            make(policy(), budget)
    with pytest.raises(ValueError, match=r"budget must be at least the 6 tokens that \w+ always keeps, got 5"):
        make(policy(n_sink=6), 5)
    make(policy(n_sink=6), 6)


@pytest.mark.parametrize("policy", ["expected_attention", "knorm", "key_diff"])
def test_bfloat16_keys_keep_what_float32_scoring_keeps(policy: str) -> None:
    sequence = Sequence(1000, dtype=torch.bfloat16)
    query, key, value = sequence.rotated(Rotary(INV_FREQ))
    low, high = make(policy, 250, dtype=torch.bfloat16), make(policy, 250, dtype=torch.float32)
    low.attend(0, query, key, value)
    high.attend(0, query.float(), key.float(), value.float())
    assert kept(low) == kept(high)


def test_all_scores_equal_the_newest_survive() -> None:
    class Constant(Policy):
        def score(self, state: Any) -> Tensor:
            return torch.ones_like(state.keys[..., 0])

    for policy in (Constant(), Knorm()):
        cache, sequence = make(policy, 10), Sequence(40)
        sequence.key[:] = torch.eye(DIM)[0]
        cache.attend(0, sequence.query, sequence.key, sequence.value)
        assert kept(cache) == [list(range(30, 40))] * KV_HEADS


def test_tokens_one_by_one_under_streaming_llm() -> None:
    """A full row is compressed by the step after the one that filled it, before that appends."""
    cache, sequence = make("streaming_llm", 24, interval=8), Sequence(41)
    feed(cache, sequence, [1] * 40)
    assert kept(cache) == [[0, 1, 2, 3, *range(12, 40)]] * KV_HEADS
    cache.attend(0, *(t[:, :, 40:] for t in sequence.rotated(Rotary(INV_FREQ))))
    assert kept(cache) == [[0, 1, 2, 3, *range(20, 41)]] * KV_HEADS


def test_expected_attention_while_decoding_looks_ahead_from_the_position_not_the_window() -> None:
    window, budget, future = 16, 40, 64
    policy = ExpectedAttention(n_future_positions=future, query_window=window)
    cache, sequence = make(policy, budget, interval=40), Sequence(81)
    feed(cache, sequence, [1] * 81)
    rotary = Rotary(INV_FREQ)
    for head in range(KV_HEADS):
        slots = list(range(80))
        scores = expected_scores(sequence, slots, range(64, 80), head, rotary, n_future=future)
        expected = chosen(slots, scores, budget)
        assert kept(cache)[head] == [*expected, 80]
        # Rotated to the window's own length the answer would be another one.
        wrong = exact_policies.expected_attention(
            rotary.rotate(sequence.key, sequence.positions)[0, head, :80],
            sequence.value[0, head, :80],
            sequence.positions[0, :80],
            sequence.query[0, 2 * head : 2 * head + 2, 64:80],
            torch.arange(64, 80),
            16,
            INV_FREQ,
            n_future=future,
        )
        assert chosen(slots, wrong, budget) != expected


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sizes", [[40], [20, 20], [8, *[1] * 32]], ids=["prompt", "chunks", "decoding"])
def test_a_left_padded_row_next_to_a_full_row(policy: str, sizes: list[int]) -> None:
    rotary, columns, padding = Rotary(INV_FREQ), 40, 5
    full, short = Sequence(columns, seed=0), Sequence(columns - padding, seed=10)
    both = make(small(policy), 16, batch_size=2)
    padded = [torch.cat([torch.full_like(s[:, :, :padding], math.nan), s], 2) for s in short.rotated(rotary)]
    rows = [torch.cat(pair) for pair in zip(full.rotated(rotary), padded, strict=True)]
    mask = torch.arange(columns) >= torch.tensor([[0], [padding]])
    alone = [make(small(policy), 16), make(small(policy), 16)]
    first = 0
    for size in sizes:
        here = slice(first, first + size)
        both.attend(0, *(t[:, :, here] for t in rows), attention_mask=mask[:, here])
        for row, cache in enumerate(alone):
            cache.attend(0, *(t[row : row + 1, :, here] for t in rows), attention_mask=mask[row : row + 1, here])
        first += size
    assert kept(both, 0) == kept(alone[0])
    assert kept(both, 1) == kept(alone[1])
    unpadded = make(small(policy), 16)
    feed(unpadded, short, [sizes[0] - padding, *sizes[1:]])
    assert kept(both, 1) == kept(unpadded), "padding took part"
    assert all(0 <= p < columns - padding for head in kept(both, 1) for p in head)
    assert both.keys(0)[1, :, : len(kept(both, 1)[0])].isfinite().all()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_second_prompt_on_a_reset_cache_is_as_on_a_new_one(policy: str) -> None:
    used, new = make(small(policy), 16), make(small(policy), 16)
    feed(used, Sequence(70), [40, *[1] * 30])
    used.reset()
    sizes = [3, *[1] * 40]
    outputs = [feed(cache, Sequence(43, seed=20), sizes) for cache in (used, new)]
    for one, other in zip(*outputs, strict=True):
        assert torch.equal(one, other)
    assert kept(used) == kept(new)


@pytest.mark.parametrize("policy", ["expected_attention", "knorm", "streaming_llm", "key_diff"])
def test_a_prompt_in_chunks_larger_than_the_budget_is_compressed_after_every_chunk(policy: str) -> None:
    cache, sequence = make(policy, 12), Sequence(90)
    size = cache.nbytes
    rotary = Rotary(INV_FREQ)
    slots: list[list[int]] = [[] for _ in range(KV_HEADS)]
    rotated = sequence.rotated(rotary)
    for first in range(0, 90, 30):
        cache.attend(0, *(t[:, :, first : first + 30] for t in rotated))
        assert cache.lengths(0).tolist() == [[12] * KV_HEADS]
        for head in range(KV_HEADS):
            candidates = [*slots[head], *range(first, first + 30)]
            keys = rotated[1][0, head, candidates]
            if policy == "expected_attention":
                scores = expected_scores(sequence, candidates, range(first, first + 30), head, rotary)
            elif policy == "streaming_llm":
                scores = exact_policies.streaming_llm(torch.tensor(candidates))
            else:
                scores = getattr(exact_policies, policy)(keys)
            slots[head] = chosen(candidates, scores, 12)
        assert kept(cache) == slots
    if policy != "expected_attention":  # its window is made on the first call
        assert cache.nbytes == size
