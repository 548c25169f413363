"""Checkpoints with DeepSeek's and torchtitan's names load into LowRankAttention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastattn.convert.deepseek import from_deepseek_names
from tests._helpers.latent import inputs, small_module

ORIGINAL = {
    "q_proj": "wq",
    "q_a_proj": "wq_a",
    "q_a_layernorm": "q_norm",
    "q_b_proj": "wq_b",
    "kv_a_proj_with_mqa": "wkv_a",
    "kv_a_layernorm": "kv_norm",
    "kv_b_proj": "wkv_b",
    "o_proj": "wo",
}


def original_names(state: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    return {prefix + ".".join([ORIGINAL[name.split(".")[0]], *name.split(".")[1:]]): v for name, v in state.items()}


@pytest.mark.parametrize("q_lora_rank", [None, 9])
@pytest.mark.parametrize("prefix", ["", "layers.3.attn.", "model.layers.12.attention."])
def test_every_parameter_arrives(prefix: str, q_lora_rank: int | None) -> None:
    source, target = (small_module(seed, q_lora_rank=q_lora_rank, bias=True) for seed in (0, 77))
    state = original_names(source.state_dict(), prefix)
    assert not set(state) & set(source.state_dict())
    renamed = from_deepseek_names(state)
    target.load_state_dict({name.removeprefix(prefix): value for name, value in renamed.items()}, strict=True)
    assert torch.equal(target(inputs(1, 5)), source(inputs(1, 5)))


def test_other_parameters_and_other_attention_keep_their_names() -> None:
    latent = original_names(small_module().state_dict(), "layers.0.attention.")
    others = {
        "layers.1.attention.wq.weight": torch.zeros(1),  # a layer without latent attention
        "layers.1.attention.wo.weight": torch.zeros(1),
        "layers.0.moe.experts.w1": torch.zeros(1),
        "layers.0.wo.weight": torch.zeros(1),
        "norm.weight": torch.zeros(1),
        "step": 3,
    }
    renamed = from_deepseek_names({**others, **latent})
    assert others.items() <= renamed.items()
    assert len(renamed) == len(others) + len(latent)


def test_names_of_transformers_stay_and_nothing_is_copied() -> None:
    state = small_module().state_dict()
    assert from_deepseek_names(state) == state
    renamed = from_deepseek_names(original_names(state))
    assert all(renamed[name] is state[name] for name in state)


def test_what_can_not_be_loaded_is_refused() -> None:
    state = original_names(small_module().state_dict())
    with pytest.raises(ValueError, match=r"parameter of wkv_a or kv_a_proj_with_mqa, got \['wq.weight'\]"):
        from_deepseek_names({"wq.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"wkv_b.weight must be of a floating dtype.*got torch.float8_e4m3fn"):
        from_deepseek_names({**state, "wkv_b.weight": torch.zeros(2, 2).to(torch.float8_e4m3fn)})
    with pytest.raises(ValueError, match=r"unpacked .* got wkv_b.weight_scale_inv"):
        from_deepseek_names({**state, "wkv_b.weight_scale_inv": torch.ones(1)})
    with pytest.raises(ValueError, match=r"got two for o_proj.weight"):
        from_deepseek_names({**state, "o_proj.weight": torch.ones(1)})
