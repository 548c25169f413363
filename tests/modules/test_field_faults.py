"""Faults that users met, each by name: far positions, layers that read raw memory, mixed precision, shared caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastattn import CompressedKVCache, Knorm, LowRankAttention, Policy, Rotary, StreamingLLM
from tests._helpers import draw

STARTS = [0, 100_000, 1_000_000, 4_000_000]
INV_FREQ = 10000.0 ** -(torch.arange(8) / 8)


def make(policy: Policy | str = "knorm", budget: int = 12, **options: Any) -> CompressedKVCache:
    defaults = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 16, "interval": 4, "rotary": Rotary(INV_FREQ)}
    return CompressedKVCache(policy, budget, **{**defaults, **options})


def small(**options: Any) -> LowRankAttention:
    torch.manual_seed(0)
    sizes = {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
    return LowRankAttention(32, 4, **{**sizes, **options}).eval()


# -- far positions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", STARTS)
def test_rerotated_attention_far_from_the_start_is_that_at_the_start(start: int) -> None:
    outputs = []
    rotary = Rotary(INV_FREQ)
    raw = [draw.normal(1, heads, 40, 16, seed=heads) for heads in (4, 2)]
    for first in (0, start):
        cache, now = make(StreamingLLM(n_sink=0, rerotate=True)), 0
        positions = first + torch.arange(40)[None]
        query, key = (rotary.rotate(part, positions) for part in raw)
        for size in (20, 9, *[1] * 11):
            here = slice(now, now + size)
            new = query[:, :, here], key[:, :, here], raw[1][:, :, here]
            outputs.append(cache.attend(0, *new, position_ids=positions[:, here]))
            now += size
    half = len(outputs) // 2
    for at_start, far in zip(outputs[:half], outputs[half:], strict=True):
        torch.testing.assert_close(far, at_start, rtol=0, atol=2e-5)


@pytest.mark.parametrize("start", STARTS)
def test_the_mean_rotation_of_expected_attention_far_from_the_start(start: int) -> None:
    x = draw.normal(1, 2, 16)
    found = Rotary(INV_FREQ).average(x, torch.tensor([start]), 512)
    angle = (start + torch.arange(512, dtype=torch.float64))[:, None] * INV_FREQ.double()
    cos, sin = angle.cos().mean(0), angle.sin().mean(0)
    first, second = x.double().chunk(2, dim=-1)
    expected = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-5)


# -- layers that read raw memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"latent_norm": False}, {"q_lora_rank": 8}, {"q_lora_rank": 8, "latent_norm": False}]
)
@pytest.mark.parametrize("absorb", [True, False, None])
@pytest.mark.parametrize("cached", [True, False])
def test_every_layer_is_handed_contiguous_inputs(options: dict[str, Any], absorb: bool | None, cached: bool) -> None:
    module, seen = small(**options), set()

    def check(name: str) -> Any:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen.add(name)
            assert all(part.is_contiguous() for part in inputs), f"{name} was handed a view"

        return hook

    expected_layers = {name for name, layer in module.named_children() if name != "rotary"}
    for name, layer in module.named_children():
        layer.register_forward_pre_hook(check(name))
    cache = module.make_cache("knorm", 16, batch_size=2) if cached else None
    hidden = draw.normal(2, 32, 9).mT  # a view itself
    with torch.no_grad():
        for here in (slice(0, 6), slice(6, 7), slice(7, 9)):
            module(hidden[:, here], cache=cache, absorb=absorb)
    assert seen == expected_layers


# -- mixed precision -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made_inside", [True, False])
@pytest.mark.parametrize("absorb", [True, False])
def test_a_cache_of_either_side_of_autocast_keeps_its_dtype(made_inside: bool, absorb: bool) -> None:
    module = small()
    with torch.autocast("cpu", torch.bfloat16, enabled=made_inside):
        cache = module.make_cache("knorm", 16)
    assert cache.dtype == torch.float32
    hidden, plain = draw.normal(1, 12, 32), module.make_cache("knorm", 16)
    with torch.no_grad():
        for here in (slice(0, 8), slice(8, 9), slice(9, 12)):
            with torch.autocast("cpu", torch.bfloat16):
                found = module(hidden[:, here], cache=cache, absorb=absorb)
            expected = module(hidden[:, here], cache=plain, absorb=absorb)
            torch.testing.assert_close(found.float(), expected, rtol=0, atol=0.05 * float(expected.abs().max()))
    assert cache.dtype == torch.float32


def test_attend_casts_to_the_cache_under_autocast_and_names_dtype_elsewhere() -> None:
    cache, query, key = make(), draw.normal(1, 4, 3, 16), draw.normal(1, 2, 3, 16)
    with torch.autocast("cpu", torch.bfloat16):
        out = cache.attend(0, query.bfloat16(), key, key.bfloat16())
    assert out.dtype == cache.dtype == torch.float32
    assert torch.equal(cache.keys(0)[:, :, :3], key)
    with pytest.raises(TypeError, match=r"key must have the cache's dtype torch.float32, .* dtype=torch.bfloat16"):
        cache.attend(0, query, key.bfloat16(), key)


# -- one cache and several modules -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2])
def test_a_second_module_on_a_layer_of_another_is_refused(layers: int) -> None:
    first, second, hidden = small(), small(), draw.normal(1, 5, 32)
    cache = first.make_cache("knorm", 32, num_layers=layers)
    with torch.no_grad():
        hidden = first(hidden, cache=cache)
        with pytest.raises(ValueError, match=r"another LowRankAttention: .*make_cache\(num_layers=\.\.\.\).* layer="):
            second(hidden, cache=cache)
        if layers == 2:
            second(hidden, cache=cache, layer=1)
    assert cache.tokens_seen.tolist() == [5]
    cache.reset()
    if layers == 1:
        with torch.no_grad():
            second(hidden, cache=cache)


def test_a_call_without_a_new_token_says_what_to_pass() -> None:
    cache, empty = make(), draw.normal(1, 2, 0, 16)
    with pytest.raises(ValueError, match=r"at least one new token, got none: pass the tokens .* reset\(\)"):
        cache.attend(0, draw.normal(1, 4, 0, 16), empty, empty)


def test_a_cache_that_is_not_persistent_stays_out_of_the_models_checkpoint() -> None:
    def model(**options: Any) -> nn.Module:
        return nn.ModuleDict({"linear": nn.Linear(2, 2), "cache": make(num_heads=4, **options)})

    lasting, passing = model(), model(persistent=False)
    key = draw.normal(1, 2, 3, 16)
    passing["cache"].attend(0, draw.normal(1, 4, 3, 16), key, key)
    assert set(passing.state_dict()) == {"linear.weight", "linear.bias"}
    assert "cache.layers.0.keys" in lasting.state_dict()
    passing.load_state_dict(passing.state_dict())  # strict
    assert passing["cache"].tokens_seen.tolist() == [3]
    alone = passing["cache"].state_dict()
    assert "layers.0.keys" in alone
    other = make(num_heads=4, persistent=False)
    other.load_state_dict(alone)
    assert other.tokens_seen.tolist() == [3]
    assert not other.select(torch.tensor([0, 0])).persistent
    with pytest.raises(TypeError, match="persistent must be a bool, got int"):
        make(persistent=1)


# -- small things ----------------------------------------------------------------------------------------------------


def test_a_tokenizers_mask_of_integers_is_taken() -> None:
    query, key = draw.normal(2, 4, 5, 16), draw.normal(2, 2, 5, 16)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    one, other = make(batch_size=2), make(batch_size=2)
    found = one.attend(0, query, key, key, attention_mask=mask)
    assert torch.equal(found, other.attend(0, query, key, key, attention_mask=mask.bool()))
    module, hidden = small(), draw.normal(2, 5, 32)
    assert torch.equal(module(hidden, attention_mask=mask), module(hidden, attention_mask=mask.bool()))


def test_the_repr_of_a_cache_is_one_line() -> None:
    assert repr(make(num_layers=30)).count("\n") == 0
    assert "num_layers=30" in repr(make(num_layers=30))


def test_a_policy_may_be_a_module() -> None:
    class Learned(Policy, nn.Module):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.direction = nn.Parameter(torch.linspace(-1, 1, 16))
            self.sharpness = 2

        def score(self, state: Any) -> Tensor:
            return state.keys.float() @ self.direction.detach()

    assert repr(Learned()) == "Learned(sharpness=2)"
    cache, key = make(Learned()), draw.normal(1, 2, 30, 16)
    cache.attend(0, draw.normal(1, 4, 30, 16), key, key)
    best = (key @ torch.linspace(-1, 1, 16)).topk(12, dim=-1).indices.sort(dim=-1).values
    assert torch.equal(cache.positions(0)[:, :, :12].long(), best)


def test_a_cache_passed_to_generate_says_what_to_pass() -> None:
    with pytest.raises(AttributeError, match=r"is no transformers cache .*compressed_cache\(model, ...\) gives"):
        _ = make().is_compileable
    assert not hasattr(make(), "get_seq_length")


def test_the_definitions_are_there_without_an_import_of_their_own() -> None:
    from fastattn import ops

    out = ops.reference.attention(*(torch.ones(1, 1, 2, 4, dtype=torch.float64) for _ in range(3)))
    torch.testing.assert_close(out, torch.ones(1, 1, 2, 4, dtype=torch.float64))


def test_advice_needs_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastattn.advice import advise

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert advise(768, 12, 128).tflops > 0


@pytest.mark.parametrize("policy", [Knorm(), StreamingLLM(2)])
def test_what_a_small_call_appended_can_be_taken_back_over_an_eviction(policy: Policy) -> None:
    cache, key = make(policy, max_step=3), draw.normal(1, 2, 40, 16)
    for first in range(0, 39, 3):
        before = int(cache.tokens_seen)
        for back in (3, torch.tensor([2]), 0):
            cache.attend(0, draw.normal(1, 4, 3, 16), *[key[:, :, first : first + 3]] * 2)
            cache.crop(back)
            if not isinstance(back, int):
                cache.crop(1)
        assert int(cache.tokens_seen) == before + 3
    assert int(cache.lengths(0).max()) < 39
