"""The guarantees of CompressedKVCache that the list-based machine does not cover, and what it refuses."""

from __future__ import annotations

import copy
import pickle
import weakref

import pytest
import torch
from torch import Tensor

from fastattn import CompressedKVCache, Policy, Rotary
from fastattn.modules import policy_names
from fastattn.modules.kv_cache.buffers import Buffer, layer_buffers
from fastattn.ops import reference
from tests._helpers.policy_caches import small

HEADS, KV_HEADS, DIM = 4, 2, 8
POLICIES = policy_names()


def make(policy: Policy | str = "knorm", budget: int = 16, **options) -> CompressedKVCache:
    defaults = {
        "num_layers": 2,
        "num_kv_heads": KV_HEADS,
        "head_dim": DIM,
        "interval": 4,
        "rotary": Rotary(100.0 ** -(torch.arange(4) / 4)),
    }
    return CompressedKVCache(policy, budget, **{**defaults, **options})


def tokens(count: int, batch: int = 1, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(batch, h, count, DIM, generator=generator) for h in (HEADS, KV_HEADS, KV_HEADS)]
    return tuple(t.to(dtype) for t in draw)


def feed(cache: CompressedKVCache, count: int, seed: int = 0, **options) -> list[Tensor]:
    q, k, v = tokens(count, cache.batch_size, seed, cache.dtype)
    return [cache.attend(layer, q, k, v, **options) for layer in range(cache.num_layers)]


def snapshot(cache: CompressedKVCache) -> dict[str, Tensor]:
    """All that must not change: slots beyond the lengths may, and so may queries older than the window."""
    state = {name: buffer.clone() for name, buffer in cache.named_buffers() if "quer" not in name}
    for layer in range(cache.num_layers):
        empty = cache.positions(layer) < 0
        for part in ("keys", "values"):
            state[f"layers.{layer}.{part}"].masked_fill_(empty[..., None], 0.0)
    return state


def assert_same(cache: CompressedKVCache, state: dict[str, Tensor]) -> None:
    for name, buffer in snapshot(cache).items():
        assert torch.equal(buffer, state[name]), name


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("calls", [[24], [9, 8, 7], [5, *[1] * 19]], ids=["prompt", "chunks", "decoding"])
def test_within_the_budget_it_is_a_full_cache(policy, calls):
    cache, (q, k, v) = make(small(policy), 24, num_layers=1), tokens(24)
    out, start = [], 0
    for count in calls:
        part = slice(start, start + count)
        out.append(cache.attend(0, q[:, :, part], k[:, :, part], v[:, :, part]))
        start += count
    full = reference.attention(q.double(), k.double(), v.double(), causal=True)
    torch.testing.assert_close(torch.cat(out, 2).double(), full, rtol=0, atol=2e-6)
    assert torch.equal(cache.keys(0)[:, :, :24], k)
    assert torch.equal(cache.values(0)[:, :, :24], v)
    assert cache.positions(0)[0, 0, :24].tolist() == list(range(24))


@pytest.mark.parametrize("policy", POLICIES)
def test_decoding_2000_tokens_never_holds_more_than_budget_plus_interval(policy):
    cache = make(policy, 256, num_layers=1, interval=128)
    before = cache.nbytes
    feed(cache, 300)
    q, k, v = tokens(1)
    longest = 0
    for _ in range(2000):
        cache.attend(0, q, k, v)
        longest = max(longest, int(cache.lengths(0).max()))
    window = sum(b.numel() * b.element_size() for n, b in cache.named_buffers() if n.endswith("queries"))
    assert cache.nbytes - before in (0, window)  # only the query window may come with the first call
    assert cache.keys(0).shape[2] == cache.positions(0).shape[2] == 256 + 128
    assert longest == 256 + 128
    assert int(cache.tokens_seen) == 2300


def test_a_prompt_larger_than_the_capacity_in_chunks_is_compressed_after_every_chunk():
    cache = make("streaming_llm", 16, num_layers=1)
    for chunk in range(4):
        feed(cache, 40, seed=chunk)
        assert int(cache.lengths(0).max()) == 16
    assert cache.positions(0)[0, 0, :16].tolist() == [0, 1, 2, 3, *range(148, 160)]


