"""Policies through CompressedKVCache.attend: the cases with known right answers, options, and a user's own policy."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fastattn import CompressedKVCache, ExpectedAttention, KeyDiff, Knorm, Policy, Rotary, StreamingLLM
from fastattn.modules import policy_names
from fastattn.modules.policies import CacheState, QueryWindow
from tests._helpers import draw, exact_policies

HEADS, KV_HEADS, DIM = 4, 2, 16
INV_FREQ = 1000.0 ** -(torch.arange(DIM // 2) / (DIM // 2))
POLICIES = policy_names()


class Sequence:
    """Random tokens of one row, from position 0: query, key and value before rotation, ``[1, heads, T, DIM]``."""

    def __init__(self, tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self.query = 2 * draw.normal(1, HEADS, tokens, DIM, dtype=dtype, seed=seed) + 0.5
        self.key = draw.normal(1, KV_HEADS, tokens, DIM, dtype=dtype, seed=seed + 1)
        self.value = draw.normal(1, KV_HEADS, tokens, DIM, dtype=dtype, seed=seed + 2)
        self.positions = torch.arange(tokens)[None]

    def rotated(self, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        return rotary.rotate(self.query, self.positions), rotary.rotate(self.key, self.positions), self.value


def make(policy: Policy | str, budget: int, **options: Any) -> CompressedKVCache:
    defaults = {"num_layers": 1, "num_kv_heads": KV_HEADS, "head_dim": DIM, "rotary": Rotary(INV_FREQ), "interval": 8}
    return CompressedKVCache(policy, budget, **{**defaults, **options})


def feed(cache: CompressedKVCache, sequence: Sequence, sizes: list[int], **options: Any) -> list[Tensor]:
    """The outputs of calls of those sizes."""
    rotated, outputs, first = sequence.rotated(cache.rotary or Rotary(INV_FREQ)), [], 0
    for size in sizes:
        call = [tensor[:, :, first : first + size] for tensor in rotated]
        for layer in range(cache.num_layers):
            outputs.append(cache.attend(layer, *call, **options))
        first += size
    return outputs


def kept(cache: CompressedKVCache, row: int = 0) -> list[list[int]]:
    """Positions kept per head."""
    lengths = cache.lengths(0)[row].tolist()
    return [cache.positions(0)[row, head, :count].tolist() for head, count in enumerate(lengths)]


def expected_scores(
    sequence: Sequence, slots: list[int], queries: range, head: int, rotary: Rotary, **options: Any
) -> Tensor:
    """Expected Attention of one head's ``slots``, from the queries at positions ``queries``; float64."""
    groups = slice(head * HEADS // KV_HEADS, (head + 1) * HEADS // KV_HEADS)
    matrices = exact_policies.rotations(
        torch.tensor(slots), DIM, rotary.inv_freq, rotary.interleave, rotary.start, rotary.attention_factor
    )
    return exact_policies.expected_attention(
        torch.einsum("tde,te->td", matrices, sequence.key[0, head, slots].double()),
        sequence.value[0, head, slots],
        torch.tensor(slots),
        sequence.query[0, groups, queries.start : queries.stop],
        torch.arange(queries.start, queries.stop),
        max(slots) + 1,
        rotary.inv_freq,
        interleave=rotary.interleave,
        start=rotary.start,
        attention_factor=rotary.attention_factor,
        **options,
    )


def chosen(slots: list[int], scores: Tensor, budget: int) -> list[int]:
    return [slots[index] for index in exact_policies.keep(scores, budget)]


# -- cases with known right answers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_within_the_budget_nothing_changes_bit_for_bit(policy: str) -> None:
    cache, sequence = make(policy, 20), Sequence(20)
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
    both = make(policy, 16, batch_size=2)
    padded = [torch.cat([torch.full_like(s[:, :, :padding], math.nan), s], 2) for s in short.rotated(rotary)]
    rows = [torch.cat(pair) for pair in zip(full.rotated(rotary), padded, strict=True)]
    mask = torch.arange(columns) >= torch.tensor([[0], [padding]])
    alone = [make(policy, 16), make(policy, 16)]
    first = 0
    for size in sizes:
        here = slice(first, first + size)
        both.attend(0, *(t[:, :, here] for t in rows), attention_mask=mask[:, here])
        for row, cache in enumerate(alone):
            cache.attend(0, *(t[row : row + 1, :, here] for t in rows), attention_mask=mask[row : row + 1, here])
        first += size
    assert kept(both, 0) == kept(alone[0])
    assert kept(both, 1) == kept(alone[1])
    unpadded = make(policy, 16)
    feed(unpadded, short, [sizes[0] - padding, *sizes[1:]])
    assert kept(both, 1) == kept(unpadded), "padding took part"
    assert all(0 <= p < columns - padding for head in kept(both, 1) for p in head)
    assert both.keys(0)[1, :, : len(kept(both, 1)[0])].isfinite().all()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_second_prompt_on_a_reset_cache_is_as_on_a_new_one(policy: str) -> None:
    used, new = make(policy, 16), make(policy, 16)
    feed(used, Sequence(70), [40, *[1] * 30])
    used.reset()
    sizes = [3, *[1] * 40]
    outputs = [feed(cache, Sequence(43, seed=20), sizes) for cache in (used, new)]
    for one, other in zip(*outputs, strict=True):
        assert torch.equal(one, other)
    assert kept(used) == kept(new)


@pytest.mark.parametrize("policy", POLICIES)
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


# -- Expected Attention ----------------------------------------------------------------------------------------------

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


# -- options of the others -------------------------------------------------------------------------------------------


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


def kept_after_every_step(cache: CompressedKVCache, sequence: Sequence, tokens: int) -> Iterator[list[list[int]]]:
    rotated = sequence.rotated(Rotary(INV_FREQ))
    for now in range(tokens):
        cache.attend(0, *(t[:, :, now : now + 1] for t in rotated))
        yield kept(cache)


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
        (lambda: make("newest", 8), ValueError, "'expected_attention', 'key_diff', 'knorm', 'streaming_llm'"),
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


@pytest.mark.parametrize("policy", POLICIES)
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


# -- a policy of one's own -------------------------------------------------------------------------------------------


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
