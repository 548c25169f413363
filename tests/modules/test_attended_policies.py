"""SnapKV, TOVA, H2O, Random and Protect against their float64 definitions, and numbers per slot of a user's policy."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastattn import H2O, TOVA, CompressedKVCache, Knorm, Policy, Protect, Random, SnapKV
from tests._helpers import draw
from tests._helpers.list_policies import ListRow
from tests._helpers.policy_caches import Sequence, feed, kept, make

NAMES = ("snap_kv", "tova", "h2o", "random")


def policy_of(model: ListRow) -> Policy:
    policy: Policy = {
        "snap_kv": lambda: SnapKV(model.window, model.kernel),
        "tova": TOVA,
        "h2o": lambda: H2O(model.n_recent),
        "random": lambda: Random(model.seed),
    }[model.name]()
    return Protect(policy, n_sink=model.n_sink) if model.n_sink else policy


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@draw.cases(40)
def test_kept_sets_are_the_definitions(name: str, data: st.DataObject) -> None:
    """Prompts, chunks, steps and padding, drawn shapes, ordinary and latent caches; float64, so that sets are equal."""
    latent = data.draw(st.booleans())
    rows, kv_heads = data.draw(st.integers(1, 3)), 1 if latent else data.draw(st.integers(1, 3))
    group, dim, budget = (
        data.draw(st.integers(1, 3)),
        data.draw(st.sampled_from([2, 8, 17])),
        data.draw(st.integers(6, 20)),
    )
    options = {
        "window": data.draw(st.integers(1, 4)),
        "kernel": data.draw(st.sampled_from([1, 3, 5, 9])),
        "n_recent": data.draw(st.sampled_from([None, 0, 3])),
        "seed": data.draw(st.integers(0, 2**32 - 1)),
        "n_sink": data.draw(st.sampled_from([0, 2])),
        "interval": data.draw(st.integers(1, 5)),
        "max_step": data.draw(st.integers(1, 3)),
    }
    models = [ListRow(name, kv_heads, budget, scale=0.7, **options) for _ in range(rows)]
    cache = CompressedKVCache(
        policy_of(models[0]),
        budget,
        num_layers=1,
        num_kv_heads=kv_heads,
        head_dim=dim,
        latent_rank=dim // 2 if latent else None,
        batch_size=rows,
        interval=options["interval"],
        max_step=options["max_step"],
        dtype=torch.float64,
    )
    cache.keys(0).fill_(float("nan"))
    seed, seen = data.draw(draw.seeds), [0] * rows
    for index, size in enumerate(data.draw(st.lists(st.sampled_from([1, 1, 1, 2, 5, 30]), min_size=1, max_size=16))):
        query, key, value = (
            draw.normal(rows, heads, size, dim, dtype=torch.float64, seed=seed + 3 * index + i)
            for i, heads in enumerate((group * kv_heads, kv_heads, kv_heads))
        )
        mask = torch.zeros(rows, size, dtype=torch.bool)
        for row in mask:
            start = data.draw(st.sampled_from([0, 0, size // 2]))
            row[start : data.draw(st.sampled_from([size, size, start]))] = True
        padding = ~mask[:, None, :, None]
        parts = [tensor.masked_fill(padding, float("nan")) for tensor in (query, key, value)]
        cache.attend(0, parts[0], parts[1], None if latent else parts[2], attention_mask=mask, scale=0.7)
        for b, model in enumerate(models):
            count = int(mask[b].sum())
            model.max_step = options["max_step"] if size <= options["max_step"] else 0
            model.feed(query[b][:, mask[b]], key[b][:, mask[b]], list(range(seen[b], seen[b] + count)))
            seen[b] += count
            assert kept(cache, b) == model.kept()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_low_precision_keeps_what_float64_scoring_of_the_same_keys_keeps(name: str, dtype: torch.dtype) -> None:
    """Scores are float32 whatever the cache's dtype: bfloat16 arithmetic would tie most of them."""
    sequence = Sequence(400, dtype=dtype)
    model = ListRow(name, 2, 100, interval=8, scale=0.25)
    cache = make(policy_of(model), 100, dtype=dtype)
    first = 0
    for size in [300, *[1] * 24]:
        query, key, value = (t[:, :, first : first + size] for t in (sequence.query, sequence.key, sequence.value))
        cache.attend(0, query, key, value)
        model.feed(query[0], key[0], list(range(first, first + size)))
        first += size
        for one, other in zip(kept(cache), model.kept(), strict=True):
            assert len(set(one) ^ set(other)) <= 2, "a tie within float32 at most"


