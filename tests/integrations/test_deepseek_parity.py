"""LowRankAttention holds the weights of transformers' DeepSeek attention and gives its outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastattn import LowRankAttention
from tests._helpers.draw import normal

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.transformers

HAS_V2_MSCALE = tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (5, 24)

SMALL = {
    "hidden_size": 48,
    "num_attention_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.707,
}


def _theirs(
    version: int, sizes: dict[str, Any], rope: dict[str, Any], q_lora_rank: int | None, bias: bool
) -> nn.Module:
    if version == 2:
        from transformers.models.deepseek_v2 import modeling_deepseek_v2 as modeling

        config_class, attention = transformers.DeepseekV2Config, modeling.DeepseekV2Attention
    else:
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

        config_class, attention = transformers.DeepseekV3Config, modeling.DeepseekV3Attention
    config = config_class(
        **sizes,
        num_key_value_heads=sizes["num_attention_heads"],
        q_lora_rank=q_lora_rank,
        attention_bias=bias,
        rope_parameters=rope,
        max_position_embeddings=4096,
    )
    config._attn_implementation = "eager"
    return attention(config, 0).eval()


def _randomize(module: nn.Module, spread: float = 0.3) -> None:
    with torch.no_grad():
        for index, (name, parameter) in enumerate(module.named_parameters()):
            values = normal(*parameter.shape, seed=index, scale=spread)
            parameter.copy_(1 + values if "layernorm" in name else values)


def _ours(
    sizes: dict[str, Any], rope: dict[str, Any], q_lora_rank: int | None, bias: bool, **more: Any
) -> LowRankAttention:
    sizes = dict(sizes)
    return LowRankAttention(
        sizes.pop("hidden_size"),
        sizes.pop("num_attention_heads"),
        **sizes,
        q_lora_rank=q_lora_rank,
        bias=bias,
        rope_theta=rope["rope_theta"],
        rope_scaling=rope if rope["rope_type"] != "default" else None,
        **more,
    ).eval()


def _run_theirs(version: int, attention: nn.Module, hidden: Tensor, tables: Any) -> Tensor:
    tokens = hidden.shape[1]
    mask = torch.full((tokens, tokens), float("-inf")).triu(1)[None, None]
    return attention(hidden_states=hidden, position_embeddings=tables, attention_mask=mask)[0]


def _our_tables(version: int, module: LowRankAttention, positions: Tensor) -> Any:
    angle = positions[..., None].float() * module.inv_freq
    factor = module.rotary.attention_factor
    if version == 2:
        return torch.polar(torch.ones_like(angle), angle) * factor
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos() * factor, angle.sin() * factor


def _their_tables(version: int, config: Any, positions: Tensor) -> Any:
    if version == 2:
        from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2RotaryEmbedding as Embedding
    else:
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding as Embedding
    return Embedding(config=config)(torch.zeros(1), positions)


def _relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("q_lora_rank", [None, 16], ids=["full-query", "low-rank-query"])
@pytest.mark.parametrize("rope", ["default", "yarn"])
@pytest.mark.parametrize("version", [2, 3])
def test_outputs_equal_at_near_and_far_positions(version: int, rope: str, q_lora_rank: int | None, bias: bool) -> None:
    parameters = {"rope_type": "default", "rope_theta": 10000.0} if rope == "default" else dict(YARN)
    if version == 2 and not HAS_V2_MSCALE:
        parameters.pop("mscale_all_dim", None)  # this release's V2 does not apply it to the softmax scale
    theirs = _theirs(version, SMALL, parameters, q_lora_rank, bias)
    _randomize(theirs)
    ours = _ours(SMALL, parameters, q_lora_rank, bias)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    hidden = normal(2, 11, 48, seed=7)
    near = torch.arange(11).expand(2, 11)
    far = near + torch.tensor([[3000], [120_000]])
    with torch.no_grad():
        expected = _run_theirs(version, theirs, hidden, _their_tables(version, theirs.config, near))
        assert _relative(ours(hidden, position_ids=near), expected) < 1e-5
        assert _relative(ours(hidden), expected) < 1e-5
        expected = _run_theirs(version, theirs, hidden, _our_tables(version, ours, far))
        assert _relative(ours(hidden, position_ids=far), expected) < 1e-5
        assert _relative(ours(hidden, position_ids=far, absorb=True), expected) < 1e-5


@pytest.mark.parametrize("version", [2, 3])
def test_frequencies_and_factors_equal(version: int) -> None:
    for rope in ({"rope_type": "default", "rope_theta": 5000.0}, dict(YARN), {**YARN, "mscale_all_dim": 0.0}):
        theirs = _theirs(version, SMALL, rope, None, False)
        ours = _ours(SMALL, rope, None, False)
        positions = torch.tensor([[0, 1, 63, 64, 4000]])
        actual, expected = _our_tables(version, ours, positions), _their_tables(version, theirs.config, positions)
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        if version == 3 or HAS_V2_MSCALE:
            assert ours.scale == pytest.approx(theirs.scaling, rel=1e-12)


@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_other_rope_types_have_the_frequencies_of_transformers(kind: str) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 8.0}
    if kind == "llama3":
        rope.update(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
    theirs, ours = _theirs(3, SMALL, rope, None, False), _ours(SMALL, rope, None, False)
    positions = torch.tensor([[0, 1, 64, 500]])
    for one, other in zip(_our_tables(3, ours, positions), _their_tables(3, theirs.config, positions), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_half_split_rotation_is_the_configs_rope_interleave() -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    theirs = _theirs(3, SMALL, rope, None, False)
    theirs.config.rope_interleave = False
    _randomize(theirs)
    halves, pairs = (_ours(SMALL, rope, None, False, rope_interleave=interleave) for interleave in (False, True))
    hidden, positions = normal(1, 9, 48, seed=3), torch.arange(9)[None]
    with torch.no_grad():
        expected = _run_theirs(3, theirs, hidden, _their_tables(3, theirs.config, positions))
        for module in (halves, pairs):
            module.load_state_dict(theirs.state_dict())
        assert _relative(halves(hidden), expected) < 1e-5
        assert _relative(pairs(hidden), expected) > 1e-3


def test_full_deepseek_v3_dims() -> None:
    sizes = {
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    rope = {**YARN, "original_max_position_embeddings": 4096, "mscale_all_dim": 1.0}
    with torch.device("meta"):
        theirs = _theirs(3, sizes, rope, 1536, False)
        ours = _ours(sizes, rope, 1536, False)
    weights = {
        name: torch.ones(value.shape) if "layernorm" in name else torch.empty(value.shape).uniform_(-0.03, 0.03)
        for name, value in theirs.state_dict().items()
    }
    theirs.load_state_dict(weights, strict=True, assign=True)
    ours.load_state_dict(weights, strict=True, assign=True)  # one copy of the weights in memory
    hidden, positions = normal(1, 5, 7168, seed=1), torch.arange(40_000, 40_005)[None]
    with torch.no_grad():
        expected = _run_theirs(3, theirs, hidden, _our_tables(3, ours, positions))
        assert _relative(ours(hidden, position_ids=positions), expected) < 1e-5
        assert _relative(ours(hidden, position_ids=positions, absorb=True), expected) < 1e-5
