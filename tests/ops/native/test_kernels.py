"""The native kernels where they part ways with one another: pieces of threads, blocks, tiles, strides.

That they equal their definitions over drawn shapes is what ``tests/ops`` shows, whichever branch is taken; these sizes
reach what small shapes do not.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastattn import ops
from fastattn.ops import reference
from fastattn.ops.cpu import native
from tests._helpers import draw, plain
from tests._helpers.budget import assert_lse, assert_within_budget
from tests._helpers.native import needs_native

pytestmark = pytest.mark.cpu_only

INT = torch.int32


@pytest.fixture(autouse=True)
def _built_before() -> None:
    needs_native()


@pytest.fixture(params=[1, 2, 3, 7], ids=lambda count: f"{count} threads")
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def check(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, causal: bool, scale: float = 0.2) -> None:
    for buffer in (key, value):
        draw.poison_slots_(buffer, lengths)
    out, lse = native.operators().decode_attention(query, key, value, lengths, scale, causal)
    exact, exact_lse = reference.decode_attention(
        query.double(), key.double(), value.double(), lengths, scale=scale, causal=causal, return_lse=True
    )
    groups = query.shape[1] // key.shape[1]
    visible = plain.visible_in_cache(query.shape[2], key.shape[2], lengths, causal, groups)
    ways = plain.attention_in_three_ways(query, key, value, visible, scale)
    assert_within_budget(out, exact, [way for way, _ in ways], "out")
    norms = [t.double().nan_to_num().norm(dim=-1).max().item() for t in (query, key)]
    assert_lse(lse, exact_lse, query.dtype, scale * norms[0] * norms[1])


def inputs(
    dtype: torch.dtype, batch: int, kv_heads: int, groups: int, queries: int, slots: int, dims: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    query = draw.normal(batch, kv_heads * groups, queries, dims[0], dtype=dtype, seed=1)
    key = draw.normal(batch, kv_heads, slots, dims[0], dtype=dtype, seed=2)
    key *= torch.linspace(0.3, 1.7, slots).to(dtype)[:, None]  # the largest score keeps moving
    return query, key, draw.normal(batch, kv_heads, slots, dims[1], dtype=dtype, seed=3)


@pytest.mark.parametrize("dtype", draw.FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 1000, 1537])
def test_rows_cut_between_threads(dtype: torch.dtype, length: int, threads: int) -> None:
    query, key, value = inputs(dtype, 2, 2, 4, 1, 1600, (64, 48))
    check(query, key, value, torch.full((2, 2), length, dtype=INT), causal=True)


@pytest.mark.parametrize("dtype", draw.FLOAT_DTYPES, ids=str)
def test_ragged_rows_cut_between_threads(dtype: torch.dtype, threads: int) -> None:
    """A row in one piece, a row over several, rows with no slot at either end and between."""
    query, key, value = inputs(dtype, 4, 2, 3, 4, 1700, (40, 33))
    lengths = torch.tensor([[0, 1700], [0, 3], [1111, 129], [64, 0]], dtype=INT)
    for causal in (True, False):
        check(query, key, value, lengths, causal)


@pytest.mark.parametrize(
    "rows", [(1, 1), (1, 2), (3, 1), (1, 5), (6, 1), (7, 1), (2, 4), (9, 1), (5, 2), (1, 11), (8, 16), (9, 15)]
)
@pytest.mark.parametrize("dims", [(64, 64), (96, 48), (128, 16), (33, 31), (7, 65), (1, 1), (576, 512)], ids=str)
def test_tiles_of_queries_and_columns(rows: tuple[int, int], dims: tuple[int, int]) -> None:
    """Every rest of a tile of rows, and of a vector of columns, for each of the ways to form products."""
    for dtype in (torch.bfloat16, torch.float32):
        query, key, value = inputs(dtype, 1, 2, *rows, 197, dims)
        check(query, key, value, torch.tensor([[197, 130]], dtype=INT), causal=True, scale=0.5 * dims[0] ** -0.5)


@pytest.mark.parametrize("storage", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("rows", [(3, 2), (8, 16)])
def test_codes_in_blocks_tiles_and_threads(storage: str, rows: tuple[int, int], threads: int) -> None:
    """Rests of tiles, vectors and blocks, and rows cut between threads, of codes and their scales."""
    for dtype, dims in ((torch.float32, (64, 96)), (torch.bfloat16, (64, 96)), (torch.float32, (33, 31))):
        if storage == "int4" and dims[0] % 32:
            continue
        query, key, value = inputs(dtype, 2, 2, *rows, 197, dims)
        lengths = torch.tensor([[197, 64], [0, 131]], dtype=INT)
        (codes, scale), (value_codes, value_scale) = ops.quantize(key, storage), ops.quantize(value, storage)
        wide = torch.float64
        exact_key, exact_value = ops.dequantize(codes, scale, wide), ops.dequantize(value_codes, value_scale, wide)
        beyond = (torch.arange(197) >= lengths[..., None]).view(*lengths.shape, 197, *[1] * (scale.dim() - 3))
        scales = (scale.masked_fill(beyond, float("nan")), value_scale.masked_fill(beyond, float("nan")))
        out, lse = native.operators().decode_codes(query, codes, value_codes, *scales, lengths, 0.2, True, dims[1])
        exact, exact_lse = reference.decode_attention(
            query.double(), exact_key, exact_value, lengths, scale=0.2, return_lse=True
        )
        visible = plain.visible_in_cache(rows[1], 197, lengths, True, rows[0])
        ways = plain.attention_in_three_ways(query, exact_key.to(dtype), exact_value.to(dtype), visible, 0.2)
        assert_within_budget(out, exact, [way for way, _ in ways], "out")
        norms = [t.double().norm(dim=-1).max().item() for t in (query, exact_key)]
        assert_lse(lse, exact_lse, dtype, 0.2 * norms[0] * norms[1])


@pytest.mark.parametrize("layout", draw.LAYOUTS)
@pytest.mark.parametrize("queries", [1, 4])
def test_strides(layout: str, queries: int) -> None:
    """Rows far apart are read where they lie; columns far apart go to PyTorch's operators."""
    query, key, value = inputs(torch.bfloat16, 2, 2, 4, queries, 150, (64, 32))
    lengths = torch.tensor([[150, 149], [33, 0]], dtype=INT)
    key, value = (draw.strided(t, layout) for t in (key, value))
    query = draw.strided(query, layout)
    if key.stride(3) == 1:
        check(query, key, value, lengths, causal=True)
    else:
        with pytest.raises(RuntimeError, match="columns next to each other"):
            native.operators().decode_attention(query, key, value, lengths, 0.2, True)
        out = ops.decode_attention(query, key, value, lengths)
        assert torch.equal(out[1, 4:], torch.zeros_like(out[1, 4:]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("heads", [4, 16])
def test_log_sum_exp_of_large_scores(dtype: torch.dtype, heads: int) -> None:
    """Fault class: scores rounded to the inputs' dtype, which moved the log-sum-exp by 1e-2."""
    latent, rope = (draw.normal(1, heads, 1, dim, dtype=dtype, seed=dim) * 8 for dim in (64, 32))
    cache = draw.normal(1, 700, 96, dtype=dtype, seed=3)
    lengths = torch.tensor([700], dtype=INT)
    _, lse = ops.latent_decode(latent, rope, cache, lengths, scale=0.3, return_lse=True)
    _, exact = reference.latent_decode(
        latent.double(), rope.double(), cache.double(), lengths, scale=0.3, return_lse=True
    )
    assert exact.abs().max() > 40
    assert (lse - exact).abs().max() < 1e-4


def test_scores_of_many_blocks(threads: int) -> None:
    for dtype in draw.FLOAT_DTYPES:
        key = draw.normal(2, 2, 1100, 40, dtype=dtype, seed=5)
        lengths = torch.tensor([[1100, 257], [0, 513]], dtype=INT)
        draw.poison_slots_(key, lengths)
        for name in ("score_knorm", "score_key_diff"):
            got, exact = getattr(ops, name)(key, lengths), getattr(reference, name)(key.double(), lengths)
            assert_within_budget(got, exact, getattr(reference, name)(key.float(), lengths), name)


def test_keys_that_cancel_have_no_direction() -> None:
    """Fault class: reciprocals instead of quotients, of which opposite keys of other lengths leave a rest."""
    for dtype in draw.FLOAT_DTYPES:
        half = draw.normal(1, 1, 50, 1, dtype=dtype, seed=8).abs()
        key = torch.cat([half, -3 * half], dim=2)
        assert not ops.score_key_diff(key, torch.tensor([[100]], dtype=INT)).any()


@pytest.mark.parametrize("storage", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_appended_tokens_are_quantised_as_by_the_definition(storage: str, dtype: torch.dtype) -> None:
    """Tiny and large numbers, zeros and what is not finite, padding between tokens, of 33 and 96 numbers."""
    for dim in (32, 96) if storage == "int4" else (33, 96):
        new = (
            draw.normal(2, 2, 7, dim, dtype=dtype, seed=dim)
            * torch.tensor([1e-3, 1.0, 30.0]).to(dtype).repeat(11)[:7, None]
        )
        new[0, 0, 1] = 0
        new[1, 1, 2, 3] = float("nan")
        new[0, 1, 4, 5] = float("-inf")
        buffer, scales = ops.quantize(torch.zeros(2, 2, 9, dim), storage)
        scales = scales if scales.dim() == 4 else scales[..., None]
        value, value_scales = buffer.clone(), scales.clone()
        positions, lengths = torch.full((2, 2, 9), -1, dtype=INT), torch.tensor([[0, 3], [2, 1]], dtype=INT)
        at = torch.tensor([[5, 6, -1, 7, 8, -1, 9], [-1, 1, 2, 3, 4, -1, -1]], dtype=INT)
        native.operators().cache_append_codes_(
            buffer, value, positions, lengths, scales, value_scales, new, new.flip(3).contiguous(), at
        )
        expected, expected_scale = ops.quantize(new, storage)
        assert lengths.tolist() == [[5, 8], [6, 5]]
        for b, h in ((0, 0), (0, 1), (1, 0), (1, 1)):
            real = at[b] >= 0
            slots = slice(int(lengths[b, h]) - int(real.sum()), int(lengths[b, h]))
            assert torch.equal(positions[b, h, slots], at[b, real])
            found, wanted = scales[b, h, slots], expected_scale[b, h, real].view(int(real.sum()), -1)
            torch.testing.assert_close(found, wanted, rtol=1e-3 if storage == "int4" else 0, atol=1e-6, equal_nan=True)
            finite = wanted.isfinite().all(-1)
            if storage == "int4":  # the transform adds up in another order: halfway between two codes either is right
                numbers = ops.dequantize(buffer[b, h, slots], found)[finite]
                exact = ops.dequantize(expected[b, h, real], wanted)[finite]
                step = wanted[finite].float().abs().amax(-1, keepdim=True)
                assert ((numbers - exact).norm(dim=-1) <= 2.1 * step[..., 0] + 1e-7).all()
            else:
                assert torch.equal(buffer[b, h, slots][finite], expected[b, h, real][finite])
                flipped = value[b, h, slots][finite]
                assert torch.equal(flipped.flip(-1), buffer[b, h, slots][finite])


def test_every_number_rounds_to_e4m3_as_pytorch_rounds_it() -> None:
    """Codes, what lies halfway between two, and their neighbors, below and above the smallest normal number."""
    exact = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = (exact[1:] + exact[:-1]) / 2
    near = torch.cat([exact, halves, halves.nextafter(torch.tensor(1e9)), halves.nextafter(torch.tensor(-1e9))])
    numbers = torch.cat([near, -near, torch.tensor([448.0])])[None, None, None]  # the scale is 1
    buffer, scales = torch.zeros(1, 1, 1, numbers.shape[3], dtype=torch.uint8), torch.zeros(1, 1, 1, 1)
    positions, lengths = torch.full((1, 1, 1), -1, dtype=INT), torch.zeros(1, 1, dtype=INT)
    native.operators().cache_append_codes_(
        buffer, buffer[..., :0], positions, lengths, scales, scales[..., :0], numbers, numbers[..., :0],
        torch.zeros(1, 1, dtype=INT),
    )  # fmt: skip
    assert scales.item() == 1
    expected = numbers.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(buffer, expected)


def _stored() -> tuple[Tensor, ...]:
    key, value = draw.normal(2, 2, 9, 4, seed=1), draw.normal(2, 2, 9, 3, seed=2)
    positions = torch.arange(9, dtype=INT).expand(2, 2, 9).contiguous()
    return key, value, positions, torch.tensor([[5, 3], [9, 0]], dtype=INT)


def calls() -> dict[str, tuple[Any, ...]]:
    key, value, positions, lengths = _stored()
    query = draw.normal(2, 4, 2, 4, seed=3)
    appended = (draw.normal(2, 2, 1, 4, seed=4), draw.normal(2, 2, 1, 3, seed=5), torch.tensor([[7], [-1]], dtype=INT))
    codes, scale = ops.quantize(key, "int8")
    codes_of, scores = (appended[0], appended[0] + 1, appended[2]), draw.normal(2, 2, 9, seed=7)
    return {
        "decode_attention": (query, key, value, lengths, 0.3, True),
        "latent_decode": (query, query[..., :2], draw.normal(2, 9, 6, seed=6), lengths[:, 0].contiguous(), 0.3, True),
        "decode_codes": (query, codes, codes, scale, scale, lengths, 0.3, True, 4),
        "merge_attention": ([query, query], [query[..., 0], query[..., 1]]),
        "cache_append_": (key, value, positions, lengths, *appended),
        "cache_compact_": (key, value, positions, lengths, scores, 3, 0),
        "cache_append_codes_": (
            codes,
            codes.clone(),
            positions,
            lengths,
            scale[..., None],
            scale[..., None] + 1,
            *codes_of,
        ),
        "cache_compact_codes_": (
            codes,
            codes.clone(),
            positions,
            lengths,
            scale[..., None],
            scale[..., None] + 1,
            scores,
            3,
            0,
        ),
        "score_knorm": (key, lengths, 0),
        "score_key_diff": (key, lengths, 0),
    }


@pytest.mark.parametrize("name", sorted(calls()))
def test_schemas_tell_what_is_written(name: str) -> None:
    torch.library.opcheck(getattr(native.operators(), name), calls()[name], test_utils="test_schema")


def test_every_operator_is_called_here() -> None:
    assert set(calls()) == set(vars(native.operators()))


def test_narrower_vectors() -> None:
    """The same source for AVX2: compiled and held to the definition in a process that has nothing wider."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("this processor has no other kind of vectors")
    # Without the rows that plain PyTorch, held back like this on a processor with tiles, has no kernel for.
    chosen = "(rows_cut or tiles or codes or strides or blocks or cancel) and not rows10 and not rows11"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", str(Path(__file__)), "-k", chosen]
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "avx2", "FASTATTN_NATIVE": "require", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout[-4000:]
    assert " passed" in result.stdout
