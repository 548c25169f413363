"""Kernels over quantised caches, interpreted: attention against float64, append and compaction bit for bit."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastattn import CompressedKVCache, ops
from fastattn.ops import _formats, reference
from fastattn.ops.triton import append_codes, cache
from fastattn.ops.triton._codes import from_e4m3, to_e4m3
from tests._helpers import draw
from tests._helpers.budget import assert_within_budget
from tests._helpers.triton_run import DTYPES, MOST_TOKENS, examples, interpreted

STORAGES = _formats.STORAGES


def _poisoned(codes: Tensor, scale: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of anything and scales of NaN beyond the lengths."""
    beyond = torch.arange(codes.shape[-2]) >= lengths[..., None]
    codes = codes.masked_fill(beyond[..., None], 127)
    return codes, scale.masked_fill(beyond[..., None] if scale.dim() == codes.dim() else beyond, float("nan"))


@st.composite
def _calls(drawer):
    batch, kv_heads = drawer(st.integers(1, 2)), drawer(st.integers(1, 2))
    group, tokens = drawer(st.sampled_from([1, 3, 4])), drawer(st.sampled_from([1, 1, 2, 5]))
    capacity, dtype, storage = (
        drawer(draw.sizes(MOST_TOKENS)),
        drawer(st.sampled_from(DTYPES)),
        drawer(st.sampled_from(STORAGES)),
    )
    dims = [(32, 64), (64, 32), (96, 96)] + ([] if storage == "int4" else [(7, 24), (40, 5)])
    dim, value_dim = drawer(st.sampled_from(dims))
    lengths, seed = drawer(draw.lengths((batch, kv_heads), capacity)), drawer(draw.seeds)
    layouts = [drawer(draw.layouts) for _ in range(4)]
    query = draw.normal(batch, kv_heads * group, tokens, dim, dtype=dtype, seed=seed)
    vectors = (draw.normal(batch, kv_heads, capacity, n, seed=seed + n) for n in (dim, value_dim))
    stored = [_poisoned(*ops.quantize(x, storage), lengths) for x in vectors]
    stored = [(draw.strided(codes, layout), scale) for (codes, scale), layout in zip(stored, layouts, strict=False)]
    return {
        "query": draw.strided(query, layouts[2]),
        "stored": stored,
        "lengths": lengths,
        "causal": drawer(st.booleans()),
        "processors": drawer(st.sampled_from([1, 8, 64])),
    }


def _check(query, stored, lengths, *, processors=4, family="sm_90", **options):
    (key, key_scale), (value, value_scale) = stored
    numbers = [reference.dequantize(*pair, torch.float64) for pair in stored]
    exact = reference.decode_attention(query.double(), *numbers, lengths, return_lse=True, **options)
    rounded = [x.to(query.dtype) for x in numbers]
    plain = reference.decode_attention(query, *rounded, lengths, return_lse=True, **options)
    with interpreted(family, processors):
        out, lse = ops.decode_attention(
            query, key, value, lengths, key_scale=key_scale, value_scale=value_scale, return_lse=True, **options
        )
    # the transform back cancels down from numbers as large as a whole vector
    cancelling = numbers[1].nan_to_num().norm(dim=-1).max().item() if key_scale.dim() == 4 else 0.0
    assert_within_budget(out, exact[0], plain[0], "out", cancelling=cancelling)
    # the scale follows the product of query and codes, and int4's query is rounded anew, transformed
    scale = options.get("scale") or query.shape[3] ** -0.5
    largest = scale * query.double().norm(dim=-1).max().item() * numbers[0].nan_to_num().norm(dim=-1).max().item()
    narrow = key_scale.dim() == 4 and query.dtype == torch.float16
    bound = (1e-3 if narrow else 1e-6) * largest + 1e-6
    torch.testing.assert_close(lse.double(), exact[1], rtol=0, atol=bound)


@examples(30)
@given(_calls())
def test_attention_of_any_shape_layout_and_length(call):
    _check(**call)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 129])
def test_block_edges_in_every_split(storage, length):
    lengths = torch.full((1, 1), length, dtype=torch.int32)
    stored = [_poisoned(*ops.quantize(draw.normal(1, 1, 192, 128, seed=n), storage), lengths) for n in (1, 2)]
    _check(draw.normal(1, 4, 2, 128, seed=3), stored, lengths, processors=16)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("family", ["sm_80", "gfx942"])
def test_values_whose_scales_differ_by_far_in_float16(storage, family):
    """Weights times scales alone would fall below float16's numbers."""
    lengths = torch.tensor([[150]], dtype=torch.int32)
    value = draw.normal(1, 1, 150, 64, seed=2) * torch.logspace(-4, 1, 150)[:, None].flip(0)
    stored = [ops.quantize(x, storage) for x in (draw.normal(1, 1, 150, 64, seed=1), value)]
    _check(draw.normal(1, 4, 1, 64, dtype=torch.float16, seed=3), stored, lengths, family=family)
    small = [stored[0], ops.quantize(value * 1e-5, storage)]
    _check(draw.normal(1, 4, 1, 64, seed=3), small, lengths, family=family)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(("rank", "rope"), [(64, 32), (96, 32), (128, 32), (512, 64), (96, 0), (144, 16)])
