"""How many programs share the slots of a cache: whole tiles, no empty split, no quicker count."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastattn.ops.triton import _split
from fastattn.ops.triton._launch import TYPICAL, Target


@pytest.mark.parametrize(
    ("programs", "tiles", "resident", "splits"),
    [
        (8, 66, 2, 33),  # 8 key/value heads, 4,224 slots in tiles of 64: 2 tiles each
        (1, 132, 1, 66),  # latent, 32 heads, 4,224 slots in tiles of 32: 2 tiles each
        (1, 512, 1, 128),  # latent, 32 heads, 16,384 slots: 4 tiles each
        (1, 1, 1, 1),
        (1, 2, 1, 1),
        (264, 66, 2, 1),  # full without
    ],
)
def test_usual_shapes(programs: int, tiles: int, resident: int, splits: int) -> None:
    assert _split.split_count(TYPICAL["sm_90"], programs, tiles, resident) == splits


def _assigned(tiles: int, splits: int) -> list[int]:
    """Tiles of every split of a full buffer, as the kernel's ``split_range`` cuts them."""
    share = math.ceil(tiles / splits)
    return [max(0, min(tiles, (split + 1) * share) - split * share) for split in range(splits)]


@settings(max_examples=300, deadline=None)
@given(
    processors=st.integers(1, 320), programs=st.integers(1, 400), tiles=st.integers(1, 5000), resident=st.integers(1, 3)
)
def test_no_other_admissible_count_ends_earlier(processors: int, programs: int, tiles: int, resident: int) -> None:
    splits = _split.split_count(Target("sm_90", processors), programs, tiles, resident)
    assigned = _assigned(tiles, splits)
    assert sum(assigned) == tiles
    assert min(assigned) > 0
    at_once = processors * resident
    if programs >= at_once:
        assert splits == 1
        return

    def steps(count: int) -> int:
        return math.ceil(programs * count / at_once) * max(_assigned(tiles, count))

    admissible = [
        count
        for count in range(1, _split.MOST_SPLITS + 1)
        if count == 1 or (min(_assigned(tiles, count)) > 0 and max(_assigned(tiles, count)) >= _split.SPLIT_TILES)
    ]
    assert splits in admissible
    quickest = min(steps(count) for count in admissible)
    assert steps(splits) == quickest
    assert splits == min(count for count in admissible if steps(count) == quickest)


@settings(max_examples=20, deadline=None)
@given(programs=st.integers(2, 131), tiles=st.integers(3, 5000))
def test_open_sizes_leave_no_split_empty_and_need_one_wave(programs: int, tiles: int) -> None:
    target = TYPICAL["sm_90"]
    found = []

    def count(rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        found.append(_split.split_count(target, rows.shape[0], slots.shape[0], 1))
        return rows.new_empty(found[-1])

    graph = torch.fx.experimental.proxy_tensor.make_fx(count, tracing_mode="symbolic")(
        torch.empty(programs, device="meta"), torch.empty(tiles, device="meta")
    )
    assert isinstance(found[0], torch.SymInt)
    splits = graph(torch.empty(programs, device="meta"), torch.empty(tiles, device="meta")).shape[0]
    assert min(_assigned(tiles, splits)) > 0
    assert splits == 1 or programs * splits <= target.processors