def test_random_is_the_same_in_every_batch_chunking_and_dtype_and_differs_between_layers_and_heads() -> None:
    sequence = Sequence(80)
    caches = [
        make(Random(seed=5), 20, num_layers=2, dtype=dtype, interval=1)
        for dtype in (torch.float32, torch.float32, torch.float64)
    ]
    for cache, sizes in zip(caches, ([80], [30, 25, 25], [80]), strict=True):
        sequence = Sequence(80, dtype=cache.dtype)
        first = 0
        for size in sizes:
            call = [t[:, :, first : first + size] for t in (sequence.query, sequence.key, sequence.value)]
            for layer in range(2):
                cache.attend(layer, *call)
            first += size
    sets = [
        tuple(cache.positions(layer)[0, head, :20].tolist())
        for cache in caches
        for layer in range(2)
        for head in range(2)
    ]
    assert sets[:4] == sets[4:8] == sets[8:]
    assert len(set(sets)) == 4
    assert len({p for head in sets[:4] for p in head}) > 40, "spread over the sequence"


def test_h2o_of_a_long_prompt_in_blocks_is_that_of_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastattn.ops.cpu import mass

    sequence, caches = Sequence(200, dtype=torch.float64), [make("h2o", 60, dtype=torch.float64) for _ in range(2)]
    feed(caches[0], sequence, [200])
    monkeypatch.setattr(mass, "_LOGITS", 1500)
    feed(caches[1], sequence, [200])
    torch.testing.assert_close(caches[1].layers[0].slot_mass, caches[0].layers[0].slot_mass, rtol=1e-12, atol=0)
    assert kept(caches[0]) == kept(caches[1])


# -- numbers per slot of a policy of one's own -----------------------------------------------------------------------


class Counting(Policy):
    """Counts the calls that a token has been through, and remembers its position."""

    slot_state = {"calls": torch.int64, "at": torch.float32}  # noqa: RUF012

    def observe(self, state: Any, query: Tensor) -> None:
        state.slots["calls"] += 1  # also where there is no token
        state.slots["at"] = state.positions.to(state.slots["at"].dtype) + 0.5

    def score(self, state: Any) -> Tensor:
        self.seen = {name: tensor.clone() for name, tensor in state.slots.items()}
        return state.keys[..., 0].float()


def assert_moved_along(cache: CompressedKVCache, calls: dict[int, int]) -> None:
    layer = cache.layers[0]
    for row in range(cache.batch_size):
        for head, positions in enumerate(kept(cache, row)):
            assert layer.slot_calls[row, head, : len(positions)].tolist() == [calls[p] for p in positions]
            assert layer.slot_at[row, head, : len(positions)].tolist() == [p + 0.5 for p in positions]
            assert (layer.slot_calls[row, head, len(positions) :] == 0).all()
            assert (layer.slot_at[row, head, len(positions) :] == 0).all()


def test_numbers_per_slot_follow_their_tokens() -> None:
    cache, sequence = make(Counting(), 12, interval=4, batch_size=2), Sequence(60)
    calls: dict[int, int] = {}
    first = 0

    def go_on(sizes: list[int]) -> None:
        nonlocal first
        for size in sizes:
            parts = [t[:, :, first : first + size] for t in (sequence.query, sequence.key, sequence.value)]
            cache.attend(0, *(torch.cat([t, -t]).expand(cache.batch_size, -1, -1, -1) for t in parts))
            calls.update({p: calls.get(p, 0) + 1 for p in range(first + size)})
            first += size
            assert_moved_along(cache, calls)

    go_on([20, *[1] * 9])
    cache.reorder(torch.tensor([1, 0]))
    go_on([1, 9, 1])
    cache.crop(1)
    first -= 1
    del calls[first]
    assert_moved_along(cache, calls)
    go_on([1, 1])
    other = make(Counting(), 12, interval=4, batch_size=2)
    other.load_state_dict(cache.state_dict())
    cache = copy.deepcopy(other.select(torch.tensor([1, 0])))
    assert_moved_along(cache, calls)
    go_on([1, 1, 1, 1])
    cache.reset()
    assert all((cache.layers[0].get_buffer(name) == 0).all() for name in ("slot_calls", "slot_at"))


def test_a_row_without_real_tokens_keeps_its_numbers() -> None:
    cache, sequence = make(Counting(), 12, interval=4, batch_size=2), Sequence(40)
    both = [t.expand(2, -1, -1, -1) for t in (sequence.query, sequence.key, sequence.value)]
    cache.attend(0, *(t[:, :, :10] for t in both))
    at = cache.layers[0].slot_at[1].clone()
    mask = torch.tensor([[True], [False]]).expand(2, 20)
    cache.attend(0, *(t[:, :, 10:30] for t in both), attention_mask=mask)
    assert kept(cache, 1) == [list(range(10))] * 2
    assert torch.equal(cache.layers[0].slot_at[1], at)