def test_latents(storage, rank, rope):
    lengths = torch.tensor([70, 9], dtype=torch.int32)
    query = draw.normal(2, 20, 2, rank + rope, seed=1)
    codes, scale = _poisoned(*ops.quantize(draw.normal(2, 70, rank + rope, seed=2), storage), lengths)
    cache = reference.dequantize(codes, scale, torch.float64)
    parts = query[..., :rank], query[..., rank:]
    exact = reference.latent_decode(*(x.double() for x in parts), cache, lengths, scale=0.1, return_lse=True)
    plain = reference.latent_decode(*parts, cache.float(), lengths, scale=0.1, return_lse=True)
    with interpreted(processors=8):
        found = ops.latent_decode(*parts, codes, lengths, scale=0.1, cache_scale=scale, return_lse=True)
    for one, other, own in zip(found, exact, plain, strict=True):
        bound = 4 * (own.double() - other).abs().max() + 2e-6
        torch.testing.assert_close(one.double(), other, rtol=0, atol=bound.item())


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("causal", [True, False])
def test_windows_caps_sinks_slopes_and_positions(storage, causal):
    query = draw.normal(1, 4, 2, 64, seed=1)
    stored = [ops.quantize(draw.normal(1, 2, 150, 64, seed=n), storage) for n in (2, 3)]
    positions = (2 * torch.arange(150, dtype=torch.int32)).expand(1, 2, 150)
    options = {"window": 90, "softcap": 5.0, "sinks": draw.normal(4, seed=4), "positions": positions, "causal": causal}
    options["alibi_slopes"] = draw.normal(4, seed=5).abs() * 0.01
    _check(query, stored, torch.tensor([[150, 80]], dtype=torch.int32), **options)


