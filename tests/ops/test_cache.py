"""In-place cache updates on a CPU, bit for bit against their definitions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastattn import ops
from fastattn.ops import reference
from tests._helpers import draw

DEVICE = torch.get_default_device()  # of the run: see --device

POISON = 7  # the int32 content of slots that hold nothing: neither read nor, where the definition does not, written


def make_cache(
    lengths: Tensor, slots: int, k_dim: int, v_dim: int, dtype: torch.dtype, seed: int, layout: str = "contiguous"
) -> list[Tensor]:
    """Key, value, positions, lengths; unused slots hold NaN and POISON."""
    key = draw.normal(*lengths.shape, slots, k_dim, dtype=dtype, seed=seed)
    value = draw.normal(*lengths.shape, slots, v_dim, dtype=dtype, seed=seed + 1)
    positions = torch.arange(slots, dtype=torch.int32).mul(3).expand(*lengths.shape, -1).contiguous()
    positions = positions.masked_fill(torch.arange(slots) >= lengths[..., None], POISON)
    buffers = [draw.poison_slots_(key, lengths), draw.poison_slots_(value, lengths) if v_dim else value]
    return [*(draw.strided(b, layout) for b in (*buffers, positions)), lengths.clone()]


def clone(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().clone() for t in tensors]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    """Bit for bit, signs of zeros and NaN included."""
    for a, e, name in zip(actual, expected, ("key_cache", "value_cache", "positions", "lengths"), strict=True):
        if a.is_floating_point():
            integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
            a, e = a.contiguous().view(integer), e.contiguous().view(integer)
        assert torch.equal(a, e), f"{name} differs"


# -- append ----------------------------------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=100)
def test_append(data: st.DataObject) -> None:
    batch, heads, tokens = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)), data.draw(draw.sizes(17, 0))
    filled = data.draw(draw.lengths((batch, heads), 20))
    slots = 20 + tokens + data.draw(st.integers(0, 2))
    k_dim, v_dim = data.draw(st.sampled_from([1, 8, 33])), data.draw(st.sampled_from([0, 1, 16]))
    dtype, seed = data.draw(draw.dtypes), data.draw(draw.seeds)
    cache = make_cache(filled, slots, k_dim, v_dim, dtype, seed, data.draw(draw.layouts))
    key = draw.strided(draw.normal(batch, heads, tokens, k_dim, dtype=dtype, seed=seed + 2), data.draw(draw.layouts))
    value = draw.strided(draw.normal(batch, heads, tokens, v_dim, dtype=dtype, seed=seed + 3), data.draw(draw.layouts))
    real = data.draw(st.sampled_from(["all", "none", "some"]))
    position = torch.arange(100, 100 + tokens, dtype=torch.int32).repeat(batch, 1)
    if real != "all":
        kept = draw.uniform(batch, tokens, seed=seed) < 0.5
        position = position.masked_fill(~kept | (real == "none"), -1)
    expected = clone(cache)
    reference.cache_append_(*expected, key, value, position)
    assert ops.cache_append_(*cache, key, value, position) is None
    assert_same(cache, expected)


def test_append_by_hand() -> None:
    key_cache, value_cache = torch.full((2, 1, 4, 1), math.nan), torch.full((2, 1, 4, 1), math.nan)
    positions, lengths = torch.full((2, 1, 4), -1, dtype=torch.int32), torch.tensor([[1], [0]], dtype=torch.int32)
    key = torch.tensor([1.0, 2.0, 3.0]).view(1, 1, 3, 1).repeat(2, 1, 1, 1)
    position = torch.tensor([[5, 6, 7], [-1, -1, 0]], dtype=torch.int32)
    ops.cache_append_(key_cache, value_cache, positions, lengths, key, -key, position)
    assert lengths.tolist() == [[4], [1]]
    assert positions.tolist() == [[[-1, 5, 6, 7]], [[0, -1, -1, -1]]]
    assert key_cache[0, 0, 1:, 0].tolist() == [1.0, 2.0, 3.0]
    assert value_cache[0, 0, 1:, 0].tolist() == [-1.0, -2.0, -3.0]
    assert key_cache[1, 0, 0, 0] == 3.0
    assert key_cache.isnan().sum() == 1 + 3


@pytest.mark.parametrize("padded", [False, True])
def test_append_beyond_the_capacity_writes_nothing(padded: bool) -> None:
    lengths = torch.tensor([[2, 5], [3, 3]], dtype=torch.int32)
    cache = make_cache(lengths, 8, 4, 4, torch.float32, 0)
    before = clone(cache)
    key = draw.normal(2, 2, 4, 4)
    position = torch.tensor([[10, 11, 12, 13], [-1, -1, 10, 11] if padded else [10, 11, 12, 13]], dtype=torch.int32)
    with pytest.raises(ValueError, match="key must fit the cache's 8 slots, but 9 would be filled"):
        ops.cache_append_(*cache, key, key, position)
    assert_same(cache, before)
    position[0, 0] = -1  # one token less fits
    ops.cache_append_(*cache, key, key, position)
    assert cache[3].tolist() == [[5, 8], [5, 5] if padded else [7, 7]]


def test_append_takes_special_values_as_they_are() -> None:
    cache = make_cache(torch.zeros(1, 1, dtype=torch.int32), 4, 2, 2, torch.float32, 0)
    key = torch.tensor([[-0.0, math.inf], [math.nan, -math.inf]]).view(1, 1, 2, 2)
    ops.cache_append_(*cache, key, key, torch.tensor([[0, 1]], dtype=torch.int32))
    assert_same([cache[0][:, :, :2], cache[1][:, :, :2], *cache[2:]], [key, key, *cache[2:]])


# -- compact ---------------------------------------------------------------------------------------------------------

special = st.sampled_from([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 3e38])


@given(data=st.data())
@settings(max_examples=200)
def test_compact(data: st.DataObject) -> None:
    batch, heads, slots = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)), data.draw(draw.sizes(67))
    filled = data.draw(draw.lengths((batch, heads), slots))
    budget = data.draw(draw.sizes(slots + 1))
    dtype, seed = data.draw(draw.dtypes), data.draw(draw.seeds)
    v_dim = data.draw(st.sampled_from([0, 1, 16]))
    cache = make_cache(
        filled, slots, data.draw(st.sampled_from([1, 8, 33])), v_dim, dtype, seed, data.draw(draw.layouts)
    )
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if data.draw(st.booleans()):  # many ties
        few = torch.tensor(data.draw(st.lists(special, min_size=1, max_size=4)), dtype=wide)
        scores = few[draw.integers(0, len(few), batch, heads, slots, seed=seed)]
    else:
        scores = draw.normal(batch, heads, slots, dtype=wide, seed=seed + 2)
    beyond = torch.arange(slots) >= filled[..., None]
    scores = scores.masked_fill(beyond, data.draw(st.sampled_from([math.nan, math.inf, -math.inf])))
    scores = draw.strided(scores, data.draw(draw.layouts))
    min_length = data.draw(st.sampled_from([0, budget, budget + 2, slots, slots + 1]))
    expected, given_scores = clone(cache), scores.clone()
    reference.cache_compact_(*expected, scores, budget, min_length=min_length)
    assert ops.cache_compact_(*cache, scores, budget, min_length=min_length) is None
    used = torch.arange(slots) < cache[3][..., None]
    for i in (0, 1):  # what lies beyond the lengths is unspecified
        cache[i], expected[i] = (c[i].masked_fill(~used[..., None], 0.0) for c in (cache, expected))
    assert_same(cache, expected)
    torch.testing.assert_close(scores, given_scores, rtol=0, atol=0, equal_nan=True)


def compacted(scores: list[float], budget: int, min_length: int = 0, dtype: torch.dtype = torch.float32) -> list[int]:
    """Slots kept of one full row and head."""
    lengths = torch.tensor([[len(scores)]], dtype=torch.int32)
    cache = make_cache(lengths, len(scores) + 3, 2, 2, dtype, 0)
    before = clone(cache)
    padded = torch.tensor([*scores, math.inf, math.nan, math.inf], dtype=dtype).view(1, 1, -1)
    ops.cache_compact_(*cache, padded, budget, min_length=min_length)
    count = int(cache[3])
    kept = [p // 3 for p in cache[2][0, 0, :count].tolist()]
    for buffer, old in zip(cache[:2], before[:2], strict=True):
        assert torch.equal(buffer[0, 0, :count], old[0, 0, kept])
    if count < len(scores):
        assert (cache[2][0, 0, count:] == -1).all()
    return kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_order_of_scores_by_hand(dtype: torch.dtype) -> None:
    inf, nan = math.inf, math.nan
    assert compacted([5.0, 1.0, 3.0, 4.0], 2, dtype=dtype) == [0, 3]
    assert compacted([1.0] * 6, 2, dtype=dtype) == [4, 5], "of equal scores the newest are kept"
    assert compacted([2.0, 1.0, 1.0, 1.0, 0.0], 3, dtype=dtype) == [0, 2, 3]
    assert compacted([nan, -inf, -1.0, nan], 2, dtype=dtype) == [1, 2], "NaN ranks below -inf"
    assert compacted([nan, nan, -inf, nan], 3, dtype=dtype) == [1, 2, 3]
    assert compacted([0.0, -0.0, 0.0, -0.0], 2, dtype=dtype) == [2, 3], "-0.0 equals 0.0"
    assert compacted([-0.0, 0.0, -1.0, -1e-45 if dtype == torch.float32 else -5e-324], 2, dtype=dtype) == [0, 1]
    assert compacted([inf, 1.0, inf, 2.0, inf], 2, dtype=dtype) == [2, 4], "a tie of protected tokens"
    assert compacted([-3.0, -1.0, -2.0], 2, dtype=dtype) == [1, 2]
    assert compacted([-nan, 1.0, 2.0], 2, dtype=dtype) == [1, 2]


def test_within_the_budget_nothing_changes() -> None:
    assert compacted([3.0, 1.0, 2.0], 3) == [0, 1, 2]
    assert compacted([3.0, 1.0, 2.0], 9) == [0, 1, 2]
    assert compacted([3.0, 1.0, 2.0], 1, min_length=4) == [0, 1, 2]
    assert compacted([3.0, 1.0, 2.0], 1, min_length=3) == [0]


def test_heads_of_one_row_keep_different_slots() -> None:
    lengths = torch.tensor([[4, 4, 2]], dtype=torch.int32)
    cache = make_cache(lengths, 5, 3, 3, torch.float32, 0)
    scores = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 9.0], [4.0, 3.0, 2.0, 1.0, 9.0], [1.0, 2.0, 9.0, 9.0, 9.0]]])
    before = clone(cache)
    ops.cache_compact_(*cache, scores, 2)
    assert cache[3].tolist() == [[2, 2, 2]]
    assert cache[2].tolist() == [[[6, 9, -1, -1, -1], [0, 3, -1, -1, -1], [0, 3, POISON, POISON, POISON]]]
    assert torch.equal(cache[0][0, 0, :2], before[0][0, 0, 2:4])
    assert torch.equal(cache[0][0, 1:, :2], before[0][0, 1:, :2])


def test_compacting_again_keeps_time_order() -> None:
    slots, budget = 24, 8
    cache = make_cache(torch.full((1, 1), slots, dtype=torch.int32), slots, 2, 2, torch.float32, 0)
    expected = list(range(0, 3 * slots, 3))
    for seed in range(6):
        scores = draw.normal(1, 1, slots, seed=seed)
        ops.cache_compact_(*cache, scores, budget)
        expected = [expected[i] for i in reference.select_slots(scores[0, 0, : len(expected)], budget).tolist()]
        assert cache[2][0, 0, :budget].tolist() == expected == sorted(expected)
        new = torch.arange(4, dtype=torch.int32)[None] + 1000 * (seed + 1)
        ops.cache_append_(*cache, torch.ones(1, 1, 4, 2), torch.ones(1, 1, 4, 2), new)
        expected += new[0].tolist()
    assert int(cache[3]) == budget + 4


# -- registration and checks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("name", ["cache_append_", "cache_compact_"])
def test_opcheck(name: str, latent: bool) -> None:
    operator = getattr(torch.ops.fastattn, name).default
    cache = make_cache(torch.tensor([[5, 3], [4, 5]], dtype=torch.int32), 8, 4, 0 if latent else 6, torch.float32, 0)
    cache = [t.nan_to_num() if t.is_floating_point() else t for t in cache]  # the utilities compare with ==
    key, value = draw.normal(2, 2, 2, 4), draw.normal(2, 2, 2, 0 if latent else 6)
    position = torch.tensor([[9, 10], [-1, 9]], dtype=torch.int32)
    args = (key, value, position) if name == "cache_append_" else (draw.normal(2, 2, 8), 3, 4)
    torch.library.opcheck(operator, (*cache, *args))


def arguments(name: str) -> dict[str, Any]:
    cache = make_cache(torch.tensor([[5, 3], [4, 5]], dtype=torch.int32), 8, 4, 6, torch.float32, 0)
    good: dict[str, Any] = dict(zip(("key_cache", "value_cache", "positions", "lengths"), cache, strict=True))
    if name == "cache_compact_":
        return {**good, "scores": draw.normal(2, 2, 8), "budget": 2, "min_length": 0}
    position = torch.tensor([[9, 10], [-1, 9]], dtype=torch.int32)
    return {**good, "key": draw.normal(2, 2, 2, 4), "value": draw.normal(2, 2, 2, 6), "position": position}


BOTH = ["cache_append_", "cache_compact_"]
GRAD = torch.ones(2, 2, 8, 4, requires_grad=True)
OWN_MEMORY = ["memory of its own", "expanded"]
BAD = [
    *((name, "key_cache", None, TypeError, ["[B Hkv C Dk]", "NoneType"]) for name in BOTH),
    *((name, "key_cache", torch.ones(2, 8, 4), ValueError, ["[B Hkv C Dk]", "[2, 8, 4]"]) for name in BOTH),
    *((name, "key_cache", torch.ones(2, 2, 8, 4).int(), TypeError, ["float32", "int32"]) for name in BOTH),
    *((name, "key_cache", GRAD, ValueError, ["no gradient"]) for name in BOTH),
    *((name, "value_cache", torch.ones(2, 2, 7, 6), ValueError, ["8", "[2, 2, 7, 6]"]) for name in BOTH),
    *((name, "value_cache", torch.ones(2, 1, 8, 6), ValueError, ["2", "[2, 1, 8, 6]"]) for name in BOTH),
    *((name, "value_cache", torch.ones(2, 2, 8, 6).half(), TypeError, ["float32", "float16"]) for name in BOTH),
    *((name, "value_cache", torch.ones(2, 2, 8, 6, device="meta"), ValueError, [DEVICE.type, "meta"]) for name in BOTH),
    *((name, "positions", torch.ones(2, 2, 8), TypeError, ["int32", "float32"]) for name in BOTH),
    *((name, "positions", torch.ones(2, 2, 7).int(), ValueError, ["[2, 2, 8]", "[2, 2, 7]"]) for name in BOTH),
    *((name, "lengths", torch.ones(2, 2).long(), TypeError, ["int32", "int64"]) for name in BOTH),
    *((name, "lengths", torch.ones(2).int(), ValueError, ["[B Hkv]", "[2]"]) for name in BOTH),
    # Expanded tensors: writing one row or head would write them all.
    *((name, "key_cache", torch.ones(2, 1, 8, 4).expand(2, 2, 8, 4), ValueError, OWN_MEMORY) for name in BOTH),
    *((name, "value_cache", torch.ones(1, 2, 8, 6).expand(2, 2, 8, 6), ValueError, OWN_MEMORY) for name in BOTH),
    *((name, "positions", torch.ones(8).int().expand(2, 2, 8), ValueError, OWN_MEMORY) for name in BOTH),
    *((name, "lengths", torch.ones(2, 1).int().expand(2, 2), ValueError, OWN_MEMORY) for name in BOTH),
    ("cache_append_", "key", torch.ones(2, 2, 2, 5), ValueError, ["4", "[2, 2, 2, 5]"]),
    ("cache_append_", "key", torch.ones(1, 2, 2, 4), ValueError, ["2", "[1, 2, 2, 4]"]),
    ("cache_append_", "key", torch.ones(2, 4, 2, 4), ValueError, ["2", "[2, 4, 2, 4]"]),
    ("cache_append_", "key", torch.ones(2, 2, 2, 4).bfloat16(), TypeError, ["float32", "bfloat16"]),
    ("cache_append_", "key", torch.ones(2, 2, 2, 4, requires_grad=True), ValueError, ["no gradient"]),
    ("cache_append_", "value", torch.ones(2, 2, 3, 6), ValueError, ["2", "[2, 2, 3, 6]"]),
    ("cache_append_", "value", torch.ones(2, 2, 2, 4), ValueError, ["6", "[2, 2, 2, 4]"]),
    ("cache_append_", "value", None, TypeError, ["[B Hkv T Dv]", "NoneType"]),
    ("cache_append_", "position", torch.ones(2, 2), TypeError, ["int32", "float32"]),
    ("cache_append_", "position", torch.ones(2, 3).int(), ValueError, ["[2, 2]", "[2, 3]"]),
    ("cache_append_", "position", torch.ones(2, 2, 2).int(), ValueError, ["[B T]", "[2, 2, 2]"]),
    ("cache_compact_", "scores", torch.ones(2, 2, 7), ValueError, ["[2, 2, 8]", "[2, 2, 7]"]),
    ("cache_compact_", "scores", torch.ones(2, 8), ValueError, ["[B Hkv C]", "[2, 8]"]),
    ("cache_compact_", "scores", torch.ones(2, 2, 8).half(), TypeError, ["float32", "float16"]),
    ("cache_compact_", "scores", torch.ones(2, 2, 8, device="meta"), ValueError, [DEVICE.type, "meta"]),
    ("cache_compact_", "budget", 0, ValueError, ["at least 1", "0"]),
    ("cache_compact_", "budget", 2.0, TypeError, ["integer", "float"]),
    ("cache_compact_", "budget", True, TypeError, ["integer", "bool"]),
    ("cache_compact_", "min_length", -1, ValueError, ["at least 0", "-1"]),
]


@pytest.mark.parametrize(("name", "argument", "value", "error", "words"), BAD)
def test_bad_input(name: str, argument: str, value: Any, error: type[Exception], words: list[str]) -> None:
    good = arguments(name)
    names = ("key_cache", "value_cache", "positions", "lengths")
    before = clone([good[n] for n in names])
    with pytest.raises(error) as raised:
        getattr(ops, name)(**{**good, argument: value})
    for word in (argument, *words):
        assert word in str(raised.value), f"{word!r} is not in {raised.value}"
    assert_same([good[n] for n in names], before)
    getattr(ops, name)(**good)
