"""Layers whose keys, values and latents are of different widths: each does what it would do in a cache of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fastattn import CompressedKVCache, ExpectedAttention, KeyDiff, Policy, Rotary

HEADS = 4
WIDTHS: dict[str, dict[str, Any]] = {
    "keys and values": {"num_kv_heads": 2, "head_dim": (6, 10, 8), "v_head_dim": (4, 4, 12)},
    "latents": {"num_kv_heads": 1, "head_dim": (12, 7, 9), "latent_rank": (8, 5, 1)},
}
ROTARY = [Rotary(torch.tensor([1.0, 0.1]), start=2), Rotary(torch.tensor([0.3]), start=5), Rotary(torch.tensor([0.5]))]
POLICIES: list[Policy] = [KeyDiff(), ExpectedAttention(query_window=4, n_sink=0)]


def caches(widths: dict[str, Any], policy: Policy, **options: Any) -> list[CompressedKVCache]:
    """One cache of three layers, and one for each of them."""
    sizes: dict[str, Any] = {"policy": policy, "budget": 6, "interval": 3, "max_step": 2, "batch_size": 2}
    sizes |= {"dtype": torch.float64, "num_heads": HEADS} | options
    each = [
        {name: value if isinstance(value, int) else value[layer] for name, value in widths.items()}
        for layer in range(3)
    ]
    alone = [CompressedKVCache(**sizes, **one, num_layers=1, rotary=ROTARY[layer]) for layer, one in enumerate(each)]
    return [CompressedKVCache(**sizes, **widths, num_layers=3, rotary=ROTARY), *alone]


def feed(together: CompressedKVCache, alone: list[CompressedKVCache], tokens: int, generator: torch.Generator) -> None:
    rows = together.batch_size
    for layer, own in enumerate(alone):
        query, key, value = (
            torch.randn(rows, heads, tokens, dim, generator=generator, dtype=torch.float64)
            for heads, dim in (
                (HEADS, own.head_dim),
                (own.num_kv_heads, own.head_dim),
                (own.num_kv_heads, own.v_head_dim),
            )
        )
        given = None if own.latent_rank else value
        out = together.attend(layer, query, key, given, scale=0.3)
        torch.testing.assert_close(out, own.attend(0, query, key, given, scale=0.3))


def same(together: CompressedKVCache, alone: list[CompressedKVCache]) -> None:
    assert torch.equal(together.tokens_seen, alone[0].tokens_seen)
    for layer, own in enumerate(alone):
        assert torch.equal(together.positions(layer), own.positions(0))
        valid = own.positions(0) >= 0
        assert bool(valid.any())
        for read in ("keys", "values"):
            assert torch.equal(getattr(together, read)(layer)[valid], getattr(own, read)(0)[valid])


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("name", WIDTHS)
def test_every_layer_does_what_it_does_alone(name: str, policy: Policy, tmp_path: Path) -> None:
    """Fed, evicted, cropped, moved, saved in both ways, loaded, reset."""
    generator = torch.Generator().manual_seed(0)
    together, *alone = caches(WIDTHS[name], policy)
    for tokens in (9, 1, 1, 2, 1, 1, 5):
        feed(together, alone, tokens, generator)
        same(together, alone)
    feed(together, alone, 2, generator)
    for one in (together, *alone):
        one.crop(torch.tensor([2, 1]))
    same(together, alone)
    for one in (together, *alone):
        one.reorder(torch.tensor([1, 0]))
    same(together, alone)
    together.save(tmp_path / "cache")
    state = together.state_dict()
    together = CompressedKVCache.load(tmp_path / "cache")
    assert (together.head_dim, together.latent_rank) == (WIDTHS[name]["head_dim"], WIDTHS[name].get("latent_rank"))
    feed(together, alone, 1, generator)
    same(together, alone)
    index = torch.tensor([1, 1, 0])
    together, alone = together.select(index), [one.select(index) for one in alone]
    feed(together, alone, 1, generator)
    same(together, alone)
    fresh, *fresh_alone = caches(WIDTHS[name], policy, batch_size=3)
    fresh.insert(torch.tensor([2]), together, torch.tensor([0]))
    for one, source in zip(fresh_alone, alone, strict=True):
        one.insert(torch.tensor([2]), source, torch.tensor([0]))
    same(fresh, fresh_alone)
    restored, *_ = caches(WIDTHS[name], policy)
    restored.load_state_dict(state)
    for layer in range(3):
        assert torch.equal(restored.keys(layer), state[f"layers.{layer}.keys"])
    together.reset()
    for one in alone:
        one.reset()
    feed(together, alone, 7, generator)
    same(together, alone)


def test_widths_are_read_as_given_and_one_number_where_they_agree() -> None:
    together, *_ = caches(WIDTHS["latents"], KeyDiff())
    assert (together.head_dim, together.latent_rank, together.v_head_dim) == ((12, 7, 9), (8, 5, 1), (8, 5, 1))
    assert [together.keys(layer).shape[3] for layer in range(3)] == [12, 7, 9]
    equal = CompressedKVCache("knorm", 4, num_layers=2, num_kv_heads=1, head_dim=[8, 8], v_head_dim=(4, 4))
    assert (equal.head_dim, equal.v_head_dim, equal.latent_rank) == (8, 4, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": (8, 8, 8)}, "head_dim must be one number, or one for each of the 2 layers, got 3"),
        ({"head_dim": (8, 0)}, r"head_dim\[1\] must be at least 1"),
        ({"v_head_dim": (4, -1)}, r"v_head_dim\[1\] must be at least 1"),
        ({"latent_rank": (4, 9)}, r"latent_rank must be at most head_dim 8, got \(4, 9\)"),
        ({"latent_rank": (4, 5), "v_head_dim": 4}, r"v_head_dim must be latent_rank \(4, 5\) or None, got 4"),
        ({"head_dim": (64, 24), "storage": "int4"}, "multiple of 32 .*got 24"),
        ({"head_dim": (8, 2), "rotary": Rotary(torch.ones(2))}, "within head_dim 2, got dims up to 4"),
    ],
)
def test_widths_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    sizes: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 1, "head_dim": 8}
    with pytest.raises(ValueError, match=message):
        CompressedKVCache("knorm", 4, **(sizes | options))


def test_a_key_of_another_layers_width_is_refused_before_anything_is_written() -> None:
    together, *_ = caches(WIDTHS["keys and values"], KeyDiff())
    query, key = torch.zeros(2, HEADS, 1, 10, dtype=torch.float64), torch.zeros(2, 2, 1, 10, dtype=torch.float64)
    with pytest.raises(ValueError, match="key must have the cache's head dim 6, got 10"):
        together.attend(0, query, key, key[..., :4])
    assert int(together.lengths(0).max()) == 0
    other, *_ = caches(WIDTHS["keys and values"] | {"head_dim": (6, 8, 8)}, KeyDiff())
    with pytest.raises(ValueError, match="layer 1 must be"):
        together.insert(torch.tensor([0]), other, torch.tensor([0]))
    with pytest.raises(ValueError, match=r"layers\.1\.keys of shape"):
        together.load_state_dict(other.state_dict())