def _empty(storage: str, rows: tuple[int, int], slots: int, dim: int) -> tuple[Tensor, Tensor]:
    groups = (dim // _formats.GROUP,) if storage == "int4" or not dim else ()
    codes = torch.full((*rows, slots, _formats.code_width(storage, dim)), 7, dtype=_formats.code_dtype(storage))
    return codes, torch.full((*rows, slots, *groups), 3.0, dtype=_formats.scale_dtype(storage))


@examples(20)
@given(data=st.data())
def test_append_and_compaction_equal_those_of_a_cpu(data: st.DataObject) -> None:
    storage, dtype = data.draw(st.sampled_from(STORAGES)), data.draw(st.sampled_from(DTYPES))
    rows, slots = (data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))), data.draw(draw.sizes(200, 60))
    tokens, dims = data.draw(draw.sizes(40)), data.draw(st.sampled_from([(64, 96), (32, 0), (576, 0), (128, 32)]))
    lengths, seed = data.draw(draw.lengths(rows, slots - tokens)), data.draw(draw.seeds)
    new = [draw.normal(*rows, tokens, dim, dtype=dtype, seed=seed + dim) for dim in dims]
    new[0][:, :, 0] = 0.0
    new[1][:, :, -1, ::2] = -1.0  # ties between the largest numbers
    new = [draw.strided(x, data.draw(draw.layouts)) for x in new]
    keep = draw.normal(rows[0], tokens, seed=seed) < data.draw(st.sampled_from([-9.0, 0.0, 9.0]))
    position = torch.where(keep, 100 + torch.arange(tokens), -1).to(torch.int32)
    scores, budget = draw.normal(*rows, slots, seed=seed).round(), data.draw(st.integers(1, slots))
    ends = []
    for on_device in (False, True):
        (keys, key_scale), (values, value_scale) = (_empty(storage, rows, slots, dim) for dim in dims)
        positions = (3 * torch.arange(slots, dtype=torch.int32)).repeat(*rows, 1)
        held = [keys, values, positions, lengths.clone(), key_scale, value_scale]
        scales = {"key_scale": key_scale, "value_scale": value_scale if dims[1] else None}
        with interpreted() if on_device else torch.no_grad():
            ops.cache_append_(*held[:4], *new, position, **scales)
            after_append = [x.clone() for x in held]
            ops.cache_compact_(*held[:4], scores, budget, min_length=data.draw(st.just(3)), **scales)
        ends.append(after_append + held)
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("storage", STORAGES)
def test_append_over_several_tiles_and_beyond_the_capacity(storage):
    rows, slots, tokens = (1, 1), 300, 400
    (keys, key_scale), (values, value_scale) = (_empty(storage, rows, slots, dim) for dim in (64, 32))
    positions = torch.full((*rows, slots), -1, dtype=torch.int32)
    lengths, position = torch.tensor([[7]], dtype=torch.int32), torch.arange(tokens, dtype=torch.int32)[None]
    new = [draw.normal(*rows, tokens, dim, seed=dim) for dim in (64, 32)]
    with interpreted():
        append_codes.cache_append_codes_(keys, values, positions, lengths, key_scale, value_scale, *new, position)
    assert lengths.tolist() == [[slots]]
    codes, scale = ops.quantize(new[0][:, :, : slots - 7], storage)
    assert torch.equal(keys[:, :, 7:], codes)
    assert torch.equal(key_scale[:, :, 7:], scale)
    assert positions[0, 0, 7:].tolist() == list(range(slots - 7))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_token_that_is_not_finite_poisons_its_slot_only(storage, bad):
    (keys, key_scale), (values, value_scale) = (_empty(storage, (1, 1), 4, 64) for _ in range(2))
    new = draw.normal(1, 1, 3, 64, seed=1)
    new[0, 0, 1, 40] = bad
    held = keys, values, torch.full((1, 1, 4), -1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    position = torch.arange(3, dtype=torch.int32)[None]
    with interpreted():
        append_codes.cache_append_codes_(*held, key_scale, value_scale, new, new, position)
    found = ops.dequantize(keys, key_scale)[0, 0]
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


@triton.jit
def _e4m3_kernel(bits, read, number, written, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    tl.store(read + o, from_e4m3(tl.load(bits + o)))
    tl.store(written + o, to_e4m3(tl.load(number + o)))


def test_every_bit_pattern_of_e4m3_is_read_and_written_exactly():
    bits = torch.arange(256, dtype=torch.uint8)
    exact = bits.view(torch.float8_e4m3fn).float()
    steps = torch.cat([exact[:127], (exact[:126] + exact[1:127]) / 2])  # halfway between two codes
    near = torch.cat([steps, steps * (1 + 1e-6), steps * (1 - 1e-6), draw.normal(265, seed=1).abs() * 50])
    number = torch.cat([near, -near]).clamp(-448, 448)
    number = torch.nn.functional.pad(number, (0, 2048 - number.shape[0]))
    read, written = torch.empty(2048, dtype=torch.float16), torch.empty(2048, dtype=torch.uint8)
    _e4m3_kernel[(1,)](bits.repeat(8), read, number, written, SIZE=2048)
    torch.testing.assert_close(256 * read[:256].float(), exact, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(written, number.to(torch.float8_e4m3fn).view(torch.uint8))


def test_unsupported_dtypes_and_dims_are_named():
    lengths = torch.zeros(1, 1, dtype=torch.int32)
    codes, scale = ops.quantize(torch.zeros(1, 1, 4, 64), "int8")
    scales = {"key_scale": scale, "value_scale": scale}
    with interpreted():
        with pytest.raises(TypeError, match=r"float32, got query of torch\.float64"):
            ops.decode_attention(torch.zeros(1, 1, 1, 64).double(), codes, codes, lengths, **scales)
        wide, scale = ops.quantize(torch.zeros(1, 1, 4, 513), "int8")
        with pytest.raises(ValueError, match="head dim of 1 to 512, got 513"):
            ops.decode_attention(torch.zeros(1, 1, 1, 513), wide, wide, lengths, key_scale=scale, value_scale=scale)
        (keys, key_scale), (values, value_scale) = (_empty("int8", (1, 1), 8, 32) for _ in range(2))
        held = keys, values, torch.zeros(1, 1, 8, dtype=torch.int32), lengths, key_scale, value_scale
        with pytest.raises(TypeError, match=r"got scores of torch\.float64"):
            cache.cache_compact_codes_(*held, torch.zeros(1, 1, 8, dtype=torch.float64), 4, 0)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_cache_of_codes_evicts_as_on_a_cpu(storage):
    ends = []
    for on_device in (False, True):
        sizes = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 32, "interval": 3}
        cache_ = CompressedKVCache("key_diff", 12, storage=storage, **sizes)
        outs = []
        with interpreted() if on_device else torch.no_grad(), torch.no_grad():
            for step, tokens in enumerate([7, *[1] * 11]):
                new = [draw.normal(1, heads, tokens, 32, seed=10 * step + heads) for heads in (4, 2)]
                outs.append(cache_.attend(0, *new, new[1]))
        ends.append((torch.cat(outs, 2), cache_.keys(0), cache_.lengths(0)))
    assert torch.equal(ends[0][2], ends[1][2])
    assert torch.equal(ends[0][1].view(torch.uint8), ends[1][1].view(torch.uint8))
    torch.testing.assert_close(ends[0][0], ends[1][0], rtol=1e-5, atol=1e-5)
