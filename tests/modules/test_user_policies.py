"""A policy of one's own: what it sees, and what it may return."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from fastattn import CompressedKVCache, Policy, Rotary
from fastattn.modules.policies import CacheState
from tests._helpers import draw
from tests._helpers.policy_caches import (
    DIM,
    INV_FREQ,
    KV_HEADS,
    Sequence,
    chosen,
    feed,
    kept,
    make,
)


class LargestValues(Policy):
    """What the documentation shows: one method."""

    def score(self, state: Any) -> Tensor:
        return state.values.float().norm(dim=-1)


@pytest.mark.parametrize("sizes", [[40], [8, *[1] * 32]], ids=["prompt", "decoding"])
def test_a_policy_is_one_method(sizes: list[int]) -> None:
    cache, sequence = make(LargestValues(), 12, interval=4), Sequence(40)
    feed(cache, sequence, sizes)
    slots: list[list[int]] = [[] for _ in range(KV_HEADS)]
    for head in range(KV_HEADS):
        norm = sequence.value[0, head].double().norm(dim=-1)
        now = 0
        for size in sizes:
            if len(slots[head]) == 16:
                slots[head] = chosen(slots[head], norm[slots[head]], 12)
            slots[head] += range(now, now + size)
            now += size
            if len(slots[head]) > 12 and size > 1:
                slots[head] = chosen(slots[head], norm[slots[head]], 12)
    assert kept(cache) == slots


def test_what_a_policy_sees() -> None:
    seen: list[Any] = []

    class Spy(Policy):
        query_window = 6

        def score(self, state: Any) -> Tensor:
            seen.append((state, state.queries, state.query_valid, state.lengths.clone()))
            return state.positions.float()

    cache, sequence = make(Spy(), 12, interval=3), Sequence(16)
    feed(cache, sequence, [12, 1, 1, 1, 1])
    assert len(seen) == 1, "it runs only when a row is full"
    state, queries, query_valid, lengths = seen[0]
    assert state.keys.shape == state.values.shape == (1, KV_HEADS, cache.capacity, DIM)
    assert state.positions.shape == (1, KV_HEADS, cache.capacity)
    assert lengths.tolist() == [[15] * KV_HEADS]
    assert state.tokens_seen.tolist() == state.next_position.tolist() == [15]
    assert query_valid.all()
    torch.testing.assert_close(queries, sequence.query[:, :, 9:15], rtol=0, atol=1e-5)
    assert torch.equal(state.rotary.inv_freq, INV_FREQ)


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_does_not_round_what_a_policy_computes(compiled: bool) -> None:
    class Projected(Policy):
        def score(self, state: CacheState) -> Tensor:
            keys = state.keys.float()
            return keys @ torch.linspace(-1, 1, keys.shape[-1])

    torch.manual_seed(0)
    plain, under = (
        CompressedKVCache(Projected(), 8, num_layers=1, num_kv_heads=2, head_dim=16, interval=2, dtype=torch.bfloat16)
        for _ in range(2)
    )
    attend = torch.compile(under.attend, fullgraph=True, backend="aot_eager") if compiled else under.attend
    with torch.no_grad():
        for tokens in (40, 1, 1, 1, 1):
            query, key = (draw.normal(1, heads, tokens, 16, dtype=torch.bfloat16, seed=tokens) for heads in (4, 2))
            plain.attend(0, query, key, key)
            with torch.autocast("cpu", torch.bfloat16):
                attend(0, query, key, key)
            assert torch.equal(under.positions(0), plain.positions(0))


def test_queries_need_a_window() -> None:
    class Careless(Policy):
        def score(self, state: Any) -> Tensor:
            return state.queries

    with pytest.raises(ValueError, match="query_window > 0"):
        feed(make(Careless(), 4), Sequence(9), [9])


class Faulty(Policy):
    def __init__(self, result: Any) -> None:
        self.result = result

    def score(self, state: Any) -> Tensor:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result(state.positions.float())


@pytest.mark.parametrize(
    ("result", "error", "words"),
    [
        (lambda score: score[..., :-1], ValueError, "Faulty.score must return shape [B, Hkv, C] = [1, 2,"),
        (lambda score: score[0], ValueError, "Faulty.score must return shape"),
        (lambda score: score.double(), TypeError, "Faulty.score must return torch.float32, got torch.float64"),
        (lambda score: score.long(), TypeError, "Faulty.score must return torch.float32, got torch.int64"),
        (lambda score: None, TypeError, "Faulty.score must return a tensor [B, Hkv, C], got NoneType"),
        (lambda score: score.to("meta"), ValueError, "Faulty.score must return a tensor on cpu, got meta"),
        (KeyError("mine"), KeyError, "mine"),
    ],
    ids=["slots", "rank", "float64", "integers", "nothing", "device", "exception"],
)
@pytest.mark.parametrize("sizes", [[6, 30], [10, 1, 1, 1]], ids=["prompt", "decoding"])
def test_a_faulty_score_leaves_the_cache_as_it_was(
    result: Any, error: type[Exception], words: str, sizes: list[int]
) -> None:
    cache, sequence = make(Faulty(result), 10, interval=2, num_layers=2), Sequence(36)
    feed(cache, sequence, sizes[:-1])
    before = [kept(cache), cache.tokens_seen.clone(), cache.columns.clone(), cache.keys(0)[:, :, : sizes[0]].clone()]
    positions = cache.positions(0).clone()
    first = sum(sizes[:-1])
    call = [t[:, :, first : first + sizes[-1]] for t in sequence.rotated(Rotary(INV_FREQ))]
    with pytest.raises(error, match=re.escape(words)):
        cache.attend(0, *call)
    assert kept(cache) == before[0]
    assert torch.equal(cache.positions(0), positions)
    assert torch.equal(cache.tokens_seen, before[1])
    assert torch.equal(cache.columns, before[2])
    assert torch.equal(cache.keys(0)[:, :, : sizes[0]], before[3])
    cache.policy.result = lambda score: score  # mended, the same call goes through
    for layer in range(2):
        cache.attend(layer, *call)
    newest = 10 if sizes[-1] > 1 else 11  # a step compresses first
    assert kept(cache) == [list(range(sum(sizes) - newest, sum(sizes)))] * KV_HEADS


def test_nan_scores_rank_lowest_and_warn_once() -> None:
    class Sometimes(Policy):
        def score(self, state: Any) -> Tensor:
            return (-state.positions.float()).masked_fill(state.positions % 3 == 0, math.nan)

    cache, sequence = make(Sometimes(), 8, interval=2), Sequence(26)
    with pytest.warns(UserWarning, match="Sometimes.score returned NaN; tokens with a NaN score rank lowest"):
        feed(cache, sequence, [20])
    assert kept(cache) == [[1, 2, 4, 5, 7, 8, 10, 11]] * KV_HEADS
    rotated = sequence.rotated(Rotary(INV_FREQ))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for now in range(20, 25):
            cache.attend(0, *(t[:, :, now : now + 1] for t in rotated))
    assert kept(cache) == [[1, 2, 4, 5, 7, 8, 10, 11, 24]] * KV_HEADS


def test_nan_beyond_the_lengths_does_not_warn() -> None:
    class Longer(Policy):
        def score(self, state: Any) -> Tensor:
            return state.positions.float().masked_fill(~state.valid, math.nan)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        feed(make(Longer(), 8, batch_size=1), Sequence(20), [20])


def test_more_nan_scores_than_can_be_evicted() -> None:
    class AllNaN(Policy):
        def score(self, state: Any) -> Tensor:
            return torch.full_like(state.positions, math.nan, dtype=torch.float32)

    cache = make(AllNaN(), 8)
    with pytest.warns(UserWarning, match="returned NaN"):
        feed(cache, Sequence(20), [20])
    assert kept(cache) == [list(range(12, 20))] * KV_HEADS
