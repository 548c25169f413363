"""Layers of one cache that differ: windows, rotations, sinks, soft caps and slopes; masks with holes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastattn import CompressedKVCache, ExpectedAttention, KeyDiff, Rotary
from tests._helpers.features import dense

HEADS, KV_HEADS, DIM = 4, 2, 8
WINDOWS = (3, None, 6)
FEATURES: dict[str, Any] = {
    "plain": {},
    "sinks": {"sinks": torch.linspace(-1.0, 2.0, HEADS)},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": torch.linspace(0.1, 0.7, HEADS)},
    "all": {
        "sinks": torch.linspace(-1.0, 2.0, HEADS),
        "softcap": 1.5,
        "alibi_slopes": torch.linspace(0.1, 0.7, HEADS),
    },
}
# Columns of every call: a prompt, a chunk, drafts, single tokens. False is padding.
CALLS = (
    [[False, True, True, False, True, True, True], [True, True, False, False, True, False, False]],
    [[True, True, False, True, True], [False, True, True, True, True]],
    [[True, False], [False, True]],
    *[[[True], [True]]] * 9,
    [[True, True], [True, True]],
    [[True] * 6, [True] * 6],
)


def make_cache(**changes: Any) -> CompressedKVCache:
    options: dict[str, Any] = {
        "policy": KeyDiff(),
        "budget": 64,
        "num_layers": 3,
        "num_kv_heads": KV_HEADS,
        "head_dim": DIM,
        "batch_size": 2,
        "interval": 2,
        "max_step": 2,
        "dtype": torch.float64,
        "window": WINDOWS,
    }
    return CompressedKVCache(**(options | changes))


class History:
    """All that was fed, and attention to it as a dense matrix by position."""

    def __init__(self, seed: int = 0, layers: int = 3) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.layers: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in range(layers)]
        self.next = torch.zeros(2, 1, dtype=torch.int64)

    def feed(self, cache: CompressedKVCache, mask: Tensor, **features: Any) -> list[tuple[Tensor, Tensor]]:
        """What the cache gives and what is right, per layer, at real tokens."""
        position = (self.next + mask.cumsum(1) - 1).masked_fill(~mask, -1)
        self.next += mask.sum(1, keepdim=True)
        results = []
        for layer, past in enumerate(self.layers):
            query, key, value = (
                torch.randn(2, heads, mask.shape[1], DIM, generator=self.generator, dtype=torch.float64)
                for heads in (HEADS, KV_HEADS, KV_HEADS)
            )
            out = cache.attend(layer, query, key, value, attention_mask=mask, **features)
            past.append((key, value, position))
            keys, values, stands = (
                torch.cat(parts, dim=d) for parts, d in zip(zip(*past, strict=True), (2, 2, 1), strict=True)
            )
            distance = position[:, None, :, None] - stands[:, None, None, :]
            window = cache.windows[layer] or 10**6
            visible = (distance >= 0) & (distance < window) & (stands >= 0)[:, None, None]
            expected, _ = dense(query, keys, values, distance, visible, **features)
            real = mask[:, None, :, None].expand_as(out)
            results.append((out[real], expected[real]))
        return results


@pytest.mark.parametrize("name", FEATURES)
def test_layers_see_their_windows_by_position(name: str) -> None:
    cache, history = make_cache(), History()
    for call in CALLS:
        for out, expected in history.feed(cache, torch.tensor(call), **FEATURES[name]):
            torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    # A window layer holds its newest tokens; the others stay whole within the budget.
    assert cache.lengths(1).unique(dim=1).flatten().tolist() == history.next.flatten().tolist()
    for layer in (0, 2):
        assert int(cache.lengths(layer).amax()) <= WINDOWS[layer] + 2 + 1  # type: ignore[operator]
        newest = cache.positions(layer)[:, 0, : WINDOWS[layer]]
        assert newest.tolist() == [
            (int(n) - WINDOWS[layer] + torch.arange(WINDOWS[layer])).tolist() for n in history.next
        ]


def test_gaps_between_positions_count_for_a_window() -> None:
    cache = make_cache(num_layers=1, window=4, batch_size=1)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, n, 6, DIM, generator=generator, dtype=torch.float64) for n in (4, 2, 2))
    position = torch.tensor([[0, 1, 2, 10, 11, 30]])
    out = cache.attend(0, query, key, value, position_ids=position)
    distance = (position[:, :, None] - position[:, None, :])[:, None]
    expected, _ = dense(query, key, value, distance, (distance >= 0) & (distance < 4))
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)


def test_everything_that_happens_to_a_cache_happens_to_its_windows(tmp_path: Any) -> None:
    """Reorder, select, insert, save and load, crop, reset: the same tokens afterwards as in a cache fed that way."""
    rotary = [Rotary(torch.tensor([1.0, 0.1])), None, Rotary(torch.tensor([0.5]))]
    cache, history = make_cache(policy=ExpectedAttention(query_window=4, n_sink=0), budget=8, rotary=rotary), History()
    for columns in (7, 1, 1, 2):
        history.feed(cache, torch.ones(2, columns, dtype=torch.bool))
    cache.save(tmp_path / "cache.safetensors")
    loaded = CompressedKVCache.load(tmp_path / "cache.safetensors")
    chosen = loaded.select(torch.tensor([1, 0]))
    other = make_cache(policy=ExpectedAttention(query_window=4, n_sink=0), budget=8, rotary=rotary)
    other.insert(torch.tensor([0, 1]), chosen, torch.tensor([1, 0]))
    loaded.reorder(torch.tensor([0, 1]))
    for copied in (loaded, other):
        assert (copied.tokens_seen == cache.tokens_seen).all()
        for layer in range(3):
            length = int(cache.lengths(layer).amax())
            assert (copied.lengths(layer) == cache.lengths(layer)).all()
            for read in ("positions", "keys", "values"):
                mine, theirs = (getattr(one, read)(layer) for one in (cache, copied))
                assert (mine[:, :, :length] == theirs[:, :, :length]).all()
    before = [cache.positions(layer).clone() for layer in range(3)]
    lengths = [cache.lengths(layer).clone() for layer in range(3)]
    cache.crop(2)
    for layer in range(3):
        assert (cache.lengths(layer) == lengths[layer] - 2).all()
        kept = before[layer].clone()
        kept.masked_fill_(torch.arange(kept.shape[2]) >= cache.lengths(layer)[..., None], -1)
        assert (cache.positions(layer) == kept).all()
    cache.reset()
    assert all(int(cache.lengths(layer).amax()) == 0 for layer in range(3))


@pytest.mark.parametrize(
    "options", [{"window": (2, None)}, {"window": (None, 2)}, {"window": None, "budget": (2, 64)}], ids=str
)
def test_a_layer_that_was_compressed_limits_what_can_be_taken_back(options: dict[str, Any]) -> None:
    """Fault: only the last layer was asked, and a crop took tokens from others that those had let go of."""
    cache, history = make_cache(num_layers=2, **options), History(layers=2)
    history.feed(cache, torch.ones(2, 9, dtype=torch.bool))
    with pytest.raises(ValueError, match="tokens must be at most 0"):
        cache.crop(1)
    history.feed(cache, torch.ones(2, 2, dtype=torch.bool))
    cache.crop(2)
    with pytest.raises(ValueError, match="tokens must be at most 0"):
        cache.crop(1)


def test_policies_look_ahead_with_each_layers_rotation() -> None:
    """A layer without rotation is scored as with a rotation of no angle, others with their own."""
    own = [Rotary(torch.tensor([1.0, 0.1])), None, Rotary(torch.tensor([0.5]))]
    alone = [own[0], Rotary(torch.zeros(2)), own[2]]
    policy = ExpectedAttention(query_window=4, n_sink=0)
    caches = [make_cache(policy=policy, budget=4, window=None, rotary=own)]
    caches += [make_cache(policy=policy, budget=4, window=None, rotary=rotary) for rotary in alone]
    for cache in caches:
        history = History()
        for columns in (9, 1, 1, 1):
            history.feed(cache, torch.ones(2, columns, dtype=torch.bool))
    for layer in range(3):
        assert (caches[0].positions(layer) == caches[1 + layer].positions(layer)).all()
    assert any((caches[0].positions(layer) != caches[1].positions(layer)).any() for layer in (1, 2))


def test_holes_leave_the_kept_sets_of_the_text_without_them() -> None:
    """The same tokens with and without padding between them: the same attention, the same tokens kept."""
    mask = torch.tensor(CALLS[0])
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(2, n, 7, DIM, generator=generator, dtype=torch.float64) for n in (4, 2, 2))
    caches = [make_cache(num_layers=1, window=None, budget=2, batch_size=rows) for rows in (2, 1, 1)]
    out = caches[0].attend(0, query, key, value, attention_mask=mask)
    for row in range(2):
        real = mask[row]
        alone = caches[1 + row].attend(0, *(part[row : row + 1, :, real] for part in (query, key, value)))
        torch.testing.assert_close(out[row : row + 1, :, real], alone)
        assert (caches[0].positions(0)[row] == caches[1 + row].positions(0)[0]).all()
