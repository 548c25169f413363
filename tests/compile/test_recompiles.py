"""Decoding over at least five evictions is one graph: no breaks, no recompilation, whatever the cache holds."""

from __future__ import annotations

import pytest
import torch

from fastattn import H2O, CompressedKVCache, ExpectedAttention, Policy, Protect, Rotary, SnapKV, StreamingLLM
from tests._helpers.compiling import TinyModel, counting, greedy, no_recompiles

pytestmark = pytest.mark.compile


class LargestValues(Policy):
    """A user's policy."""

    query_window = 3

    def score(self, state):
        return state.values.float().norm(dim=-1) + state.queries.float().mean((1, 2, 3))[:, None, None]


class Visits(Policy):
    """A user's policy with numbers per slot of its own.

    The factor of the position keeps scores apart: a token that comes again has a key of the same norm, and which of two
    equal scores is the larger is a matter of rounding, which Inductor's sums and eager's do differently.
    """

    slot_state = {"size": torch.float32, "calls": torch.int64}  # noqa: RUF012

    def observe(self, state, query):
        size = state.keys.float().nan_to_num().square().sum(-1)
        state.slots["size"] = state.slots["size"] + size * (1 + 0.05 * torch.sin(state.positions.float() * 1.7))
        state.slots["calls"] += state.valid

    def score(self, state):
        return state.slots["size"] / state.slots["calls"].clamp(min=1)


POLICIES = {
    "knorm": "knorm",
    "key_diff": "key_diff",
    "streaming_llm": "streaming_llm",
    "rerotated": StreamingLLM(rerotate=True),
    "expected_attention": "expected_attention",
    "expected_attention as samples": ExpectedAttention(query_window=4),
    "a user's": LargestValues(),
    "snap_kv": SnapKV(window=6, kernel=3),
    "tova": "tova",
    "h2o": "h2o",
    "random": "random",
    "protected": Protect(H2O(n_recent=2), n_sink=2, n_recent=3),
    "a user's numbers per slot": Visits(),
}


def prompt(batch: int, count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 64, (batch, count), generator=torch.Generator().manual_seed(seed))


# Inductor is given one policy of each kind, which keeps the suite short: the graph it gets is aot_eager's.
@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, "aot_eager") for name in POLICIES]
    + [(name, "inductor") for name in ("knorm", "expected_attention", "a user's", "snap_kv", "h2o")]
    + [("a user's numbers per slot", "inductor")],
)
def test_decoding_is_one_graph(name, backend):
    torch.manual_seed(0)
    model = TinyModel().eval()
    with counting() as counts, torch.no_grad():
        step = torch.compile(model, fullgraph=True, backend=backend)
        for seed, length in enumerate((9, 14, 20)):  # other content, lengths, prompt and cache object
            outputs = []
            for run in (model, step):
                cache = model.make_cache(POLICIES[name])
                tokens = prompt(1, length, seed)
                logits = model(tokens, torch.arange(length)[None], cache)
                with no_recompiles():
                    outputs.append(
                        greedy(run, model, cache, logits[:, -1:].argmax(-1), torch.tensor([[length]]), steps=30)
                    )
                outputs.append(cache.positions(1).clone())
                assert int(cache.lengths(1).max()) < 16  # evicted on the way
            assert torch.equal(outputs[0], outputs[2])
            assert torch.equal(outputs[1], outputs[3])
        assert counts.read().graphs == 1
    assert counts.breaks == 0


@pytest.mark.parametrize("dynamic", [None, True])
def test_numbers_that_the_compiler_would_make_symbols_reach_operators_as_numbers(dynamic):
    """A float that changed between calls, or any float with ``dynamic=True``, becomes a symbol, which ``torch.cond``
    cannot hand to an operator."""
    new = [torch.randn(1, 2, 1, 16) for _ in range(3)]
    with torch.no_grad():
        for number in (0.1, 0.2, 0.3):
            policy = ExpectedAttention(epsilon=number, n_sink=2)
            caches = [
                CompressedKVCache(
                    policy,
                    8,
                    num_layers=1,
                    num_kv_heads=2,
                    num_heads=2,
                    head_dim=16,
                    interval=4,
                    rotary=Rotary(torch.ones(8)),
                )
                for _ in range(2)
            ]
            step = torch.compile(caches[1].attend, fullgraph=True, dynamic=dynamic, backend="aot_eager")
            for attend, cache in zip((caches[0].attend, step), caches, strict=True):
                for _ in range(20):
                    attend(0, *new, scale=number)
                assert int(cache.lengths(0).max()) <= 12  # evicted on the way
            assert torch.equal(caches[0].positions(0), caches[1].positions(0))