def test_a_latent_cache_stores_the_latent_once_and_attends_to_it():
    rank, rope = 6, 2
    cache = make("knorm", 12, num_layers=1, num_kv_heads=1, latent_rank=rank, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, h, 20, rank + rope, generator=generator, dtype=torch.float64) for h in (HEADS, 1))
    out = [cache.attend(0, q[:, :, :9], k[:, :, :9], scale=0.3)]
    out += [cache.attend(0, q[:, :, t : t + 1], k[:, :, t : t + 1], scale=0.3) for t in range(9, 12)]
    expected = reference.attention(q[:, :, :12], k[:, :, :12], k[:, :, :12, :rank], causal=True, scale=0.3)
    torch.testing.assert_close(torch.cat(out, 2), expected, rtol=0, atol=1e-12)
    assert cache.values(0).data_ptr() == cache.keys(0).data_ptr()
    assert cache.layers[0].values.numel() == 0
    cache.attend(0, q[:, :, 12:], k[:, :, 12:], scale=0.3)
    assert int(cache.lengths(0)) == 12


def test_update_stores_what_attend_stores():
    one, other = make("expected_attention", num_heads=HEADS), make("expected_attention", num_heads=HEADS)
    for count in (30, 1, 1, 7, 1, 1, 1, 1, 1):
        q, k, v = tokens(count, seed=count)
        for layer in range(2):
            one.attend(layer, q, k, v)
            other.update(layer, q, k, v)
    assert_same(other, snapshot(one))
    assert not make("knorm").needs_queries
    make("knorm").update(0, None, k, v)
    with pytest.raises(TypeError, match="query must be a tensor: ExpectedAttention looks at queries"):
        other.update(0, None, k, v)


def test_the_second_prompt_on_a_reset_cache_is_as_on_a_new_one():
    used, new = make("expected_attention"), make("expected_attention")
    feed(used, 50, seed=1)
    feed(used, 1, seed=2)
    used.reset()
    for seed, count in enumerate((20, 1, 1, 1, 1)):
        a, b = feed(used, count, seed), feed(new, count, seed)
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert_same(used, snapshot(new))


@pytest.mark.parametrize("made_under", [True, False])
@pytest.mark.parametrize("used_under", [True, False])
def test_works_under_inference_mode_however_it_was_made(made_under, used_under):
    with torch.inference_mode(made_under):
        cache = make("expected_attention", num_heads=HEADS).to(torch.float64)
        cache = pickle.loads(pickle.dumps(copy.deepcopy(cache).select(torch.tensor([0, 0]))))
    for mode in (used_under, not used_under):
        with torch.inference_mode(mode):
            feed(cache, 20)
            feed(cache, 1)
            cache.reorder(torch.tensor([1, 0]))
            cache.crop(1)
            cache.load_state_dict(cache.state_dict())
    assert not any(buffer.is_inference() for buffer in cache.buffers())


@pytest.mark.parametrize("policy", POLICIES)
def test_the_default_device_is_not_taken_for_the_device_of_the_tensors(policy):
    with torch.device("meta"):
        assert make(small(policy)).rotary.inv_freq.is_meta
    cache, same = make(small(policy)), make(small(policy))
    for count in (20, 1, 1, 1, 1):
        q, k, v = tokens(count)
        for layer in range(2):
            expected = same.attend(layer, q, k, v)
            with torch.device("meta"):
                assert torch.equal(cache.attend(layer, q, k, v), expected)
    assert_same(cache, snapshot(same))


def test_a_copy_is_independent():
    cache = make()
    feed(cache, 20)
    state, copied = snapshot(cache), copy.deepcopy(cache)
    feed(copied, 30)
    assert_same(cache, state)


def test_an_empty_cache_is_true_and_a_dropped_one_is_freed_at_once():
    cache = make()
    assert cache
    feed(cache, 20)
    gone = weakref.ref(cache)
    del cache
    assert gone() is None  # no reference cycle keeps its memory until the garbage collector comes by


def test_moving_to_another_dtype_keeps_statistics_exact():
    cache = make().to(torch.bfloat16)
    assert cache.dtype == torch.bfloat16
    assert cache.rotary.inv_freq.dtype == torch.float32
    assert cache.lengths(0).dtype == cache.positions(0).dtype == torch.int32
    feed(cache, 20)
    feed(cache, 1)


