"""CompressedKVCache against a list-based model, over random sequences of everything one can do with it.

Float64 throughout, so that kept sets are equal and not merely close.
"""

from __future__ import annotations

import copy
import io

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from fastattn import (
    H2O,
    TOVA,
    CompressedKVCache,
    ExpectedAttention,
    KeyDiff,
    Knorm,
    Random,
    Rotary,
    SnapKV,
    StreamingLLM,
)
from fastattn.modules import policy_names
from tests._helpers import exact_policies as exact
from tests._helpers.list_cache import Entry, ListCache

HEADS, KV_HEADS, DIM, V_DIM, LAYERS = 4, 2, 8, 6, 2
INV_FREQ = 100.0 ** -(torch.arange(DIM // 2) / (DIM // 2))
SCALE = DIM**-0.5
FUTURE, SINK = 16, 2


def policy_and_score(name: str, window: int, budget: int):
    """The policy, and its float64 score over a list of entries."""
    window = min(window, budget) if name == "snap_kv" else window

    def keys(entries: list[Entry]) -> torch.Tensor:
        return torch.stack([e.key for e in entries])

    def positions(entries: list[Entry]) -> torch.Tensor:
        return torch.tensor([e.position for e in entries])

    def expected(entries, head, next_position, queries, _):
        group = slice(head * HEADS // KV_HEADS, (head + 1) * HEADS // KV_HEADS)
        return exact.expected_attention(
            keys(entries),
            torch.stack([e.value for e in entries]),
            positions(entries),
            torch.stack([q[group] for _, q in queries], dim=1),
            torch.tensor([p for p, _ in queries]),
            next_position,
            INV_FREQ,
            interleave=False,
            scale=SCALE,
            n_sink=SINK,
            epsilon=0.0,
            use_value_norm=True,
            use_covariance=True,
            n_future=FUTURE,
        )

    def rotated(queries):
        """``[H, N, DIM]`` and positions."""
        at = torch.tensor([p for p, _ in queries])
        turn = exact.rotations(at, DIM, INV_FREQ)
        return torch.einsum("nde,hne->hnd", turn, torch.stack([q for _, q in queries], dim=1)), at

    def group(queries, head):
        vectors, at = rotated(queries)
        return vectors[head * HEADS // KV_HEADS : (head + 1) * HEADS // KV_HEADS], at

    def snap_kv(entries, head, _, queries, __):
        return exact.snap_kv(keys(entries), positions(entries), *group(queries, head), kernel=3, scale=SCALE)

    def tova(entries, head, _, queries, heads):
        newest = rotated(queries)[0][:, -1]
        return exact.tova(torch.stack([keys(one) for one in heads]), positions(entries), newest, scale=SCALE)

    def h2o(entries, head, next_position, *_):
        mean = torch.tensor([e.mass / e.queries for e in entries], dtype=torch.float64)
        return exact.protect(mean, positions(entries), 0, budget // 2, next_position)

    return {
        "snap_kv": (SnapKV(window, 3), snap_kv),
        "tova": (TOVA(), tova),
        "h2o": (H2O(), h2o),
        "random": (Random(7), None),  # differs between layers: see start
        "knorm": (Knorm(), lambda entries, *_: exact.knorm(keys(entries))),
        "key_diff": (KeyDiff(), lambda entries, *_: exact.key_diff(keys(entries))),
        "streaming_llm": (StreamingLLM(SINK), lambda entries, *_: exact.streaming_llm(positions(entries), SINK)),
        "expected_attention": (ExpectedAttention(FUTURE, SINK, query_window=window), expected),
    }[name]


def observe_for_h2o(entries, head, fed):
    at = torch.tensor([p for p, _ in fed])
    turned = torch.einsum("nde,hne->hnd", exact.rotations(at, DIM, INV_FREQ), torch.stack([q for _, q in fed], dim=1))
    own = turned[head * HEADS // KV_HEADS : (head + 1) * HEADS // KV_HEADS]
    tokens = torch.stack([e.key for e in entries]), torch.tensor([e.position for e in entries])
    for entry, mass, count in zip(entries, *(x.tolist() for x in exact.h2o(*tokens, own, at, SCALE)), strict=True):
        entry.mass, entry.queries = entry.mass + mass, entry.queries + count


def random_score(layer):
    return lambda entries, head, *_: exact.random(torch.tensor([e.position for e in entries]), head, layer, 7)


class CacheMachine(RuleBasedStateMachine):
    """Runs the same calls on both, and compares everything after each."""

    @initialize(
        name=st.sampled_from(policy_names()),
        rows=st.integers(1, 3),
        budget=st.integers(SINK, 9),
        interval=st.integers(1, 4),
        max_step=st.integers(1, 3),
        window=st.sampled_from([1, 3, 12]),
        seed=st.integers(0, 2**31),
    )
    def start(self, name, rows, budget, interval, max_step, window, seed):
        policy, score = policy_and_score(name, window, budget)
        self.rotary = Rotary(INV_FREQ)
        self.rows, self.max_step = rows, max_step
        self.generator = torch.Generator().manual_seed(seed)
        self.cache = CompressedKVCache(
            policy,
            budget,
            num_layers=LAYERS,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            v_head_dim=V_DIM,
            num_heads=HEADS,
            batch_size=rows,
            interval=interval,
            max_step=max_step,
            rotary=self.rotary,
            dtype=torch.float64,
        )
        for layer in range(LAYERS):
            self.cache.keys(layer).fill_(float("nan"))  # unused memory may hold anything
            self.cache.values(layer).fill_(float("nan"))
        self.models = [
            ListCache(
                score or random_score(layer),
                exact.keep,
                rows=rows,
                heads=KV_HEADS,
                budget=budget,
                interval=interval,
                max_step=max_step,
                window=policy.query_window,
                observe=observe_for_h2o if name == "h2o" else None,
                whole_window=name in ("snap_kv", "tova"),
            )
            for layer in range(LAYERS)
        ]

    def draw(self, heads: int, tokens: int, dim: int) -> torch.Tensor:
        return torch.randn(self.rows, heads, tokens, dim, generator=self.generator, dtype=torch.float64)

    def call(self, mask: torch.Tensor | None, tokens: int, explicit: bool) -> None:
        real = torch.ones(self.rows, tokens, dtype=torch.bool) if mask is None else mask
        seen = torch.tensor([row.seen for row in self.models[0].rows])
        position = (seen[:, None] + real.cumsum(1) - 1).masked_fill(~real, -1)
        position_ids = position.masked_fill(~real, 7) if explicit else None  # ignored at padding
        for layer, model in enumerate(self.models):
            raw = self.draw(HEADS, tokens, DIM)
            key = self.rotary.rotate(self.draw(KV_HEADS, tokens, DIM), position.clamp(min=0))
            value = self.draw(KV_HEADS, tokens, V_DIM)
            query = self.rotary.rotate(raw, position.clamp(min=0))
            model.begin(position)
            expected = model.attend(query, key, value, position, SCALE)
            model.feed(key, value, raw, position)
            padding = ~real[:, None, :, None]
            out = self.cache.attend(
                layer,
                query,
                key.masked_fill(padding, float("nan")),  # padding must not reach anything
                value.masked_fill(padding, float("nan")),
                attention_mask=mask,
                position_ids=position_ids,
            )
            torch.testing.assert_close(out.masked_fill(padding, 0.0), expected, rtol=0, atol=1e-12)

    @rule(tokens=st.integers(1, 3), explicit=st.booleans())
    def step(self, tokens, explicit):
        self.call(None, min(tokens, self.max_step), explicit)

    @rule(steps=st.integers(2, 9))
    def decode(self, steps):
        for _ in range(steps):
            self.call(None, 1, False)

    @rule(tokens=st.integers(4, 24), explicit=st.booleans())
    def prompt(self, tokens, explicit):
        self.call(None, tokens, explicit)

    @rule(tokens=st.integers(1, 14), explicit=st.booleans(), data=st.data())
    def padded(self, tokens, explicit, data):
        mask = torch.zeros(self.rows, tokens, dtype=torch.bool)
        for row in mask:
            start = data.draw(st.integers(0, tokens))
            row[start : data.draw(st.integers(start, tokens))] = True
        self.call(mask, tokens, explicit)

    @rule(data=st.data())
    def reorder(self, data):
        index = data.draw(st.lists(st.integers(0, self.rows - 1), min_size=self.rows, max_size=self.rows))
        self.cache.reorder(torch.tensor(index))
        for model in self.models:
            model.reorder(index)

    @rule(tokens=st.integers(0, 5))
    def crop(self, tokens):
        if tokens > self.models[0].croppable():
            with pytest.raises(ValueError, match="tokens must be at most"):
                self.cache.crop(tokens)
            return
        self.cache.crop(tokens)
        for model in self.models:
            model.crop([tokens] * self.rows)

    @rule(data=st.data(), beyond=st.integers(0, 20))
    def crop_per_row(self, data, beyond):
        limits = [row.fresh for row in self.models[0].rows]
        tokens = [data.draw(st.integers(0, min(limit, 6))) for limit in limits]
        if beyond == 0:
            tokens[-1] = limits[-1] + 1
            with pytest.raises(ValueError, match=f"at most {limits[-1]} in row {self.rows - 1}"):
                self.cache.crop(torch.tensor(tokens))
            return
        self.cache.crop(torch.tensor(tokens))
        for model in self.models:
            model.crop(tokens)

    @rule(data=st.data(), tokens=st.integers(1, 3))
    def step_and_take_it_back(self, data, tokens):
        """Always possible, over a compression too."""
        tokens = min(tokens, self.max_step)
        self.call(None, tokens, False)
        if data.draw(st.booleans()):
            count = data.draw(st.integers(0, tokens))
            self.cache.crop(count)
            counts = [count] * self.rows
        else:
            counts = data.draw(st.lists(st.integers(0, tokens), min_size=self.rows, max_size=self.rows))
            self.cache.crop(torch.tensor(counts))
        for model in self.models:
            model.crop(counts)

    @rule()
    def reset(self):
        self.cache.reset()
        for model in self.models:
            model.reset()

    @rule()
    def save_and_load(self):
        file = io.BytesIO()
        torch.save(self.cache.state_dict(), file)
        file.seek(0)
        self.cache = copy.deepcopy(self.cache)
        self.cache.reset()
        self.cache.load_state_dict(torch.load(file))

    @rule()
    def go_on_with_a_copy(self):
        copied = copy.deepcopy(self.cache)
        self.cache.reset()
        self.cache = copied

    @rule(data=st.data())
    def select(self, data):
        index = data.draw(st.lists(st.integers(0, self.rows - 1), min_size=1, max_size=3))
        self.cache = self.cache.select(torch.tensor(index))
        self.rows = len(index)
        croppable = self.models[0].croppable()
        for model in self.models:
            model.rows = [copy.deepcopy(model.rows[i]) for i in index]
            for row in model.rows:
                row.columns = [True] * croppable

    @invariant()
    def equal(self):
        if not hasattr(self, "cache"):
            return
        assert int(self.cache.columns) == self.models[0].columns
        assert self.cache.tokens_seen.tolist() == [row.seen for row in self.models[0].rows]
        for layer, model in enumerate(self.models):
            lengths, positions = self.cache.lengths(layer), self.cache.positions(layer)
            assert lengths.dtype == positions.dtype == torch.int32
            for b, row in enumerate(model.rows):
                for h, entries in enumerate(row.heads):
                    count = len(entries)
                    assert int(lengths[b, h]) == count
                    assert positions[b, h, :count].tolist() == [e.position for e in entries]
                    assert (positions[b, h, count:] == -1).all()
                    for slot, entry in enumerate(entries):
                        assert torch.equal(self.cache.keys(layer)[b, h, slot], entry.key)
                        assert torch.equal(self.cache.values(layer)[b, h, slot], entry.value)


def test_any_sequence_of_calls_equals_the_list_model():
    run_state_machine_as_test(CacheMachine, settings=settings(max_examples=200, stateful_step_count=12, deadline=None))