@pytest.mark.parametrize("policy", ["key_diff", "expected_attention"])
def test_ragged_batches_share_the_graph(policy):
    """Rows of different lengths, and rows that are not fed in a step (a mask), decode in one graph each."""
    torch.manual_seed(0)
    model = TinyModel().eval()
    tokens = prompt(3, 20, 1)
    mask = torch.ones(3, 20, dtype=torch.bool)
    mask[1, :11] = mask[2, :4] = False
    position = (mask.cumsum(1) - 1).clamp(min=0)
    with counting() as counts, torch.no_grad():
        step = torch.compile(model, fullgraph=True, backend="aot_eager")
        results = []
        for run in (model, step):
            cache = model.make_cache(policy, batch=3)
            logits = model(tokens, position, cache, mask)
            with no_recompiles():
                results.append(greedy(run, model, cache, logits[:, -1:].argmax(-1), mask.sum(1)[:, None], steps=30))
            results.append(cache.positions(0).clone())
        assert torch.equal(results[0], results[2])
        assert torch.equal(results[1], results[3])
        assert counts.read().graphs == 1
        caches = [model.make_cache(policy, batch=3) for _ in range(2)]
        seen = torch.zeros(3, 1, dtype=torch.int64)
        for i in range(24):
            active = torch.tensor([[True], [i % 2 == 0], [i > 12]])
            outs = [run(tokens[:, :1], seen, cache, active) for run, cache in zip((model, step), caches, strict=True)]
            torch.testing.assert_close(outs[1][active[:, 0]], outs[0][active[:, 0]])
            seen = seen + active
        assert torch.equal(caches[0].positions(1), caches[1].positions(1))
        assert torch.equal(caches[0].tokens_seen, seen[:, 0])
    assert counts.graphs == 2
    assert counts.breaks == 0


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_prefill_compiles_once_and_once_more_when_its_length_first_varies(backend):
    torch.manual_seed(0)
    model = TinyModel().eval()
    with counting() as counts, torch.no_grad():
        prefill = torch.compile(model, fullgraph=True, backend=backend)
        graphs = []
        for length in (10, 17, 25, 70, 11, 130):  # below and above the budget and the query window
            caches = [model.make_cache("expected_attention") for _ in range(2)]
            tokens, position = prompt(1, length, length), torch.arange(length)[None]
            expected, got = model(tokens, position, caches[0]), prefill(tokens, position, caches[1])
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
            for layer in range(2):
                assert torch.equal(caches[0].positions(layer), caches[1].positions(layer))
            graphs.append(counts.read().graphs)
        assert graphs == [1, 2, 2, 2, 2, 2]
    assert counts.breaks == 0


def test_an_untraceable_policy_is_shown_what_a_traceable_one_looks_like():
    class Branching(Policy):
        def score(self, state):
            return state.keys.sum(-1) if state.keys.sum() > 0 else -state.keys.sum(-1)

    model = TinyModel().eval()
    with counting(), torch.no_grad():
        step = torch.compile(model, fullgraph=True, backend="aot_eager")
        with pytest.raises(Exception, match=r"torch.where\(state.positions < 4, torch.inf, size\)"):
            step(prompt(1, 1, 0), torch.zeros(1, 1, dtype=torch.int64), model.make_cache(Branching()))


def test_errors_while_tracing_name_the_argument():
    model = TinyModel().eval()
    with counting(), torch.no_grad():
        step = torch.compile(model, fullgraph=True, backend="aot_eager")
        with pytest.raises(Exception, match="key must have the cache's batch size 2, got 1"):
            step(prompt(1, 1, 0), torch.zeros(1, 1, dtype=torch.int64), model.make_cache("knorm", batch=2))
        cache = model.make_cache("expected_attention")
        cache.layers[0].queries = None
        with pytest.raises(Exception, match="num_heads must be given to CompressedKVCache"):
            step(prompt(1, 1, 0), torch.zeros(1, 1, dtype=torch.int64), cache)
