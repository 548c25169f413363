"""Rows that join and leave a cache, budgets per layer, and calls that are interrupted."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastattn import CompressedKVCache, Policy, Rotary, pyramid_budgets
from fastattn.modules import policy_names
from tests._helpers.policy_caches import small

HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 8, 2
POLICIES = policy_names()


def make(policy: Policy | str = "knorm", budget=16, rows: int = 3, **options) -> CompressedKVCache:
    defaults = {
        "num_layers": LAYERS,
        "num_kv_heads": KV_HEADS,
        "num_heads": HEADS,
        "head_dim": DIM,
        "interval": 4,
        "batch_size": rows,
        "rotary": Rotary(100.0 ** -(torch.arange(4) / 4)),
        "dtype": torch.float64,
    }
    policy = small(policy) if isinstance(policy, str) else policy
    return CompressedKVCache(policy, budget, **{**defaults, **options})


def draw(rows: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(
        torch.randn(rows, heads, count, DIM, generator=generator, dtype=torch.float64)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )


def feed(
    cache: CompressedKVCache, new: list[tuple[Tensor, Tensor, Tensor]], mask: Tensor | None = None
) -> list[Tensor]:
    return [cache.attend(layer, *new[layer], attention_mask=mask) for layer in range(cache.num_layers)]


def drawn(rows: int, count: int, seed: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [draw(rows, count, generator) for _ in range(LAYERS)]


def row_state(cache: CompressedKVCache, row: int) -> dict[str, Tensor]:
    """Everything that a row holds, cut to what is filled."""
    state = {"seen": cache.tokens_seen[row].clone()}
    for layer in range(cache.num_layers):
        for head, length in enumerate(cache.lengths(layer)[row].tolist()):
            for part in ("keys", "values", "positions"):
                state[f"{layer}.{head}.{part}"] = getattr(cache, part)(layer)[row, head, :length].clone()
    return state


def assert_rows_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_row_that_is_reset_starts_as_in_a_new_cache(policy):
    cache, alone = make(policy), make(policy, rows=1)
    feed(cache, drawn(3, 30, 0))
    before = [row_state(cache, row) for row in range(3)]
    cache.reset(torch.tensor([1]))
    assert cache.tokens_seen.tolist() == [30, 0, 30]
    assert cache.lengths(0).tolist() == [[16, 16], [0, 0], [16, 16]]
    for row in (0, 2):
        assert_rows_equal(row_state(cache, row), before[row])
    # The others bring nothing to this call, and stay as they are.
    new = drawn(3, 25, 1)
    mask = torch.tensor([False, True, False])[:, None].expand(3, 25)
    out = feed(cache, new, mask)
    expected = feed(alone, [tuple(part[1:2] for part in layer) for layer in new])
    for layer in range(LAYERS):
        torch.testing.assert_close(out[layer][1:2], expected[layer], rtol=0, atol=1e-12)
    assert_rows_equal(row_state(cache, 1), row_state(alone, 0))
    for row in (0, 2):
        assert_rows_equal(row_state(cache, row), before[row])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("count", [9, 40], ids=["within the budget", "beyond it"])
def test_an_inserted_row_goes_on_as_in_its_own_cache(policy, count):
    cache, other = make(policy), make(policy, rows=2)
    feed(cache, drawn(3, 30, 0))
    feed(other, drawn(2, count, 1))
    before = row_state(cache, 1)
    cache.insert(torch.tensor([2, 0]), other)
    assert cache.tokens_seen.tolist() == [count, 30, count]
    assert int(cache.columns) == max(30, count)
    assert_rows_equal(row_state(cache, 1), before)
    for row, source in ((2, 0), (0, 1)):
        assert_rows_equal(row_state(cache, row), row_state(other, source))
    for step in range(12):  # over evictions
        new = drawn(3, 1, 100 + step)
        out = feed(cache, new)
        expected = feed(other, [tuple(part[[2, 0]] for part in layer) for layer in new])
        for layer in range(LAYERS):
            torch.testing.assert_close(out[layer][[2, 0]], expected[layer], rtol=0, atol=1e-12)
    for row, source in ((2, 0), (0, 1)):
        assert_rows_equal(row_state(cache, row), row_state(other, source))


def test_insert_takes_the_rows_that_are_named_and_leaves_the_source_alone():
    cache, other = make(), make(rows=2)
    feed(other, drawn(2, 20, 1))
    states = [row_state(other, row) for row in range(2)]
    cache.insert(torch.tensor([1, 2]), other, torch.tensor([1, 1]))
    assert_rows_equal(row_state(cache, 1), states[1])
    assert_rows_equal(row_state(cache, 2), states[1])
    for row in range(2):
        assert_rows_equal(row_state(other, row), states[row])
    assert cache.tokens_seen.tolist() == [0, 20, 20]


def test_a_query_window_that_was_never_filled_can_be_inserted():
    cache, fresh = make("expected_attention"), make("expected_attention", rows=1, num_heads=None)
    feed(cache, drawn(3, 30, 0))
    cache.insert(torch.tensor([1]), fresh)
    assert cache.tokens_seen.tolist() == [30, 0, 30]
    later = make("expected_attention", num_heads=None)
    later.insert(torch.tensor([0]), cache, torch.tensor([2]))
    assert_rows_equal(row_state(later, 0), row_state(cache, 2))


@pytest.mark.parametrize(
    ("rows", "source", "source_rows", "error", "message"),
    [
        ([0], "no cache", None, TypeError, "source must be a CompressedKVCache, got str"),
        ([0], {"budget": 8}, None, ValueError, "source must have layers like the cache's: layer 0"),
        ([0], {"interval": 5}, None, ValueError, "source must have layers like the cache's: layer 0"),
        ([0], {"num_layers": 1}, None, ValueError, "source must have the cache's 2 layers, got 1"),
        ([0], {"dtype": torch.float32}, None, TypeError, "source must have the cache's dtype torch.float64"),
        ([0], {"policy": "expected_attention"}, None, ValueError, "newest queries, got a policy that keeps 128"),
        ([0], {"num_heads": 2}, None, ValueError, "source must have the cache's 4 query heads, got 2"),
        ([0, 0], {"rows": 2}, None, ValueError, "rows must name every row once"),
        ([3], {}, None, ValueError, r"rows must name rows 0..2, got \[3\]"),
        ([0, 1], {}, None, ValueError, "rows must name as many rows as come from source, 1, got 2"),
        ([0], {}, [1], ValueError, r"source_rows must name rows 0..0, got \[1\]"),
    ],
)
def test_insert_refuses_before_anything_changes(rows, source, source_rows, error, message):
    cache = make()
    feed(cache, drawn(3, 20, 0))
    before = {name: buffer.clone() for name, buffer in cache.named_buffers()}
    if isinstance(source, dict):
        source = make(**{"rows": 1, **source})
    index = None if source_rows is None else torch.tensor(source_rows)
    with pytest.raises(error, match=message):
        cache.insert(torch.tensor(rows), source, index)
    for name, buffer in cache.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_insert_and_reset_of_rows_refuse_what_they_cannot_mean():
    cache = make()
    with pytest.raises(ValueError, match="source must be another cache"):
        cache.insert(torch.tensor([0]), cache)
    with pytest.raises(TypeError, match="rows must be an integer tensor, got list"):
        cache.reset([0])
    with pytest.raises(ValueError, match="rows must be integers"):
        cache.reset(torch.tensor([0.0]))
    half = make(rows=1)
    half.attend(0, *drawn(1, 4, 0)[0])
    with pytest.raises(RuntimeError, match="stopped before layer 1"):
        cache.insert(torch.tensor([0]), half)
    with pytest.raises(RuntimeError, match="stopped before layer 1"):
        half.reset(torch.tensor([0]))


def test_nothing_can_be_taken_back_once_rows_have_come_or_gone():
    cache, other = make(), make(rows=1)
    feed(cache, drawn(3, 10, 0))
    cache.reset(torch.tensor([0]))
    with pytest.raises(ValueError, match="tokens must be at most 0"):
        cache.crop(1)
    feed(cache, drawn(3, 2, 1))
    cache.crop(2)
    assert cache.tokens_seen.tolist() == [0, 10, 10]
    feed(other, drawn(1, 5, 2))
    feed(cache, drawn(3, 2, 3))
    cache.insert(torch.tensor([1]), other)
    with pytest.raises(ValueError, match="tokens must be at most 0"):
        cache.crop(1)


# -- budgets per layer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_budget_per_layer_keeps_what_a_cache_of_that_budget_keeps(policy):
    budgets = (20, 7)
    cache = make(policy, budgets, rows=1)
    singles = [make(policy, budget, rows=1) for budget in budgets]
    for seed, count in enumerate([50, *[1] * 15]):
        new = drawn(1, count, seed)
        out = feed(cache, new)
        for layer, single in enumerate(singles):
            torch.testing.assert_close(out[layer], feed(single, new)[layer], rtol=0, atol=1e-12)
    for layer, single in enumerate(singles):
        assert torch.equal(cache.lengths(layer), single.lengths(layer))
        length = int(cache.lengths(layer).max())
        assert torch.equal(cache.positions(layer)[..., :length], single.positions(layer)[..., :length])
        assert cache.keys(layer).shape == single.keys(layer).shape
    assert cache.budget == budgets
    assert cache.capacity == 24
    shared = sum(
        buffer.numel() * buffer.element_size() for name, buffer in cache.named_buffers() if "layers" not in name
    )
    layers = sum(
        buffer.numel() * buffer.element_size()
        for layer, single in enumerate(singles)
        for name, buffer in single.named_buffers()
        if name.startswith(f"layers.{layer}.")
    )
    assert cache.nbytes == shared + layers


@pytest.mark.parametrize(
    ("budget", "error", "message"),
    [
        ([16], ValueError, "budget must be one number, or one for each of the 2 layers, got 1"),
        ([16, 0], ValueError, r"budget\[1\] must be at least 1, got 0"),
        ([16, 2.0], TypeError, r"budget\[1\] must be an integer, got float"),
        ("16", TypeError, "budget must be an integer, got str"),
        (None, TypeError, "budget must be an integer, got NoneType"),
    ],
)
def test_wrong_budgets(budget, error, message):
    with pytest.raises(error, match=message):
        make(budget=budget)


def test_every_layers_budget_must_suit_the_policy():
    with pytest.raises(ValueError, match="budget must be at least the 4 tokens that StreamingLLM always keeps, got 3"):
        make("streaming_llm", (16, 3))


@pytest.mark.parametrize(
    ("mean", "layers", "ratio"), [(1024, 30, 0.25), (100, 7, 0.1), (5, 3, 1.0), (64, 1, 0.5), (9, 2, 0.3)]
)
def test_pyramid_budgets_fall_and_have_that_mean(mean, layers, ratio):
    budgets = pyramid_budgets(mean, layers, ratio=ratio)
    assert len(budgets) == layers
    assert sum(budgets) == mean * layers
    assert list(budgets) == sorted(budgets, reverse=True)
    if layers > 1:
        assert abs(budgets[-1] - ratio * budgets[0]) <= 2


def test_pyramid_budgets_refuse_what_has_no_answer():
    with pytest.raises(ValueError, match=r"ratio must be above 0 and at most 1, got 1\.5"):
        pyramid_budgets(8, 4, ratio=1.5)
    with pytest.raises(TypeError, match="ratio must be a float, got str"):
        pyramid_budgets(8, 4, ratio="0.5")
    with pytest.raises(ValueError, match="mean must leave every layer a token"):
        pyramid_budgets(1, 10, ratio=0.01)
    with pytest.raises(ValueError, match="num_layers must be at least 1, got 0"):
        pyramid_budgets(8, 0)


# -- interruptions ---------------------------------------------------------------------------------------------------


class Injector(TorchDispatchMode):
    """Raises instead of the ``at``-th operator."""

    def __init__(self, at: int, error: type[BaseException]) -> None:
        super().__init__()
        self.at, self.error, self.calls = at, error, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        if self.calls == self.at:
            raise self.error(f"injected in place of {func}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("call", ["step", "evicting step", "prompt"])
def test_an_exception_in_place_of_any_operator_leaves_the_cache_as_it_was_or_marked(policy, call):
    count = 20 if call == "prompt" else 1
    prepared = make(policy, rows=2, max_step=2)
    feed(prepared, drawn(2, 40, 0))
    while call == "evicting step" and int(prepared.lengths(0).max()) + 1 < 16 + 4:
        feed(prepared, drawn(2, 1, 10))
    new = drawn(2, count, 99)
    reference = copy.deepcopy(prepared)
    expected_out = feed(reference, new)
    expected = [row_state(reference, row) for row in range(2)]
    outcomes = {"as it was": 0, "marked": 0}
    at = 1
    while True:
        cache, error = copy.deepcopy(prepared), (torch.OutOfMemoryError, KeyboardInterrupt)[at % 2]
        try:
            with Injector(at, error):
                feed(cache, new)
        except error:
            pass
        else:
            break  # the call has fewer operators than that
        try:
            out = feed(cache, new)
        except RuntimeError as refused:
            if "the cache is invalid since" not in str(refused) and "the last call stopped before" not in str(refused):
                raise
            outcomes["marked"] += 1
            cache.reset()
            feed(cache, drawn(2, 1, 1))  # usable again
        else:
            for layer in range(LAYERS):
                torch.testing.assert_close(out[layer], expected_out[layer], rtol=0, atol=1e-12)
            for row in range(2):
                assert_rows_equal(row_state(cache, row), expected[row])
            outcomes["as it was"] += 1
        at += 1
    assert all(outcomes.values()), f"{outcomes} of {at - 1} operators: the test does not reach both"


def test_two_threads_in_one_cache_get_an_error_that_says_so():
    class Waits(Policy):
        def __init__(self) -> None:
            self.inside, self.leave = threading.Event(), threading.Event()

        def score(self, state):
            self.inside.set()
            self.leave.wait(10)
            return torch.zeros_like(state.positions, dtype=torch.float64)

    policy = Waits()
    cache = make(policy, rows=1)
    new = drawn(1, 30, 0)
    worker = threading.Thread(target=feed, args=(cache, new))
    worker.start()
    assert policy.inside.wait(10)
    with pytest.raises(RuntimeError, match="another thread's call is under way in this cache"):
        cache.attend(0, *new[0])
    policy.leave.set()
    worker.join()
    assert cache.tokens_seen.tolist() == [30]
    # Between two layers of another thread's call
    worker = threading.Thread(target=cache.attend, args=(0, *drawn(1, 1, 1)[0]))
    worker.start()
    worker.join()
    with pytest.raises(RuntimeError, match="another thread's call is under way in this cache"):
        cache.attend(0, *drawn(1, 1, 1)[0])


def test_a_state_saved_between_the_layers_of_a_call_says_so():
    cache = make(rows=1)
    cache.attend(0, *drawn(1, 4, 0)[0])
    state = cache.state_dict()
    with pytest.raises(ValueError, match="saved between the layers of a call"):
        make(rows=1).load_state_dict(state)
    cache.attend(1, *drawn(1, 4, 0)[1])
    whole = make(rows=1)
    whole.load_state_dict(cache.state_dict())
    assert_rows_equal(row_state(whole, 0), row_state(cache, 0))


def test_taking_back_over_a_compression_of_an_earlier_layer_is_refused():
    """Budgets per layer: the first layer was compressed and the last was not."""
    cache = make("knorm", (2, 30), rows=1, interval=1)
    for step in range(4):
        feed(cache, drawn(1, 1, step))
    with pytest.raises(ValueError, match="tokens must be at most 1"):
        cache.crop(2)
    with pytest.raises(ValueError, match="at most 1 in row 0"):
        cache.crop(torch.tensor([2]))
    cache.crop(1)
    feed(cache, drawn(1, 5, 9))
    with pytest.raises(ValueError, match="tokens must be at most 0"):
        cache.crop(1)
    feed(cache, drawn(1, 1, 10))
    cache.crop(torch.tensor([1]))
    assert cache.lengths(0).tolist() == [[2, 2]]
    assert cache.lengths(1).tolist() == [[8, 8]]