def test_a_change_of_dtype_leaves_numbers_per_slot_their_own() -> None:
    cache = make(Counting(), 12)
    feed(cache, Sequence(30), [30])
    at = cache.layers[0].slot_at.clone()
    cache.to(torch.bfloat16)
    assert cache.layers[0].slot_at.dtype == torch.float32
    assert torch.equal(cache.layers[0].slot_at, at)
    cache.double()
    assert cache.layers[0].slot_at.dtype == torch.float64
    assert cache.layers[0].slot_calls.dtype == torch.int64


def test_a_policy_without_numbers_per_slot_has_no_buffer_for_them() -> None:
    assert [name for name, _ in make(Knorm(), 12).named_buffers() if "slot_" in name] == []
    cache = make("h2o", 12)
    assert cache.needs_queries
    assert sum("slot_" in name for name, _ in cache.named_buffers()) == 2


class FaultyObserver(Counting):
    def __init__(self, fault: Any) -> None:
        self.fault = fault

    def observe(self, state: Any, query: Tensor) -> None:
        super().observe(state, query)
        self.fault(state.slots)


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        (lambda slots: slots.pop("at"), ValueError, "must leave ['at', 'calls'] in state.slots, got ['calls']"),
        (lambda slots: slots.update(at=3), TypeError, "must leave a tensor in state.slots['at'], got int"),
        (lambda slots: slots.update(at=slots["at"].double()), ValueError, "of dtype torch.float32, got torch.float64"),
        (lambda slots: slots.update(at=slots["at"][0]), ValueError, "of shape torch.Size([1, 2, "),
        (lambda slots: 1 / 0, ZeroDivisionError, "division"),
    ],
    ids=["missing", "type", "dtype", "shape", "exception"],
)
@pytest.mark.parametrize("sizes", [[30], [1]], ids=["prompt", "step"])
def test_a_faulty_observe_leaves_the_cache_as_it_was(
    fault: Any, error: type[Exception], words: str, sizes: list[int]
) -> None:
    policy = FaultyObserver(lambda slots: None)
    cache = make(policy, 12)
    feed(cache, Sequence(8), [8])
    before = copy.deepcopy(cache.state_dict())
    policy.fault = fault
    with pytest.raises(error, match=re.escape(words)):
        feed(cache, Sequence(30), sizes)
    for name in ("positions", "lengths", "slot_at", "slot_calls"):
        assert torch.equal(cache.state_dict()[f"layers.0.{name}"], before[f"layers.0.{name}"]), name
    policy.fault = lambda slots: None
    feed(cache, Sequence(30), sizes)


@pytest.mark.parametrize(
    ("slot_state", "error", "words"),
    [
        (["mass"], TypeError, "policy.slot_state must map names to dtypes, got list"),
        ({"a mass": torch.float32}, ValueError, "policy.slot_state must have names that are identifiers, got 'a mass'"),
        ({3: torch.float32}, ValueError, "policy.slot_state must have names that are identifiers, got 3"),
        ({"mass": "float32"}, TypeError, "policy.slot_state['mass'] must be a torch.dtype, got str"),
    ],
)
def test_bad_slot_state(slot_state: Any, error: type[Exception], words: str) -> None:
    policy = Counting()
    policy.slot_state = slot_state
    with pytest.raises(error, match=re.escape(words)):
        make(policy, 12)


def test_numbers_per_slot_need_queries() -> None:
    cache, sequence = make("h2o", 12), Sequence(5)
    with pytest.raises(TypeError, match="query must be a tensor: H2O looks at queries, got NoneType"):
        cache.update(0, None, sequence.key, sequence.value)


def test_protect_forwards_what_the_inner_policy_needs() -> None:
    policy = Protect(SnapKV(window=5), n_sink=3, n_recent=7)
    assert (policy.query_window, policy.predicated, policy.needs_rotary, policy.rerotate) == (5, True, False, False)
    assert dict(Protect(H2O()).slot_state) == dict(H2O().slot_state)
    cache = make(Protect(Knorm(), n_sink=3, n_recent=4), 10, interval=2)
    feed(cache, Sequence(50), [30, *[1] * 20])
    assert all({0, 1, 2, 46, 47, 48, 49} - {46} <= set(head) for head in kept(cache))
