"""Options of the policies, StreamingLLM at the index in the cache, and latent caches."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from fastattn import H2O, ExpectedAttention, KeyDiff, Knorm, Policy, Protect, Random, Rotary, SnapKV, StreamingLLM
from fastattn.modules.policies import CacheState
from tests._helpers import draw, exact_policies
from tests._helpers.policy_caches import (
    DIM,
    HEADS,
    INV_FREQ,
    KV_HEADS,
    Sequence,
    chosen,
    feed,
    kept,
    kept_after_every_step,
    make,
)


@pytest.mark.parametrize(("policy", "score"), [(Knorm, exact_policies.knorm), (KeyDiff, exact_policies.key_diff)])
@pytest.mark.parametrize(("n_sink", "n_recent"), [(0, 0), (4, 0), (0, 5), (3, 6), (10, 10)])
def test_protected_by_position(policy: type, score: Any, n_sink: int, n_recent: int) -> None:
    """However often compression runs: by position, not by index."""
    budget, interval = 20, 4
    cache, sequence = make(policy(n_sink=n_sink, n_recent=n_recent), budget, interval=interval), Sequence(60)
    _, key, _ = sequence.rotated(Rotary(INV_FREQ))
    slots: list[list[int]] = [[] for _ in range(KV_HEADS)]
    for now, outcome in enumerate(kept_after_every_step(cache, sequence, 60)):
        for head in range(KV_HEADS):
            if len(slots[head]) == budget + interval:
                exact = score(key[0, head, slots[head]])
                protected = exact_policies.protect(exact, torch.tensor(slots[head]), n_sink, n_recent, now)
                slots[head] = chosen(slots[head], protected, budget)
                assert set(slots[head]) >= {*range(n_sink), *range(now - n_recent, now)}
            slots[head] = [*slots[head], now]
        assert outcome == slots, f"after position {now}"


def test_sinks_survive_any_number_of_compressions() -> None:
    for policy in ("streaming_llm", "expected_attention"):
        cache = make(policy, 8, interval=1)
        feed(cache, Sequence(60), [20, *[1] * 40])
        assert all(head[:4] == [0, 1, 2, 3] for head in kept(cache)), policy


def test_streaming_llm_keeps_the_order_of_positions_that_share_a_float() -> None:
    cache, sequence = make(StreamingLLM(n_sink=0), 6), Sequence(20)
    ids = 2**24 + torch.arange(20)[None]
    cache.attend(0, sequence.query, sequence.key, sequence.value, position_ids=ids)
    assert kept(cache) == [list(range(2**24 + 14, 2**24 + 20))] * KV_HEADS


@pytest.mark.parametrize(
    ("make_policy", "error", "words"),
    [
        (lambda: StreamingLLM(n_sink=-1), ValueError, "n_sink must be at least 0, got -1"),
        (lambda: Knorm(n_recent=1.5), TypeError, "n_recent must be an integer, got float"),
        (lambda: KeyDiff(n_sink=True), TypeError, "n_sink must be an integer, got bool"),
        (lambda: ExpectedAttention(n_future_positions=0), ValueError, "n_future_positions must be at least 1, got 0"),
        (lambda: ExpectedAttention(query_window=0), ValueError, "query_window must be at least 1, got 0"),
        (lambda: ExpectedAttention(epsilon=-1.0), ValueError, "epsilon must be finite and not negative, got -1.0"),
        (lambda: ExpectedAttention(epsilon=math.nan), ValueError, "epsilon must be finite and not negative, got nan"),
        (lambda: ExpectedAttention(epsilon="0"), TypeError, "epsilon must be a float, got str"),
        (lambda: SnapKV(window=0), ValueError, "window must be at least 1, got 0"),
        (lambda: SnapKV(window="8"), TypeError, "window must be an integer, got str"),
        (lambda: SnapKV(kernel=0), ValueError, "kernel must be at least 1, got 0"),
        (lambda: SnapKV(kernel=4), ValueError, "kernel must be odd, to have a middle, got 4"),
        (lambda: SnapKV(kernel=3.0), TypeError, "kernel must be an integer, got float"),
        (lambda: make(SnapKV(window=9), 8), ValueError, "budget must be at least the 9 tokens that SnapKV always"),
        (lambda: H2O(n_recent=-1), ValueError, "n_recent must be at least 0, got -1"),
        (lambda: H2O(n_recent=True), TypeError, "n_recent must be an integer, got bool"),
        (lambda: make(H2O(n_recent=9), 8), ValueError, "budget must be at least the 9 tokens that H2O always keeps"),
        (lambda: Random(seed=-1), ValueError, "seed must be at least 0, got -1"),
        (lambda: Random(seed=2**32), ValueError, "seed must be at most 4294967295, got 4294967296"),
        (lambda: Random(seed=0.5), TypeError, "seed must be an integer, got float"),
        (lambda: Protect("knorm"), TypeError, "policy must be a Policy, got str"),
        (lambda: Protect(Knorm), TypeError, "policy must be a Policy, got the class Knorm"),
        (lambda: Protect(Knorm(), n_sink=-1), ValueError, "n_sink must be at least 0, got -1"),
        (lambda: Protect(Knorm(), n_recent=None), TypeError, "n_recent must be an integer, got NoneType"),
        (lambda: make(Protect(SnapKV(window=6), n_sink=3), 8), ValueError, "the 9 tokens that Protect always keeps"),
        (lambda: make(Protect(H2O(n_recent=9)), 8), ValueError, "the 9 tokens that H2O always keeps"),
        (lambda: make(Protect(ExpectedAttention()), 8, rotary=None), ValueError, "rotary must be given: Protect"),
        (
            lambda: make("newest", 8),
            ValueError,
            "'expected_attention', 'h2o', 'key_diff', 'knorm', 'random', 'snap_kv'",
        ),
        (lambda: make(3, 8), TypeError, "policy must be a Policy or one of"),
        (lambda: make(Knorm, 8), TypeError, "policy must be a Policy or one of"),
        (lambda: make("expected_attention", 8, rotary=None), ValueError, "rotary must be given: ExpectedAttention"),
        (lambda: make(StreamingLLM(rerotate=True), 8, rotary=None), ValueError, "rotary must be given: StreamingLLM"),
    ],
)
def test_bad_options(make_policy: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        make_policy()


def test_a_policy_that_calls_another_says_what_that_one_needs() -> None:
    class Borrowing(Policy):
        def __init__(self, query_window: int) -> None:
            self.query_window, self.inner = query_window, ExpectedAttention()

        def score(self, state: CacheState) -> Tensor:
            return self.inner.score(state)

    with pytest.raises(ValueError, match=r"state.rotary must be .* ExpectedAttention, got None: .*needs_rotary = True"):
        feed(make(Borrowing(8), 8, rotary=None), Sequence(20), [20])


def test_defaults_are_the_published_ones() -> None:
    assert repr(Knorm()) == "Knorm(n_recent=0, n_sink=0)"
    assert repr(KeyDiff()) == "KeyDiff(n_recent=0, n_sink=0)"
    assert repr(StreamingLLM()) == "StreamingLLM(n_sink=4, rerotate=False)"
    assert repr(H2O()) == "H2O(n_recent=None)"
    assert repr(SnapKV()) == "SnapKV(kernel=5, window=32)"
    assert repr(Protect(Random())) == "Protect(n_recent=0, n_sink=4, policy=Random(seed=0))"
    policy = ExpectedAttention()
    assert (policy.n_future_positions, policy.n_sink, policy.query_window, policy.epsilon) == (512, 4, 128, 0.0)
    assert policy.use_covariance
    assert policy.use_value_norm
    assert repr(eval(repr(policy))) == repr(policy)  # it shows options that exist


@pytest.mark.parametrize("policy", [Knorm(), KeyDiff(), Knorm(n_sink=2, n_recent=3)], ids=repr)
def test_equal_scores_of_a_padded_row_fall_as_they_do_alone(policy: Policy) -> None:
    """Keys of one nonzero number have exact norms and directions: most scores are tied, and positions decide."""
    size = torch.randint(1, 3, (2, KV_HEADS, 60, 1), generator=torch.Generator().manual_seed(3)).float()
    key = size * torch.nn.functional.one_hot(torch.arange(60) % 4, DIM)
    query, value = draw.normal(2, HEADS, 60, DIM), draw.normal(2, KV_HEADS, 60, DIM)
    mask = torch.ones(2, 60, dtype=torch.bool)
    mask[1, :17] = False
    both, alone = make(policy, 12, batch_size=2), make(policy, 12)
    last = 50  # then token by token
    for call in [slice(0, last), *(slice(t, t + 1) for t in range(last, 60))]:
        own = slice(max(call.start, 17), call.stop)
        both.attend(0, query[:, :, call], key[:, :, call], value[:, :, call], attention_mask=mask[:, call])
        alone.attend(0, query[1:, :, own], key[1:, :, own], value[1:, :, own])
        assert kept(both, 1) == kept(alone)
    assert alone.lengths(0).tolist() == [[14, 14]]  # compressed again while decoding
    assert len(torch.unique(key[1, 0, 17:].norm(dim=-1))) == 2


# -- StreamingLLM at the index in the cache --------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"attention_factor": 1.2}, {"interleave": True}], ids=str)
def test_rerotation_places_keys_and_queries_at_their_index_in_the_cache(options: dict[str, Any]) -> None:
    rotary, budget, sizes = Rotary(INV_FREQ, **options), 12, [30, 9, *[1] * 21]
    sequence = Sequence(60, dtype=torch.float64)
    cache = make(StreamingLLM(rerotate=True), budget, rotary=rotary, interval=8, dtype=torch.float64)
    rotated = sequence.rotated(rotary)
    groups, slots, now = HEADS // KV_HEADS, list[int](), 0
    for size in sizes:
        out = cache.attend(0, *(t[:, :, now : now + size] for t in rotated))
        if len(slots) == budget + 8:
            slots = slots[:4] + slots[4 - budget :]
        slots = [*slots, *range(now, now + size)]
        index = torch.arange(len(slots))
        turn = exact_policies.rotations(index, DIM, INV_FREQ, rotary.interleave, 0, rotary.attention_factor)
        for head in range(HEADS):
            key = torch.einsum("tde,te->td", turn, sequence.key[0, head // groups, slots])
            query = torch.einsum("tde,te->td", turn[-size:], sequence.query[0, head, now : now + size])
            logits = (query @ key.T * DIM**-0.5).masked_fill(index > index[-size:, None], -math.inf)
            expected = logits.softmax(-1) @ sequence.value[0, head // groups, slots]
            torch.testing.assert_close(out[0, head], expected, rtol=1e-9, atol=1e-9)
        now += size
        if len(slots) > budget and size > 1:
            slots = slots[:4] + slots[4 - budget :]
        assert kept(cache) == [slots] * KV_HEADS
    original = exact_policies.rotations(
        torch.tensor(slots), DIM, INV_FREQ, rotary.interleave, 0, rotary.attention_factor
    )
    stored = torch.einsum("tde,hte->htd", original, sequence.key[0][:, slots])
    torch.testing.assert_close(cache.keys(0)[0, :, : len(slots)], stored)  # never rotated twice: kept as they came


# -- latent caches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["expected_attention", "knorm", "streaming_llm", "key_diff"])
def test_policies_of_a_latent_cache(policy: str) -> None:
    rank, rope, tokens, budget, future = 12, 4, 50, 16, 32
    rotary = Rotary(INV_FREQ[: rope // 2], interleave=True, start=rank)
    options = {"n_future_positions": future, "query_window": 10} if policy == "expected_attention" else {}
    named = {
        "expected_attention": ExpectedAttention,
        "knorm": Knorm,
        "streaming_llm": StreamingLLM,
        "key_diff": KeyDiff,
    }
    cache = make(named[policy](**options), budget, rotary=rotary, num_kv_heads=1, latent_rank=rank, interval=10)
    query, key = draw.normal(1, HEADS, tokens, rank + rope), draw.normal(1, 1, tokens, rank + rope, seed=1)
    positions = torch.arange(tokens)
    turned_query, turned_key = (rotary.rotate(t, positions[None]) for t in (query, key))
    slots: list[int] = []
    for size, now in [(24, 0), *((1, n) for n in range(24, tokens))]:
        here = slice(now, now + size)
        cache.attend(0, turned_query[:, :, here], turned_key[:, :, here], scale=0.3)
        new = [*range(now, now + size)]
        if size == 1 and len(slots) < budget + 10:
            slots += new
            continue
        if size > 1:  # compressed after the call, a step before it
            slots, new, now = slots + new, [], now + size
        keys = turned_key[0, 0, slots]
        seen = range(now)[-10 if size == 1 else -size :]
        if policy == "expected_attention":
            scores = exact_policies.expected_attention(
                keys,
                keys[:, :rank],
                torch.tensor(slots),
                query[0][:, seen.start : seen.stop],
                torch.tensor(list(seen)),
                now,
                rotary.inv_freq,
                interleave=True,
                start=rank,
                scale=0.3,
                n_future=future,
            )
        elif policy == "streaming_llm":
            scores = exact_policies.streaming_llm(torch.tensor(slots))
        else:
            scores = getattr(exact_policies, policy)(keys)
        slots = chosen(slots, scores, budget) + new
        assert kept(cache) == [slots], f"with position {now}"
