"""CompressedKVCache against a list-based model, over random sequences of everything one can do with it.

Float64 throughout, so that kept sets are equal and not merely close. tests/modules/test_kv_cache_machine.py runs some
hundred sequences; this runs as many as one likes::

    python -m tests._helpers.cache_machine --sequences 10000 --seed 1
"""

from __future__ import annotations

import argparse
import copy
import io
import tempfile
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from fastattn import CompressedKVCache, Rotary
from tests._helpers import exact_policies as exact
from tests._helpers.list_cache import ListCache
from tests._helpers.machine_policies import (
    DIM,
    HEADS,
    INV_FREQ,
    KINDS,
    KV_HEADS,
    LAYERS,
    SCALE,
    SINK,
    V_DIM,
    observe_for_h2o,
    policy_for,
    score_for,
)


class Pair:
    """A cache, and a list model of each of its layers, which are fed the same."""

    def __init__(self, kind, rows, budget, interval, max_step, window, wider, generator):
        self.made_for = (kind, budget, interval, max_step, window, wider)
        self.dims = [(DIM + more, V_DIM + 2 * more) for more in wider]
        self.rotary = Rotary(INV_FREQ)
        self.max_step, self.generator = max_step, generator
        budgets = budget if isinstance(budget, list) else [budget] * LAYERS
        policy = policy_for(kind, window, min(budgets))
        self.cache = CompressedKVCache(
            policy,
            budget,
            num_layers=LAYERS,
            num_kv_heads=KV_HEADS,
            head_dim=[dim for dim, _ in self.dims],
            v_head_dim=[dim for _, dim in self.dims],
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
                score_for(kind, layer, window, budgets[layer]),
                exact.keep,
                rows=rows,
                heads=KV_HEADS,
                budget=budgets[layer],
                interval=interval,
                max_step=max_step,
                window=policy.query_window,
                observe=observe_for_h2o if kind.endswith("h2o") else None,
                whole_window=kind.split()[-1] in ("snap_kv", "tova"),
            )
            for layer in range(LAYERS)
        ]

    def another(self, rows):
        """An empty pair of the same sizes."""
        kind, *sizes = self.made_for
        return Pair(kind, rows, *sizes, self.generator)

    @property
    def rows(self):
        return len(self.models[0].rows)

    def croppable(self):
        return min(model.croppable() for model in self.models)

    def draw(self, heads: int, tokens: int, dim: int) -> torch.Tensor:
        return torch.randn(self.rows, heads, tokens, dim, generator=self.generator, dtype=torch.float64)

    def call(self, mask: torch.Tensor | None, tokens: int, explicit: bool) -> None:
        real = torch.ones(self.rows, tokens, dtype=torch.bool) if mask is None else mask
        seen = torch.tensor([row.seen for row in self.models[0].rows])
        position = (seen[:, None] + real.cumsum(1) - 1).masked_fill(~real, -1)
        position_ids = position.masked_fill(~real, 7) if explicit else None  # ignored at padding
        for layer, model in enumerate(self.models):
            dim, value_dim = self.dims[layer]
            raw = self.draw(HEADS, tokens, dim)
            key = self.rotary.rotate(self.draw(KV_HEADS, tokens, dim), position.clamp(min=0))
            value = self.draw(KV_HEADS, tokens, value_dim)
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
                scale=None if dim == DIM else SCALE,
            )
            torch.testing.assert_close(out.masked_fill(padding, 0.0), expected, rtol=0, atol=1e-12)


