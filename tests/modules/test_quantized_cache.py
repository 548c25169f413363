"""Quantised storage of a cache: what it gives is what a plain cache of the dequantised tokens gives."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn import CompressedKVCache, ops
from fastattn.modules.kv_cache.state import SlotStore
from fastattn.modules.policies import policy_names
from tests._helpers import draw

STORAGES = ("int8", "fp8", "int4")
ROTARY = fastattn.Rotary(10000.0 ** (-torch.arange(0, 32, 2) / 32))
SIZES: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 2, "num_heads": 4, "head_dim": 32, "batch_size": 2}
LATENT: dict[str, Any] = SIZES | {"num_kv_heads": 1, "head_dim": 96, "latent_rank": 64}


def rounded(vectors: Tensor, storage: str) -> Tensor:
    """Vectors that the storage holds as they are."""
    return ops.dequantize(*ops.quantize(vectors, storage))


def feed(caches: list[CompressedKVCache], storage: str, calls: list[int], masked: bool = False) -> None:
    """The same calls to all caches; their outputs and what they hold must agree."""
    first = caches[0]
    for number, tokens in enumerate(calls):
        for layer in range(first.num_layers):
            seed = 1000 * number + 10 * layer
            query = draw.normal(first.batch_size, 4, tokens, first.head_dim, seed=seed)
            shape = (first.batch_size, first.num_kv_heads, tokens)
            key = rounded(draw.normal(*shape, first.head_dim, seed=seed + 1), storage)
            latent = first.latent_rank is not None
            value = None if latent else rounded(draw.normal(*shape, first.v_head_dim, seed=seed + 2), storage)
            mask = None
            if masked:
                mask = torch.ones(first.batch_size, tokens, dtype=torch.bool)
                mask[1, : tokens // 2] = False
            with torch.no_grad():
                outs = [cache.attend(layer, query, key, value, attention_mask=mask, scale=0.2) for cache in caches]
            for out in outs[1:]:
                torch.testing.assert_close(out, outs[0], rtol=2e-4, atol=2e-5)
            for cache in caches[1:]:
                assert torch.equal(cache.positions(layer), first.positions(layer))
                assert torch.equal(cache.lengths(layer), first.lengths(layer))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("policy", ["key_diff", "expected_attention", "snap_kv", "h2o", "streaming_llm"])
def test_equals_a_plain_cache_of_the_same_tokens(storage: str, policy: str) -> None:
    caches = [
        CompressedKVCache(policy, 40, interval=4, rotary=ROTARY, storage=chosen, **SIZES) for chosen in (None, storage)
    ]
    feed(caches, storage, [50, *[1] * 9, 3])
    assert caches[1].storage == storage
    assert caches[1].nbytes < caches[0].nbytes


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("sizes", [SIZES, LATENT], ids=["heads", "latents"])
def test_policies_of_the_library_read_codes(
    storage: str, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None asks for the layer as numbers; a policy of one's own still gets them."""

    class LargestValues(fastattn.Policy):
        def score(self, state: Any) -> Tensor:
            return state.values.float().norm(dim=-1)

    latent = "latent_rank" in sizes
    rotary = fastattn.Rotary(ROTARY.inv_freq, start=64) if latent else ROTARY
    for policy in [*policy_names(), LargestValues()]:
        kinds = {"interval": 4, "rotary": rotary, **sizes}
        caches = [CompressedKVCache(policy, 80, storage=s, **kinds) for s in (None, storage)]
        with monkeypatch.context() as patch:
            if isinstance(policy, str):
                patch.setattr(SlotStore, "dequantized", _refuse)
            feed(caches, storage, [90, *[1] * 6])


def _refuse(*_: Any) -> Any:
    raise AssertionError("a copy of the layer as numbers was made")


@pytest.mark.parametrize("storage", STORAGES)
def test_latents_padding_and_budgets_per_layer(storage: str) -> None:
    sizes = {"interval": 4, "max_step": 2, **LATENT}
    feed(
        [CompressedKVCache("knorm", (40, 20), storage=s, **sizes) for s in (None, storage)], storage, [30, 20, 1, 2, 5]
    )
    ordinary = [CompressedKVCache("key_diff", 20, interval=4, storage=s, **SIZES) for s in (None, storage)]
    feed(ordinary, storage, [30, 12, 1, 1], masked=True)


