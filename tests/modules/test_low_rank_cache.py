"""LowRankAttention over a latent cache: prefill, chunks, decoding, padding, eviction, and weights that change."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastattn import CompressedKVCache, ExpectedAttention, KeyDiff, Knorm, LowRankAttention, StreamingLLM
from fastattn.modules import policy_names
from fastattn.modules.low_rank import paths
from fastattn.modules.low_rank.absorption import absorbs
from tests._helpers import exact_policies as exact
from tests._helpers.budget import assert_within_budget
from tests._helpers.latent import SMALL, double, inputs, plain, small_module
from tests._helpers.policy_caches import small

POLICIES = policy_names()


def cache_for(
    module: LowRankAttention, policy: object = "streaming_llm", budget: int = 64, **options: int
) -> CompressedKVCache:
    return module.make_cache(policy, budget, **{"interval": 8, **options})


def feed(
    module: LowRankAttention, cache: CompressedKVCache, hidden: Tensor, chunks: list[int], absorb: bool | None
) -> Tensor:
    """The outputs of ``hidden`` fed in chunks."""
    with torch.no_grad():
        return torch.cat([module(part, cache=cache, absorb=absorb) for part in hidden.split(chunks, dim=1)], dim=1)


# -- both paths over a cache -----------------------------------------------------------------------------------------


@given(
    chunks=st.lists(st.integers(1, 13), min_size=1, max_size=5),
    steps=st.integers(1, 4),
    max_step=st.integers(1, 4),
    first=st.sampled_from([None, False, True]),
    absorb=st.sampled_from([None, False, True]),
)
@settings(max_examples=25)
def test_prefill_chunks_and_decoding_equal_one_pass(
    chunks: list[int], steps: int, max_step: int, first: bool | None, absorb: bool | None
) -> None:
    module = small_module(q_lora_rank=9)
    chunks = [*chunks, *[steps] * 3]
    hidden = inputs(2, sum(chunks))
    cache = cache_for(module, batch_size=2, budget=96, max_step=max_step)
    prompt = feed(module, cache, hidden[:, : chunks[0]], chunks[:1], first)
    rest = feed(module, cache, hidden[:, chunks[0] :], chunks[1:], absorb)
    torch.testing.assert_close(torch.cat([prompt, rest], 1), module(hidden), rtol=1e-10, atol=1e-10)
    assert int(cache.columns) == sum(chunks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("absorb", [False, True])
def test_low_precision_stays_within_the_budget(absorb: bool, dtype: torch.dtype) -> None:
    module = small_module(dtype=dtype)
    hidden = inputs(2, 40, dtype=dtype)
    out = feed(module, cache_for(module, batch_size=2), hidden, [20, 12, 1, 2, 3, 2], absorb)
    reference = double(module)(hidden.double())
    assert_within_budget(out, reference, plain(module, hidden, absorbed=absorb))
    if dtype == torch.float32:
        assert (out - reference).abs().max() < 1e-5 * reference.abs().max()


@pytest.mark.parametrize("absorb", [None, False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_left_padded_row_gives_what_it_gives_alone(policy: str, absorb: bool | None) -> None:
    module, real, tokens = small_module(), [17, 9, 3], 17
    hidden = inputs(3, tokens + 12)
    mask = torch.arange(tokens) >= tokens - torch.tensor(real)[:, None]
    hidden[:, :tokens].masked_fill_(~mask[..., None], float("nan"))
    together = cache_for(module, small(policy), budget=8, interval=4, batch_size=3)
    with torch.no_grad():
        outs = [module(hidden[:, :tokens], attention_mask=mask, cache=together, absorb=absorb)]
        outs += [module(hidden[:, i : i + 1], cache=together, absorb=absorb) for i in range(tokens, tokens + 12)]
    out = torch.cat(outs, 1)
    for row, count in enumerate(real):
        alone = cache_for(module, small(policy), budget=8, interval=4)
        own = hidden[row : row + 1, tokens - count :]
        expected = feed(module, alone, own, [count, *[1] * 12], absorb)
        torch.testing.assert_close(out[row : row + 1, tokens - count :], expected, rtol=1e-9, atol=1e-10)
        assert torch.equal(together.positions(0)[row], alone.positions(0)[0])
    assert together.tokens_seen.tolist() == [count + 12 for count in real]


def test_position_ids_reach_the_rotation_and_the_cache() -> None:
    module, hidden = small_module(), inputs(1, 9)
    far = torch.arange(100, 118, 2)[None]
    cache = cache_for(module)
    with torch.no_grad():
        outs = [module(hidden[:, :6], position_ids=far[:, :6], cache=cache)]
        outs += [module(hidden[:, i : i + 1], position_ids=far[:, i : i + 1], cache=cache) for i in range(6, 9)]
    torch.testing.assert_close(torch.cat(outs, 1), module(hidden, position_ids=far), rtol=1e-10, atol=1e-10)
    assert cache.positions(0)[0, 0, :9].tolist() == far[0].tolist()


def test_a_long_cache_is_expanded_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "EXPANDED_SLOTS", 5)
    module, hidden = small_module(), inputs(2, 30)
    out = feed(module, cache_for(module, batch_size=2), hidden, [13, 10, 7], absorb=False)
    torch.testing.assert_close(out, module(hidden), rtol=1e-10, atol=1e-10)


def test_unused_slots_may_hold_nan() -> None:
    module, hidden = small_module(), inputs(1, 12)
    for absorb in (False, True):
        cache = cache_for(module)
        cache.keys(0).fill_(float("nan"))
        out = feed(module, cache, hidden, [5, 3, 3, 1], absorb)
        torch.testing.assert_close(out, module(hidden), rtol=1e-10, atol=1e-10)


def test_layers_share_one_cache() -> None:
    layers = [small_module(seed) for seed in (0, 50)]
    hidden = inputs(1, 10)
    cache = layers[0].make_cache("streaming_llm", 32, num_layers=2)
    parts = []
    with torch.no_grad():
        for x in hidden.split([7, 1, 1, 1], dim=1):
            for index, module in enumerate(layers):
                x = x + module(x, cache=cache, layer=index)
            parts.append(x)
        for module in layers:
            hidden = hidden + module(hidden)
    torch.testing.assert_close(torch.cat(parts, 1), hidden, rtol=1e-10, atol=1e-10)


# -- which path ------------------------------------------------------------------------------------------------------


def test_the_break_even_counts_flops() -> None:
    assert absorbs(170, 512, 128, 128)
    assert not absorbs(171, 512, 128, 128)
    rope, slots = 64, 10_000_000
    for rank, nope, value in [(512, 128, 128), (256, 64, 128), (96, 32, 32), (64, 128, 128)]:
        for queries in (1, 40, 170, 171, 400, 5000):
            absorbed = queries * slots * 2 * (2 * rank + rope)
            expanded = queries * slots * 2 * (nope + rope + value) + slots * 2 * rank * (nope + value)
            assert absorbs(queries, rank, nope, value) == (absorbed <= expanded)


def test_the_rule_chooses_and_absorb_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    def spy(name: str) -> Callable[..., Tensor]:
        original = getattr(paths, name)

        def call(*args: object) -> Tensor:
            taken.append(name)
            return original(*args)

        return call

    for name in ("expanded", "absorbed", "expanded_over_cache", "absorbed_over_cache"):
        monkeypatch.setattr(paths, name, spy(name))
    module = small_module()  # break-even: T (2 * 20 - 17) <= 20 * 17, that is T <= 14
    with torch.no_grad():
        for tokens, cached, absorb in [
            (14, True, None),
            (15, True, None),
            (14, True, False),
            (15, True, True),
            (14, False, None),
            (14, False, True),
        ]:
            module(inputs(1, tokens), cache=cache_for(module) if cached else None, absorb=absorb)
    assert taken == [
        "absorbed_over_cache",
        "expanded_over_cache",
        "expanded_over_cache",
        "absorbed_over_cache",
        "expanded",
        "absorbed",
    ]


# -- eviction --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_within_the_budget_nothing_changes(policy: str) -> None:
    module, hidden = small_module(), inputs(2, 40)
    cache = cache_for(module, policy, budget=40, batch_size=2)
    out = feed(module, cache, hidden, [20, 10, *[1] * 10], absorb=None)
    torch.testing.assert_close(out, module(hidden), rtol=1e-10, atol=1e-10)


def _latents(module: LowRankAttention, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """``[latent | rope key]`` per token and absorbed queries before rotation, from the parameters, for one row."""
    p, rank, nope = module.state_dict(), module.kv_lora_rank, module.qk_nope_head_dim
    tokens = hidden.shape[0]
    down = hidden @ p["kv_a_proj_with_mqa.weight"].T
    latent = down[:, :rank]
    latent = latent / (latent.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * p["kv_a_layernorm.weight"]
    keys = torch.cat([latent, down[:, rank:]], dim=1)
    turn = exact.rotations(torch.arange(tokens), keys.shape[1], module.inv_freq, interleave=True, start=rank)
    query = (hidden @ p["q_proj.weight"].T).view(tokens, module.num_heads, -1).transpose(0, 1)
    up = p["kv_b_proj.weight"].view(module.num_heads, -1, rank)[:, :nope]
    return (turn @ keys[..., None])[..., 0], torch.cat([query[..., :nope] @ up, query[..., nope:]], dim=-1)


@pytest.mark.parametrize("policy", [Knorm(), StreamingLLM(), KeyDiff(), ExpectedAttention()], ids=repr)
def test_kept_latents_are_those_of_the_definition(policy: object) -> None:
    module, hidden, tokens, budget = small_module(), inputs(1, 48), 48, 16
    keys, queries = _latents(module, hidden[0])
    positions = torch.arange(tokens)
    scores = {
        Knorm: lambda: exact.knorm(keys),
        KeyDiff: lambda: exact.key_diff(keys),
        StreamingLLM: lambda: exact.streaming_llm(positions),
        ExpectedAttention: lambda: exact.expected_attention(
            keys,
            keys[:, : module.kv_lora_rank],
            positions,
            queries,
            positions,
            tokens,
            module.inv_freq,
            interleave=True,
            start=module.kv_lora_rank,
            scale=module.scale,
        ),
    }[type(policy)]()
    kept = exact.keep(scores, budget)
    for absorb in (False, True):
        cache = cache_for(module, policy, budget=budget)
        feed(module, cache, hidden, [tokens], absorb)
        assert cache.positions(0)[0, 0, :budget].tolist() == kept, f"absorb={absorb}"
        torch.testing.assert_close(cache.keys(0)[0, 0, :budget], keys[kept], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(cache.values(0)[0, 0, :budget], keys[kept][:, :20], rtol=1e-10, atol=1e-10)


def test_expected_attention_while_decoding_uses_the_window_of_absorbed_queries() -> None:
    module, hidden, budget = small_module(), inputs(1, 29), 20
    keys, queries = _latents(module, hidden[0])
    policy = ExpectedAttention(query_window=6)
    cache = cache_for(module, policy, budget=budget, interval=8)
    feed(module, cache, hidden, [1] * 29, absorb=None)
    keys, window = keys[:28], torch.arange(22, 28)
    scores = exact.expected_attention(
        keys,
        keys[:, : module.kv_lora_rank],
        torch.arange(28),
        queries[:, window],
        window,
        28,
        module.inv_freq,
        interleave=True,
        start=module.kv_lora_rank,
        scale=module.scale,
    )
    assert cache.positions(0)[0, 0, :budget].tolist() == exact.keep(scores, budget)


def test_eviction_attends_to_exactly_the_kept_latents() -> None:
    module, hidden = small_module(), inputs(1, 40)
    cache = cache_for(module, "key_diff", budget=10, interval=4)
    feed(module, cache, hidden[:, :39], [30, *[1] * 9], absorb=None)
    kept = cache.positions(0)[0, 0, : int(cache.lengths(0))].tolist()
    with torch.no_grad():
        out = module(hidden[:, 39:], cache=cache)
        chosen = torch.tensor([*kept, 39])
        expected = module(hidden[:, chosen], position_ids=chosen[None])[:, -1:]
    assert len(kept) < 39
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


def test_rerotated_streaming_is_always_absorbed() -> None:
    module, hidden = small_module(), inputs(1, 40)
    cache = cache_for(module, StreamingLLM(rerotate=True), budget=12)
    feed(module, cache, hidden, [20, 15, *[1] * 5], absorb=None)
    with pytest.raises(ValueError, match=r"absorb must be None or True with StreamingLLM.*got False"):
        module(hidden[:, :1], cache=cache, absorb=False)


def test_the_latent_is_stored_once() -> None:
    module = LowRankAttention(512, 8)
    cache = module.make_cache("knorm", 100, interval=28, dtype=torch.bfloat16)
    slots = 100 + 28
    assert cache.keys(0).shape == (1, 1, slots, 576)
    assert cache.values(0).data_ptr() == cache.keys(0).data_ptr()
    assert sum(b.numel() * b.element_size() for b in cache.layers[0].buffers()) <= slots * (2 * 576 + 4) + 64


# -- compiled, autocast, bad input -----------------------------------------------------------------------------------


@pytest.mark.compile
def test_decoding_with_eviction_compiles_once_as_one_graph() -> None:
    module = small_module(dtype=torch.float32)
    hidden = inputs(2, 40, dtype=torch.float32)
    eager, compiled_cache = (cache_for(module, "key_diff", budget=12, interval=4, batch_size=2) for _ in range(2))
    torch._dynamo.reset()
    step = torch.compile(module, fullgraph=True)
    with torch.no_grad():
        for cache in (eager, compiled_cache):
            module(hidden[:, :20], cache=cache)
        for index in range(20, 40):
            with torch._dynamo.config.patch(error_on_recompile=index > 20):
                actual = step(hidden[:, index : index + 1], cache=compiled_cache)
            expected = module(hidden[:, index : index + 1], cache=eager)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(compiled_cache.positions(0), eager.positions(0))


@pytest.mark.compile
def test_a_chunk_compiles_expanded_over_the_whole_cache() -> None:
    module = small_module(dtype=torch.float32)
    hidden = inputs(1, 40, dtype=torch.float32)
    torch._dynamo.reset()
    step = torch.compile(module, fullgraph=True, backend="aot_eager")
    cache = cache_for(module)
    with torch.no_grad():
        outs = [step(part, cache=cache, absorb=False) for part in hidden.split(20, dim=1)]
    torch.testing.assert_close(torch.cat(outs, 1), module(hidden).detach(), rtol=1e-4, atol=1e-5)


def test_autocast_decodes_over_a_bfloat16_cache() -> None:
    module = small_module(dtype=torch.float32)
    hidden = inputs(1, 20, dtype=torch.float32)
    cache = cache_for(module, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = feed(module, cache, hidden, [15, 1, 1, 3], absorb=None)
    cast = copy.deepcopy(module).to(torch.bfloat16)
    reference = double(module)(hidden.double())
    assert_within_budget(out, reference, plain(cast, hidden.to(torch.bfloat16), absorbed=True))


def test_calls_over_a_cache_that_do_not_fit_are_refused() -> None:
    module, hidden = small_module(dtype=torch.float32), inputs(2, 3, dtype=torch.float32)
    with torch.no_grad():
        other = LowRankAttention(**{**SMALL, "kv_lora_rank": 16}).make_cache("knorm", 8)
        with pytest.raises(ValueError, match=r"latent_rank 20, head_dim 26.*got latent_rank 16, head_dim 22"):
            module(hidden, cache=other)
        with pytest.raises(ValueError, match=r"latent_rank 20.*got latent_rank None"):
            module(hidden, cache=CompressedKVCache("knorm", 8, num_layers=1, num_kv_heads=1, head_dim=26))
        with pytest.raises(ValueError, match="cache's batch size 1, got 2"):
            module(hidden, cache=cache_for(module))
        with pytest.raises(ValueError, match=r"causal must be True with a cache.*got False"):
            module(hidden, cache=cache_for(module, batch_size=2), causal=False)
        with pytest.raises(TypeError, match=r"cache's dtype torch.float64, got torch.float32"):
            module(hidden, cache=cache_for(module, batch_size=2, dtype=torch.float64))
        with pytest.raises(ValueError, match=r"layer must be in 0..0, got 1"):
            module(hidden, cache=cache_for(module, batch_size=2), layer=1)
    cache = cache_for(module, batch_size=2)
    for absorb in (False, True):
        with pytest.raises(ValueError, match="no gradient"):
            module(hidden, cache=cache, absorb=absorb)
    assert int(cache.columns) == int(cache.lengths(0).sum()) == 0
