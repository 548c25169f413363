"""LowRankAttention without a cache: what it computes, how it is made, saved, moved and trained."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastattn import LowRankAttention
from fastattn.modules.low_rank import INIT_STD
from tests._helpers.budget import assert_within_budget
from tests._helpers.latent import SMALL, defined, double, inputs, plain, small_module

YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}
PATHS = [False, True]


# -- what it computes ------------------------------------------------------------------------------------------------


@given(
    q_lora_rank=st.sampled_from([None, 9]),
    interleave=st.booleans(),
    yarn=st.booleans(),
    norm=st.booleans(),
    bias=st.booleans(),
    q_bias=st.booleans(),
    nope=st.sampled_from([0, 10]),
    causal=st.booleans(),
    absorb=st.booleans(),
    first=st.sampled_from([0, 500]),
    tokens=st.integers(1, 9),
)
@settings(max_examples=25)
def test_equals_the_definition(
    q_lora_rank: int | None,
    interleave: bool,
    yarn: bool,
    norm: bool,
    bias: bool,
    q_bias: bool,
    nope: int,
    causal: bool,
    absorb: bool,
    first: int,
    tokens: int,
) -> None:
    module = small_module(
        q_lora_rank=q_lora_rank,
        rope_interleave=interleave,
        rope_scaling=YARN if yarn else None,
        latent_norm=norm,
        bias=bias,
        q_bias=q_bias,
        qk_nope_head_dim=nope,
    )
    hidden = inputs(2, tokens)
    positions = torch.arange(first, first + tokens).expand(2, tokens)
    out = module(hidden, position_ids=positions, causal=causal, absorb=absorb)
    for row in range(2):
        expected = defined(module, hidden[row], positions[row].tolist(), causal)
        torch.testing.assert_close(out[row], expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("absorb", PATHS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing_even_if_it_is_nan(side: str, absorb: bool) -> None:
    module, hidden = small_module(), inputs(3, 12)
    real = [12, 7, 1]
    mask = torch.zeros(3, 12, dtype=torch.bool)
    for row, count in enumerate(real):
        mask[row, 12 - count :] = side == "left"
        mask[row, :count] |= side == "right"
    hidden = hidden.masked_fill(~mask[..., None], float("nan"))
    out = module(hidden, attention_mask=mask, absorb=absorb)
    for row, count in enumerate(real):
        alone = module(hidden[row][mask[row]][None], absorb=absorb)[0]
        torch.testing.assert_close(out[row][mask[row]], alone, rtol=1e-12, atol=1e-12)
        assert alone.shape[0] == count


def test_both_paths_agree_in_float32_and_bfloat16() -> None:
    module = small_module(dtype=torch.float32, q_lora_rank=9)
    hidden = inputs(2, 33, dtype=torch.float32)
    one, other = (module(hidden, absorb=absorb) for absorb in PATHS)
    assert (one - other).abs().max() < 1e-5 * one.abs().max()
    for dtype in (torch.float32, torch.bfloat16):
        cast = copy.deepcopy(module).to(dtype)
        exact = double(cast)(hidden.to(dtype).double())
        for absorb in PATHS:
            actual = cast(hidden.to(dtype), absorb=absorb)
            assert_within_budget(actual, exact, plain(cast, hidden.to(dtype), absorbed=absorb), f"absorb={absorb}")


def test_an_error_in_the_softmax_scale_shows_away_from_position_zero() -> None:
    with_scale = small_module(rope_scaling=YARN)
    without = small_module(rope_scaling={**YARN, "mscale_all_dim": 0.0, "attention_factor": 1.0})
    m = 0.1 * 0.5 * torch.tensor(8.0).log().item() + 1
    assert with_scale.scale == pytest.approx(16**-0.5 * m * m)
    assert without.scale == pytest.approx(16**-0.5)
    assert small_module(rope_scaling=YARN, softmax_scale=0.25).scale == 0.25
    hidden = inputs(1, 6)
    difference = (with_scale(hidden) - without(hidden)).abs().amax(-1)[0]
    assert difference[0] < 1e-12
    assert difference[-1] > 1e-3


def test_gradients_of_the_expanded_path() -> None:
    module = small_module(q_lora_rank=9, bias=True, q_bias=True, num_heads=2)
    names = [name for name, _ in module.named_parameters()]
    mask = torch.tensor([[False, True, True, True], [True, True, True, True]])

    def run(hidden: Tensor, *parameters: Tensor) -> Tensor:
        values = dict(zip(names, parameters, strict=True))
        out = torch.func.functional_call(module, values, (hidden,), {"attention_mask": mask})
        return out[mask]

    parameters = [p.detach().requires_grad_() for p in module.parameters()]
    assert torch.autograd.gradcheck(run, (inputs(2, 4).requires_grad_(), *parameters), fast_mode=True)


# -- made, saved, moved ----------------------------------------------------------------------------------------------


def test_parameter_names_and_shapes() -> None:
    full = {name: tuple(p.shape) for name, p in LowRankAttention(**SMALL).state_dict().items()}
    rest = {
        "kv_a_proj_with_mqa.weight": (20 + 6, 40),
        "kv_a_layernorm.weight": (20,),
        "kv_b_proj.weight": (3 * (10 + 7), 20),
        "o_proj.weight": (40, 3 * 7),
    }
    assert full == {"q_proj.weight": (3 * 16, 40), **rest}
    low = LowRankAttention(**SMALL, q_lora_rank=9, bias=True, q_bias=True)
    assert {name: tuple(p.shape) for name, p in low.state_dict().items()} == {
        "q_a_proj.weight": (9, 40),
        "q_a_proj.bias": (9,),
        "q_a_layernorm.weight": (9,),
        "q_b_proj.weight": (3 * 16, 9),
        "q_b_proj.bias": (3 * 16,),
        "kv_a_proj_with_mqa.bias": (20 + 6,),
        "o_proj.bias": (40,),
        **rest,
    }
    unnormed = LowRankAttention(**SMALL, q_lora_rank=9, latent_norm=False).state_dict()
    assert not [name for name in unnormed if "norm" in name]


def test_initialisation_is_deepseeks() -> None:
    torch.manual_seed(0)
    module = LowRankAttention(256, 8, q_lora_rank=64, kv_lora_rank=128, bias=True)
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            assert parameter.detach().std() == pytest.approx(INIT_STD, rel=0.05), name


def test_the_repr_tells_every_dim() -> None:
    text = LowRankAttention(**SMALL, q_lora_rank=9).extra_repr()
    for name, value in {**SMALL, "q_lora_rank": 9}.items():
        assert f"{name}={value}" in text


@pytest.mark.parametrize("given", [False, True], ids=["computed", "given"])
def test_construction_on_the_meta_device_loses_no_frequency(given: bool) -> None:
    table = {"inv_freq": torch.tensor([0.9, 0.4, 0.01])} if given else {}
    source = LowRankAttention(**SMALL, **table)
    hidden = inputs(1, 5, dtype=torch.float32)

    emptied = LowRankAttention(**SMALL, **table, device="meta").to_empty(device="cpu")
    emptied.load_state_dict(source.state_dict())
    assigned = LowRankAttention(**SMALL, **table, device="meta")
    assigned.load_state_dict(source.state_dict(), assign=True)
    with torch.device("meta"):
        under_context = LowRankAttention(**SMALL, **table)
    under_context.to_empty(device="cpu").load_state_dict(source.state_dict())
    there_and_back = copy.deepcopy(source).to("meta").to_empty(device="cpu")
    there_and_back.load_state_dict(source.state_dict())
    for module in (emptied, assigned, under_context, there_and_back):
        assert module.inv_freq is module.rotary.inv_freq
        torch.testing.assert_close(module(hidden), source(hidden), rtol=0, atol=0)


def test_reset_parameters_after_to_empty_makes_a_fresh_module() -> None:
    module = LowRankAttention(**SMALL, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(float("nan"))
    for each in module.modules():  # as FSDP does it, every module by itself
        if hasattr(each, "reset_parameters"):
            each.reset_parameters()
    assert module.q_proj.weight.detach().std() == pytest.approx(INIT_STD, rel=0.1)
    assert module(inputs(1, 3, dtype=torch.float32)).isfinite().all()


def test_a_given_frequency_table_is_saved_in_float32_and_a_computed_one_is_not() -> None:
    table = torch.tensor([0.9, 0.123456789, 1e-5])
    module = LowRankAttention(**SMALL, inv_freq=table).to(torch.bfloat16)
    saved = module.state_dict()["inv_freq"]
    assert saved.dtype == torch.float32
    assert torch.equal(saved, table)
    other = LowRankAttention(**SMALL, inv_freq=torch.ones(3))
    for assign in (False, True):
        other.load_state_dict(module.float().state_dict(), assign=assign)
        assert torch.equal(other.rotary.inv_freq, table)
    computed = LowRankAttention(**SMALL).to(torch.bfloat16)
    assert computed.inv_freq.dtype == torch.float32
    assert set(computed.state_dict()) == {name for name, _ in computed.named_parameters()}


def test_a_frequency_table_put_there_by_its_name_is_rotated_with() -> None:
    """Loaders set tensors one by one: by attribute (transformers) or in the dict of buffers (accelerate)."""
    table, hidden = torch.tensor([0.9, 0.2, 0.05]), inputs(1, 5)
    expected = small_module(inv_freq=table)(hidden)
    by_attribute, in_dict = (small_module(inv_freq=torch.ones(3)) for _ in range(2))
    by_attribute.inv_freq = table.clone()
    in_dict._buffers["inv_freq"] = table.clone()
    for module in (by_attribute, in_dict):
        rotary = module.make_cache("knorm", 8).rotary
        assert rotary is not None
        assert torch.equal(rotary.inv_freq, table)
        assert torch.equal(module(hidden), expected)


def test_a_loader_that_empties_what_it_does_not_load_takes_no_computed_frequency() -> None:
    module, hidden = small_module(), inputs(1, 5)
    expected = module(hidden)
    for each in module.modules():
        for name in each._non_persistent_buffers_set:
            setattr(each, name, torch.full_like(getattr(each, name), float("nan")))
    rotary = module.make_cache("knorm", 8).rotary
    assert rotary is not None
    assert rotary.inv_freq.isfinite().all()
    assert torch.equal(module(hidden), expected)


def test_copies_and_pickles() -> None:
    module, hidden = small_module(), inputs(1, 4)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert copied.inv_freq is copied.rotary.inv_freq
        assert torch.equal(copied(hidden), module(hidden))


def test_parametrized_weights_are_used() -> None:
    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    module, hidden = small_module(), inputs(1, 5)
    for name in ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"):
        nn.utils.parametrize.register_parametrization(getattr(module, name), "weight", Doubled())
    plainly = small_module()
    with torch.no_grad():
        for name in ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"):
            getattr(plainly, name).weight.mul_(2)
    for absorb in PATHS:
        torch.testing.assert_close(module(hidden, absorb=absorb), plainly(hidden), rtol=1e-11, atol=1e-11)


# -- trained ---------------------------------------------------------------------------------------------------------


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    module, hidden = small_module(), inputs(2, 6).requires_grad_()
    grads = []
    for run in (module, lambda x: checkpoint(module, x, use_reentrant=False)):
        run(hidden).pow(2).sum().backward()
        grads.append([hidden.grad, *[p.grad for p in module.parameters()]])
        hidden.grad = None
        module.zero_grad()
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


def test_two_forwards_before_one_backward() -> None:
    module = small_module()
    first, second = inputs(1, 5, seed=1), inputs(1, 8, seed=2)
    (module(first).sum() + module(second).sum()).backward()
    together = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    for hidden in (first, second):
        module(hidden).sum().backward()
    for one, parameter in zip(together, module.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad)


@pytest.mark.parametrize("absorb", PATHS)
def test_autocast_computes_in_bfloat16_and_keeps_norms_and_tables(absorb: bool) -> None:
    module = small_module(dtype=torch.float32, q_lora_rank=9)
    hidden = inputs(1, 17, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(hidden, absorb=absorb)
    assert out.dtype == torch.bfloat16
    exact = double(module)(hidden.double())
    cast = copy.deepcopy(module).to(torch.bfloat16)
    assert_within_budget(out, exact, plain(cast, hidden.to(torch.bfloat16), absorbed=absorb))
    assert module.kv_a_layernorm.weight.dtype == module.inv_freq.dtype == torch.float32


@pytest.mark.compile
def test_compiles_as_one_graph_forward_and_backward() -> None:
    module = small_module(dtype=torch.float32, q_lora_rank=9)
    compiled = torch.compile(copy.deepcopy(module), fullgraph=True, backend="aot_eager")
    hidden, mask = inputs(2, 9, dtype=torch.float32), torch.ones(2, 9, dtype=torch.bool)
    mask[1, :4] = False
    for run in (module, compiled):
        run(hidden, attention_mask=mask)[mask].pow(2).sum().backward()
    copied = dict(compiled._orig_mod.named_parameters())
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(copied[name].grad, parameter.grad, rtol=1e-4, atol=1e-4)


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even.* got 7"),
        ({"qk_rope_head_dim": 0}, "qk_rope_head_dim must be at least 2, got 0"),
        ({"kv_lora_rank": 81}, r"kv_lora_rank must be at most 2 \* hidden_size = 80, got 81"),
        ({"q_lora_rank": 100}, r"q_lora_rank must be at most 2 \* hidden_size = 80, got 100"),
        ({"q_lora_rank": 0}, "q_lora_rank must be at least 1, got 0"),
        ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"qk_nope_head_dim": -1}, "qk_nope_head_dim must be at least 0, got -1"),
        ({"inv_freq": torch.ones(4)}, r"inv_freq must have shape \[3\] for qk_rope_head_dim 6, got \[4\]"),
        ({"inv_freq": torch.ones(3), "rope_scaling": YARN}, "rope_scaling must be None where inv_freq"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "fixed frequencies.*got 'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' must have factor"),
        ({"rope_theta": 0.0}, "rope_theta must be positive and finite, got 0.0"),
        ({"rope_theta": float("nan")}, "rope_theta must be positive and finite, got nan"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "facotr": 1}}, "unknown keys \\['facotr'\\]"),
        ({"softmax_scale": float("nan")}, "scale must be finite, got nan"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LowRankAttention(**{**SMALL, **wrong})


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_heads": 2.0},
        {"kv_lora_rank": "20"},
        {"inv_freq": [0.1, 0.2, 0.3]},
        {"rope_theta": "1e4"},
        {"rope_scaling": "yarn"},
    ],
)
def test_types_that_do_not_fit_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(wrong))):
        LowRankAttention(**{**SMALL, **wrong})


def test_calls_that_do_not_fit_are_refused() -> None:
    module, hidden = LowRankAttention(**SMALL), inputs(2, 5, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"size 40 in dim 2.*got \[2, 5, 39\]"):
        module(hidden[..., 1:])
    with pytest.raises(TypeError, match=r"weights' dtype torch.float32, got torch.float64"):
        module(hidden.double())
    with pytest.raises(ValueError, match=r"position_ids must have the shape .*\[2, 5\], got \[2, 4\]"):
        module(hidden, position_ids=torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"position_ids must be an integer tensor, got torch.float32"):
        module(hidden, position_ids=torch.zeros(2, 5))
    with pytest.raises(ValueError, match=r"attention_mask must have the shape .*\[2, 5\], got \[1, 5\]"):
        module(hidden, attention_mask=torch.ones(1, 5, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"attention_mask must be bool .*, got torch.float32"):
        module(hidden, attention_mask=torch.ones(2, 5))
    holes = torch.tensor([[True] * 5, [True, False, True, True, True]])
    with pytest.raises(ValueError, match=r"one contiguous stretch of every row, got 2 stretches in row 1"):
        module(hidden, attention_mask=holes)
    with pytest.raises(TypeError, match=r"cache must be a CompressedKVCache .*, got list"):
        module(hidden, cache=[])
    with pytest.raises(ValueError, match="at least one token"):
        module(hidden[:, :0])
    with pytest.raises(TypeError, match=r"cache must be a CompressedKVCache .*, got str"):
        module(hidden, cache="knorm")
    with pytest.raises(TypeError, match="absorb must be a bool or None, got str"):
        module(hidden, absorb="yes")