@pytest.mark.parametrize("storage", STORAGES)
def test_rows_and_files(storage: str, tmp_path: Path) -> None:
    """Beams, selection, insertion, cropping, copies and files carry the scales along."""
    caches = [CompressedKVCache("key_diff", 16, interval=4, storage=s, **SIZES) for s in (None, storage)]
    feed(caches, storage, [30, 1])
    for cache in caches:
        cache.reorder(torch.tensor([1, 0]))
    feed(caches, storage, [1, 1])
    caches = [cache.select(torch.tensor([1, 1, 0])) for cache in caches]
    assert caches[1].storage == storage
    feed(caches, storage, [1, 1])
    for cache in caches:
        cache.crop(1)
    others = [copy.deepcopy(cache) for cache in caches]
    for other in others:
        other.reset()
    feed(others, storage, [9, 1])
    for cache, other in zip(caches, others, strict=True):
        cache.insert(torch.tensor([2]), other, torch.tensor([0]))
    feed(caches, storage, [1, 1])
    caches[1].save(tmp_path / "cache.safetensors")
    caches[1] = CompressedKVCache.load(tmp_path / "cache.safetensors")
    assert caches[1].storage == storage
    feed(caches, storage, [1] * 6)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_change_of_dtype_leaves_scales_alone(storage: str) -> None:
    cache = CompressedKVCache("knorm", 16, storage=storage, **SIZES).to(torch.bfloat16)
    assert cache.dtype == torch.bfloat16
    assert cache.scales(0)[0].dtype == (torch.float16 if storage == "int4" else torch.float32)
    key = draw.normal(2, 2, 3, 32, dtype=torch.bfloat16)
    for layer in range(2):
        out = cache.attend(layer, draw.normal(2, 4, 3, 32, dtype=torch.bfloat16), key, key)
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("storage", STORAGES)
def test_a_decode_step_makes_no_copy_of_the_cache(storage: str) -> None:
    """All memory that a step allocates, freed or not, is far less than the keys as numbers."""
    sizes: dict[str, Any] = {"num_layers": 1, "num_kv_heads": 2, "num_heads": 4, "head_dim": 64}
    cache = CompressedKVCache("streaming_llm", 40_000, storage=storage, **sizes)
    key = draw.normal(1, 2, 39_000, 64)
    cache.update(0, None, key, key)
    new = draw.normal(1, 2, 1, 64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        cache.attend(0, draw.normal(1, 4, 1, 64), new, new)
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert peak > 0
    assert peak < 0.6 * key.numel() * 4, f"{peak} bytes at once for keys of {key.numel() * 4}"


@pytest.mark.compile
@pytest.mark.parametrize("storage", ["int8", "int4"])
def test_steps_are_one_graph(storage: str) -> None:
    """A step is compiled once through every compression, and gives what eager mode gives."""
    cache = CompressedKVCache("key_diff", 8, interval=4, storage=storage, **SIZES)
    eager = copy.deepcopy(cache)

    def step(cache: CompressedKVCache, query: Tensor, key: Tensor) -> Tensor:
        return sum(cache.attend(layer, query, key, key) for layer in range(2))

    compiled = torch.compile(step, fullgraph=True)
    for number in range(10):
        query, key = draw.normal(2, 4, 1, 32, seed=number), draw.normal(2, 2, 1, 32, seed=number + 50)
        with torch.no_grad():
            torch.testing.assert_close(compiled(cache, query, key), step(eager, query, key))
    assert torch.equal(cache.positions(1), eager.positions(1))
    assert torch.equal(cache.keys(1), eager.keys(1))


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"storage must be one of \['int8', 'fp8', 'int4'\], got 'int3'"):
        CompressedKVCache("knorm", 16, storage="int3", **SIZES)
    with pytest.raises(ValueError, match="multiple of 32 for storage 'int4'"):
        CompressedKVCache("knorm", 16, storage="int4", **(SIZES | {"head_dim": 40}))
    with pytest.raises(ValueError, match=r"torch\.float64"):
        CompressedKVCache("knorm", 16, storage="int8", dtype=torch.float64, **SIZES)
    policy = fastattn.StreamingLLM(rerotate=True)
    with pytest.raises(ValueError, match="rerotate"):
        CompressedKVCache(policy, 16, storage="int8", rotary=ROTARY, **SIZES)
    caches = {s: CompressedKVCache("knorm", 16, storage=s, **SIZES) for s in (None, *STORAGES)}
    for name, cache in caches.items():
        for other_name, other in caches.items():
            if other_name == name:
                continue
            with pytest.raises(ValueError, match="storage"):
                cache.insert(torch.tensor([0]), other, torch.tensor([0]))
            with pytest.raises(ValueError, match="state_dict"):
                cache.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="storage must be"):
        caches[None].scales(0)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused_before_anything_is_written(storage: str, bad: float) -> None:
    cache = CompressedKVCache("knorm", 16, storage=storage, **SIZES)
    key = draw.normal(2, 2, 3, 32)
    key[1, 0, 2, 5] = bad
    with pytest.raises(ValueError, match="key must be finite to be quantised, got NaN or inf in row 1, token 2"):
        cache.attend(0, draw.normal(2, 4, 3, 32), key, key)
    assert not cache.lengths(0).any()
    mask = torch.tensor([[True, True, True], [True, True, False]])
    for layer in range(2):  # padding may hold anything
        cache.attend(layer, draw.normal(2, 4, 3, 32), key, draw.normal(2, 2, 3, 32), attention_mask=mask)
    assert cache.tokens_seen.tolist() == [3, 2]
