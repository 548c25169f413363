"""Absorbed weights of LowRankAttention follow whatever changes or wraps the up-projection."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fastattn import LowRankAttention
from fastattn.modules.low_rank.absorption import is_plain_linear
from tests._helpers.latent import inputs, small_module
from tests.modules.test_low_rank_cache import cache_for, feed


def _load(module: LowRankAttention) -> LowRankAttention:
    module.load_state_dict({name: value * 1.5 for name, value in module.state_dict().items()})
    return module


def _load_by_assignment(module: LowRankAttention) -> LowRankAttention:
    module.load_state_dict({name: value * 1.5 for name, value in module.state_dict().items()}, assign=True)
    return module


def _optimizer_step(module: LowRankAttention) -> LowRankAttention:
    module(inputs(1, 5)).sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.5).step()
    return module


def _edit_in_place(module: LowRankAttention) -> LowRankAttention:
    with torch.no_grad():
        module.kv_b_proj.weight.mul_(1.5)
    return module


def _edit_data(module: LowRankAttention) -> LowRankAttention:
    module.kv_b_proj.weight.data = module.kv_b_proj.weight.data * 1.5
    return module


def _copy_and_edit(module: LowRankAttention) -> LowRankAttention:
    copied = copy.deepcopy(module)
    _edit_in_place(module)  # the original's weights are not the copy's
    with torch.no_grad():
        copied.kv_b_proj.weight.add_(0.1)
    return copied


@pytest.mark.parametrize(
    "change", [_load, _load_by_assignment, _optimizer_step, _edit_in_place, _edit_data, _copy_and_edit]
)
def test_absorbed_weights_are_never_stale(change: Callable[[LowRankAttention], LowRankAttention]) -> None:
    module, hidden = small_module(), inputs(1, 8)
    before = feed(module, cache_for(module), hidden, [5, 1, 1, 1], absorb=True)
    changed = change(module)
    after = feed(changed, cache_for(changed), hidden, [5, 1, 1, 1], absorb=True)
    torch.testing.assert_close(after, changed(hidden).detach(), rtol=1e-10, atol=1e-10)
    assert (after - before).abs().max() > 1e-3
    assert set(changed.state_dict()) == {name for name, _ in changed.named_parameters()}


def test_absorbed_weights_follow_a_change_of_dtype() -> None:
    module, hidden = small_module(), inputs(1, 8)
    feed(module, cache_for(module), hidden, [8], absorb=True)
    module.to(torch.float32)
    out = feed(module, cache_for(module), hidden.float(), [5, 1, 1, 1], absorb=True)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, module(hidden.float()).detach(), rtol=1e-4, atol=1e-5)


class _Adapted(nn.Module):
    """A low-rank adapter around a linear layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.down = nn.Parameter(torch.full((2, base.in_features), 0.1, dtype=torch.float64))
        self.up = nn.Parameter(torch.linspace(-1, 1, 2 * base.out_features, dtype=torch.float64).view(-1, 2))

    @property
    def weight(self) -> Tensor:  # what adapters expose, without their own part
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + x @ self.down.T @ self.up.T


class _Packed(nn.Linear):
    """A linear layer whose weight means nothing by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * 3)


def _with_adapter(module: LowRankAttention) -> None:
    module.kv_b_proj = _Adapted(module.kv_b_proj)


def _with_other_forward(module: LowRankAttention) -> None:
    packed = _Packed(20, module.kv_b_proj.out_features, bias=False, dtype=torch.float64)
    packed.load_state_dict(module.kv_b_proj.state_dict())
    module.kv_b_proj = packed


def _with_hook(module: LowRankAttention) -> None:
    module.kv_b_proj.register_forward_hook(lambda layer, args, out: out * 2)


def _with_replaced_forward(module: LowRankAttention) -> None:  # how offloading wraps a layer
    original = module.kv_b_proj.forward
    module.kv_b_proj.forward = lambda x: original(x) * 2


@pytest.mark.parametrize("wrap", [_with_adapter, _with_other_forward, _with_hook, _with_replaced_forward])
def test_what_wraps_the_up_projection_is_not_bypassed(wrap: Callable[[LowRankAttention], None]) -> None:
    module, hidden = small_module(), inputs(1, 8)
    bare = module(hidden).detach()
    wrap(module)
    assert not is_plain_linear(module.kv_b_proj)
    out = feed(module, cache_for(module), hidden, [5, 1, 1, 1], absorb=True)
    torch.testing.assert_close(out, module(hidden).detach(), rtol=1e-9, atol=1e-9)
    assert (out - bare).abs().max() > 1e-3


def test_an_up_projection_with_a_bias_is_not_absorbed_without_it() -> None:
    module, hidden = small_module(), inputs(1, 4)
    module.kv_b_proj = nn.Linear(module.kv_lora_rank, 3 * 17, dtype=torch.float64)  # type: ignore[assignment]
    module(hidden)  # expanded
    cache = module.make_cache("knorm", 8)
    with torch.no_grad(), pytest.raises(ValueError, match="kv_b_proj must have no bias"):
        module(hidden, cache=cache)
    assert cache.tokens_seen.tolist() == [0]


def test_plain_and_parametrized_projections_are_read_directly() -> None:
    module = small_module()
    assert is_plain_linear(module.kv_b_proj)
    nn.utils.parametrizations.orthogonal(module.kv_b_proj)
    assert is_plain_linear(module.kv_b_proj)