class CacheMachine(RuleBasedStateMachine):
    """Runs the same calls on both, and compares everything after each."""

    # AdaptiveBudget joins here: a draw beside ``budget``, handed on by Pair to the cache and, as what it keeps of a
    # row across heads, to ListCache._compress.
    @initialize(
        kind=st.sampled_from(KINDS),
        rows=st.integers(1, 3),
        budget=st.one_of(st.integers(SINK, 9), st.lists(st.integers(SINK, 9), min_size=LAYERS, max_size=LAYERS)),
        interval=st.integers(1, 4),
        max_step=st.integers(1, 3),
        window=st.sampled_from([1, 3, 12]),
        wider=st.sampled_from([(0, 0), (0, 2), (1, 0)]),
        seed=st.integers(0, 2**31),
    )
    def start(self, kind, rows, budget, interval, max_step, window, wider, seed):
        self.pair = Pair(kind, rows, budget, interval, max_step, window, wider, torch.Generator().manual_seed(seed))

    @property
    def cache(self):
        return self.pair.cache

    @property
    def models(self):
        return self.pair.models

    @property
    def rows(self):
        return self.pair.rows

    def call(self, *arguments):
        self.pair.call(*arguments)

    def subset(self, data, of):
        """Some rows, each once, at least one, in any order."""
        order = data.draw(st.permutations(range(of)))
        return list(order[: data.draw(st.integers(1, of))])

    @rule(tokens=st.integers(1, 3), explicit=st.booleans())
    def step(self, tokens, explicit):
        self.call(None, min(tokens, self.pair.max_step), explicit)

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
        if tokens > self.pair.croppable():
            with pytest.raises(ValueError, match="tokens must be at most"):
                self.cache.crop(tokens)
            return
        self.cache.crop(tokens)
        for model in self.models:
            model.crop([tokens] * self.rows)

    @rule(data=st.data(), beyond=st.integers(0, 20))
    def crop_per_row(self, data, beyond):
        limits = [min(model.rows[b].fresh for model in self.models) for b in range(self.rows)]
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
        tokens = min(tokens, self.pair.max_step)
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
        self.pair.cache = copy.deepcopy(self.cache)
        self.cache.reset()
        self.cache.load_state_dict(torch.load(file))

    @rule()
    def go_on_with_a_copy(self):
        copied = copy.deepcopy(self.cache)
        self.cache.reset()
        self.pair.cache = copied

    @rule()
    def save_to_a_file_and_load(self):
        with tempfile.TemporaryDirectory() as folder:
            self.cache.save(Path(folder) / "cache")
            self.pair.cache = CompressedKVCache.load(Path(folder) / "cache")

    @rule(tokens=st.integers(4, 9), chunks=st.integers(2, 3), explicit=st.booleans())
    def chunks(self, tokens, chunks, explicit):
        for _ in range(chunks):
            self.call(None, tokens, explicit)

    @rule(answer=st.integers(1, 6), turn=st.integers(4, 12))
    def answer_and_turn(self, answer, turn):
        for _ in range(answer):
            self.call(None, 1, False)
        self.call(None, turn, False)

    @rule(data=st.data())
    def reset_rows(self, data):
        rows = self.subset(data, self.rows)
        self.cache.reset(torch.tensor(rows))
        for model in self.models:
            model.reset_rows(rows)

    @rule(data=st.data(), prompt=st.integers(0, 14), answer=st.integers(0, 5))
    def insert(self, data, prompt, answer):
        source = self.pair.another(data.draw(st.integers(1, 2)))
        for tokens in [prompt] * (prompt > 0) + [1] * answer:
            source.call(None, tokens, False)
        rows = self.subset(data, min(self.rows, source.rows))
        to = data.draw(st.permutations(range(self.rows)))[: len(rows)]
        self.cache.insert(torch.tensor(to), source.cache, torch.tensor(rows))
        for model, given in zip(self.models, source.models, strict=True):
            model.insert(to, given, rows)

    @rule(data=st.data(), prompt=st.integers(1, 14))
    def one_row_joins_a_decoding_batch(self, data, prompt):
        """A free row is filled, and all decode: what a server does."""
        row = data.draw(st.integers(0, self.rows - 1))
        self.cache.reset(torch.tensor([row]))
        for model in self.models:
            model.reset_rows([row])
        mask = torch.zeros(self.rows, prompt, dtype=torch.bool)
        mask[row] = True
        self.call(mask, prompt, False)
        self.call(None, 1, False)

    @rule(data=st.data())
    def select(self, data):
        index = data.draw(st.lists(st.integers(0, self.rows - 1), min_size=1, max_size=3))
        self.pair.cache = self.cache.select(torch.tensor(index))
        croppable = self.pair.croppable()
        for model in self.models:
            model.rows = [copy.deepcopy(model.rows[i]) for i in index]
            for row in model.rows:
                row.columns = [True] * croppable

    @invariant()
    def equal(self):
        if not hasattr(self, "pair"):
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


def run(sequences: int, steps: int = 12, at: int | None = None) -> None:
    """As many sequences, drawn from the seed ``at`` where one is given; a difference raises and prints its calls."""
    machine = CacheMachine if at is None else seed(at)(CacheMachine)
    options = {"database": None, "suppress_health_check": list(HealthCheck)} if at is not None else {}
    run_state_machine_as_test(
        machine, settings=settings(max_examples=sequences, stateful_step_count=steps, deadline=None, **options)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=12, help="calls of a sequence at most")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start, done, block = time.perf_counter(), 0, 500
    while done < arguments.sequences:
        count = min(block, arguments.sequences - done)
        run(count, arguments.steps, arguments.seed + done)
        done += count
        print(f"{done} sequences, 0 differences, {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