def test_the_state_holds_every_counter():
    cache = make("expected_attention", num_heads=HEADS, batch_size=2)
    feed(cache, 20)
    for seed in range(7):
        feed(cache, 1, seed)
    other = make("expected_attention", batch_size=2)  # its window is not allocated yet
    other.load_state_dict(cache.state_dict())
    for seed in range(9):
        a, b = feed(cache, 1, seed), feed(other, 1, seed)
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert_same(other, snapshot(cache))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"budget": 17}, r"layers.0.keys of shape \[1, 2, 20, 8\], got \[1, 2, 21, 8\]"),
        ({"num_layers": 3}, r"state_dict must hold what the cache holds, but it lacks \[\] and has .* besides"),
        ({"num_layers": 1}, r"state_dict must hold what the cache holds, but it lacks \['layers.1.keys'.* besides"),
    ],
    ids=str,
)
def test_a_state_of_another_cache_is_refused_before_anything_is_copied(other, message):
    cache, foreign = make(budget=16), make(**{"budget": 16, **other})
    feed(cache, 20)
    feed(foreign, 5, seed=3)
    state = snapshot(cache)
    with pytest.raises(ValueError, match=message):
        cache.load_state_dict(foreign.state_dict())
    assert_same(cache, state)


@pytest.mark.parametrize("nested", [False, True], ids=["alone", "in a model"])
def test_a_state_loads_whichever_of_the_two_has_a_query_window(nested):
    def loaded(cache: CompressedKVCache, state: dict[str, Tensor]) -> CompressedKVCache:
        if nested:
            torch.nn.ModuleList([cache]).load_state_dict({f"0.{name}": value for name, value in state.items()})
        else:
            cache.load_state_dict(state)
        return cache

    used, unused = make("expected_attention"), make("expected_attention")
    feed(used, 20)
    empty, full = unused.state_dict(), {name: value.clone() for name, value in used.state_dict().items()}
    used.attend(0, *tokens(3))  # a call that stopped half-way is over
    assert_same(loaded(used, empty), snapshot(make("expected_attention", num_heads=HEADS)))
    assert_same(loaded(unused, full), snapshot(loaded(used, full)))
    for seed in range(6):
        feed(used, 1, seed)
        feed(unused, 1, seed)
    assert_same(unused, snapshot(used))


@pytest.mark.parametrize("max_step", [1, 3])
def test_a_buffer_per_slot_that_is_declared_follows_every_operation(monkeypatch, max_step):
    """Numbers written next to tokens stay with them; where there is no token the buffer is empty."""
    further = Buffer("tags", ("rows", "kv_heads", "slots", "key_dim"), torch.float64, empty=-7)
    monkeypatch.setattr("fastattn.modules.kv_cache.state.layer_buffers", lambda spec: (*layer_buffers(spec), further))
    cache = make("key_diff", batch_size=2, max_step=max_step)
    counts = torch.arange(2 * KV_HEADS * DIM, dtype=torch.float64).view(2, KV_HEADS, 1, DIM)
    owner = torch.arange(2)  # which of the first rows a row comes from

    def expected(layer) -> Tensor:
        position = cache.positions(layer)[..., None]
        return torch.where(position < 0, -7.0, 100.0 * position + counts[owner])

    def check() -> None:
        for layer in range(2):
            assert torch.equal(cache.layers[layer].tags, expected(layer))

    def call(count: int, **options) -> None:
        seen = cache.tokens_seen[:, None, None, None].clone()
        feed(cache, count, **options)
        for layer in range(2):
            tags, fresh = cache.layers[layer].tags, cache.positions(layer)[..., None] >= seen
            assert bool((tags.masked_select(fresh) == -7).all())
            tags.copy_(torch.where(fresh, expected(layer), tags))
        check()

    call(11)
    call(30, attention_mask=torch.tensor([[False] * 4 + [True] * 26, [True] * 30]))
    for seed in range(14):
        call(1 + seed % max_step, seed=seed)
    cache.crop(1)
    check()
    cache.reorder(torch.tensor([1, 1]))
    owner = torch.tensor([1, 1])
    check()
    owner = torch.tensor([1, 1, 1])
    full, cache = cache, cache.select(torch.tensor([0, 1, 0]))
    check()
    fresh = make("key_diff", batch_size=3, max_step=max_step)
    fresh.load_state_dict(cache.state_dict())
    cache = copy.deepcopy(fresh)
    check()
    call(20, seed=5)
    full.reset()
    assert all(bool((layer.tags == -7).all()) for layer in full.layers)


