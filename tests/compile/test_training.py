"""Compiled training of LowRankAttention gives eager's gradients, with checkpointing and autocast inside."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastattn import LowRankAttention
from tests._helpers.compiling import counting

pytestmark = pytest.mark.compile


class Block(nn.Module):
    """Attention with a residual, as a model would train it."""

    def __init__(self, q_lora_rank: int | None, checkpointed: bool, autocast: bool) -> None:
        super().__init__()
        self.attention = LowRankAttention(
            48, 4, kv_lora_rank=24, q_lora_rank=q_lora_rank, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12
        )
        self.checkpointed, self.autocast = checkpointed, autocast

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            attend = functools.partial(checkpoint, self.attention, use_reentrant=False)
            out = attend(x) if self.checkpointed else self.attention(x)
        return x + out


def gradients(block: nn.Module, run, x: Tensor) -> dict[str, Tensor]:
    block.zero_grad()
    run(x).square().mean().backward()
    return {name: parameter.grad.clone() for name, parameter in block.named_parameters()}


@pytest.mark.parametrize(
    ("q_lora_rank", "checkpointed", "autocast"),
    [(None, False, False), (20, True, False), (20, False, True)],
    ids=["full-rank", "checkpointed", "autocast"],
)
def test_gradients_equal_eager(q_lora_rank, checkpointed, autocast):
    torch.manual_seed(0)
    eager = Block(q_lora_rank, checkpointed, autocast)
    compiled = copy.deepcopy(eager)
    x = torch.randn(2, 33, 48)
    with counting() as counts:
        run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
        got, expected = gradients(compiled, run, x), gradients(eager, eager, x)
        assert counts.read().graphs == 1
    assert counts.breaks == 0
    for name, value in expected.items():
        tolerance = 2e-2 if autocast else 1e-5
        scale = float(value.abs().max())
        assert scale > 0, name
        torch.testing.assert_close(
            got[name], value, rtol=0, atol=tolerance * scale, msg=lambda text, n=name: f"{n}: {text}"
        )
