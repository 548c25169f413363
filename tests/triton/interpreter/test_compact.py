"""Selection and compaction kernels, interpreted, bit for bit against the definitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastattn import ops
from fastattn.ops import reference
from tests._helpers import draw
from tests._helpers.triton_run import DTYPES, examples, interpreted
from tests.triton.interpreter.test_cache import make_cache, same

NAN, INF = float("nan"), float("inf")


def check_compact(cache: list[Tensor], scores: Tensor, budget: int, min_length: int = 0) -> None:
    expected = [buffer.clone() for buffer in cache]
    reference.cache_compact_(*expected, scores, budget, min_length=min_length)
    with interpreted():
        ops.cache_compact_(*cache, scores, budget, min_length=min_length)
    # beyond the new lengths anything may lie: the definition leaves the old vectors there, and so do the kernels
    same(cache, expected)


SCORES = {
    "normal": lambda shape, seed: draw.normal(*shape, seed=seed),
    "ties": lambda shape, seed: draw.normal(*shape, seed=seed).round(),
    "constant": lambda shape, seed: torch.full(shape, -2.5),
    "zeros of both signs": lambda shape, seed: torch.where(draw.normal(*shape, seed=seed) > 0, 0.0, -0.0),
    "special": lambda shape, seed: torch.tensor([NAN, -NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 1e-45, 3e38])[
        torch.randint(10, shape, generator=torch.Generator().manual_seed(seed))
    ],
    "not a number": lambda shape, seed: torch.full(shape, NAN),
    "one bit apart": lambda shape, seed: (
        torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32) + 0x3F800000
    ).view(torch.float32),
}


@examples(30)
@given(data=st.data())
def test_compact_any_shape_layout_and_scores(data: st.DataObject) -> None:
    batch, heads, slots = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2)), data.draw(draw.sizes(280))
    budget = data.draw(st.integers(1, slots) | st.sampled_from([1, max(1, slots - 1), slots]))
    key_dim, value_dim = data.draw(st.sampled_from([8, 33, 48])), data.draw(st.sampled_from([0, 8, 20]))
    lengths = data.draw(draw.lengths((batch, heads), slots))
    cache = make_cache(lengths, slots, key_dim, value_dim, data.draw(st.sampled_from(DTYPES)), data.draw(draw.layouts))
    scores = SCORES[data.draw(st.sampled_from(sorted(SCORES)))]((batch, heads, slots), data.draw(draw.seeds))
    scores = scores.masked_fill(torch.arange(slots) >= lengths[..., None], data.draw(st.sampled_from([NAN, INF, -INF])))
    min_length = data.draw(st.sampled_from([0, slots, budget + 1]))
    check_compact(cache, draw.strided(scores, data.draw(draw.layouts)), budget, min_length)


@pytest.mark.parametrize("kind", sorted(SCORES))
@pytest.mark.parametrize("length", [255, 256, 257, 300])
def test_compact_at_the_budget_and_at_block_edges(kind: str, length: int) -> None:
    cache = make_cache(torch.tensor([[length, 300]], dtype=torch.int32), 300, 32, 8)
    check_compact(cache, SCORES[kind]((1, 2, 300), 5), 256)


@pytest.mark.parametrize("kind", ["normal", "ties"])
def test_compact_more_slots_than_a_block(kind: str) -> None:
    cache = make_cache(torch.tensor([[4100], [4224]], dtype=torch.int32), 4224, 8, 0)
    check_compact(cache, SCORES[kind]((2, 1, 4224), 6), 2049)


def test_compact_a_latent_cache() -> None:
    cache = make_cache(torch.tensor([[70]], dtype=torch.int32), 72, 576, 0, torch.float16)
    check_compact(cache, draw.normal(1, 1, 72), 64)


def test_equal_scores_keep_the_newest() -> None:
    cache = make_cache(torch.tensor([[40]], dtype=torch.int32), 48, 8, 8)
    newest = cache[2][0, 0, 24:40].tolist()
    with interpreted():
        ops.cache_compact_(*cache, torch.zeros(1, 1, 48), 16)
    assert cache[2][0, 0].tolist() == newest + [-1] * 32
    assert cache[3].tolist() == [[16]]


def test_nan_ranks_below_minus_infinity() -> None:
    cache = make_cache(torch.tensor([[4]], dtype=torch.int32), 4, 8, 8)
    kept = cache[2][0, 0, [0, 2]].tolist()
    with interpreted():
        ops.cache_compact_(*cache, torch.tensor([[[-INF, NAN, -INF, -NAN]]]), 2)
    assert cache[2][0, 0].tolist() == [*kept, -1, -1]


def test_rows_that_are_not_full_stay_bit_for_bit() -> None:
    cache = make_cache(torch.tensor([[9, 12]], dtype=torch.int32), 12, 8, 8)
    before = [buffer.clone() for buffer in cache]
    with interpreted():
        ops.cache_compact_(*cache, torch.zeros(1, 2, 12), 8, min_length=12)
    assert cache[3].tolist() == [[9, 8]]
    same([buffer[:, :1] for buffer in cache], [buffer[:, :1] for buffer in before])