# -- failures half-way ---------------------------------------------------------------------------------------------


class Failing(Policy):
    """Raises at the chosen scoring."""

    query_window = 3

    def __init__(self, at: int, error: type[BaseException] = KeyError) -> None:
        self.at, self.error, self.scored = at, error, 0

    def score(self, state):
        self.scored += 1
        if self.scored == self.at:
            raise self.error("planted")
        return state.positions.to(torch.float32)


@pytest.mark.parametrize("count", [1, 30], ids=["step", "prompt"])
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_failure_in_the_first_layer_scored_leaves_the_cache_as_it_was(count, error):
    cache = make(Failing(1, error), num_heads=HEADS)
    feed(cache, 16)
    for seed in range(4):
        feed(cache, 1, seed)
    state, window = snapshot(cache), copy.deepcopy(cache)
    with pytest.raises(error):
        feed(cache, count, seed=9)
    assert_same(cache, state)
    window.policy.at = 0  # the copy does not fail: going on with either gives the same
    feed(cache, count, seed=10)
    feed(window, count, seed=10)
    assert_same(cache, snapshot(window))


@pytest.mark.parametrize("count", [1, 30], ids=["step", "prompt"])
def test_a_failure_in_a_later_layer_makes_the_cache_invalid_until_reset(count):
    cache = make(Failing(2), num_heads=HEADS)
    feed(cache, 16)
    for seed in range(4):
        feed(cache, 1, seed)
    with pytest.raises(KeyError):
        feed(cache, count)
    for use in (lambda: feed(cache, 1), lambda: cache.crop(1), lambda: cache.reorder(torch.tensor([0]))):
        with pytest.raises(RuntimeError, match="invalid since layer 1 failed with KeyError: call reset"):
            use()
    cache.reset()
    feed(cache, 16)


def test_a_failure_while_buffers_are_rewritten_makes_the_cache_invalid(monkeypatch):
    cache = make()
    feed(cache, 16)
    for seed in range(4):
        feed(cache, 1, seed)
    monkeypatch.setattr("fastattn.ops.cache_compact_", lambda *a, **k: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MemoryError):
        feed(cache, 1)
    with pytest.raises(RuntimeError, match="invalid since layer 0 failed with MemoryError"):
        feed(cache, 1)


@pytest.mark.parametrize("count", [1, 30], ids=["step", "prompt"])
def test_a_failure_after_buffers_were_rewritten_makes_the_cache_invalid(monkeypatch, count):
    cache = make(num_layers=1)
    feed(cache, 16)
    for seed in range(4):
        feed(cache, 1, seed)
    with monkeypatch.context() as patch:
        patch.setattr(
            "fastattn.modules.kv_cache.update._advance_counters", lambda *a: (_ for _ in ()).throw(MemoryError())
        )
        with pytest.raises(MemoryError):
            feed(cache, count)
    with pytest.raises(RuntimeError, match="invalid since layer 0 failed with MemoryError"):
        feed(cache, 1)


def test_a_failure_between_counters_makes_the_cache_invalid():
    cache = make(num_layers=1)
    columns, cache.columns = cache.columns, None
    with pytest.raises(AttributeError):
        feed(cache, 3)
    cache.columns = columns
    with pytest.raises(RuntimeError, match="invalid since layer 0 failed with AttributeError"):
        feed(cache, 1)


def test_a_call_that_stopped_between_layers_is_noticed():
    cache, (q, k, v) = make(), tokens(3)
    cache.attend(0, q, k, v)
    with pytest.raises(RuntimeError, match="stopped before layer 1"):
        cache.attend(0, q, k, v)
    cache.attend(1, q, k, v)  # finishing it is fine
    with pytest.raises(ValueError, match="layer must be 0: the layers of a call come in order, 0 to 1, got 1"):
        cache.attend(1, q, k, v)
    assert cache.tokens_seen.tolist() == [3]
