"""Training with fully_shard (FSDP2), and distributed checkpoints read by another number of processes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint as recompute

from fastattn import LowRankAttention
from tests._helpers.ranks import Ranks
from tests.distributed.test_tensor_parallel import SIZES, mesh_of_all, spread, whole

ROWS, TOKENS, WIDTH = 4, 12, 48


class Model(nn.Module):
    """Two layers of low-rank attention with residuals, recomputed in the backward pass if asked."""

    def __init__(self, dtype: torch.dtype, recomputed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(
            LowRankAttention(WIDTH, 4, q_lora_rank=24, bias=True, **SIZES, dtype=dtype) for _ in range(2)
        )
        self.recomputed = recomputed
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            change = recompute(layer, hidden, use_reentrant=False) if self.recomputed else layer(hidden)
            hidden = hidden + change
        return hidden


def sharded(model: Model, **options: Any) -> Any:
    model = copy.deepcopy(model)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh_of_all(), **options)
    return fully_shard(model, mesh=mesh_of_all(), **options)


def batch(step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(ROWS, TOKENS, WIDTH, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))


def my_rows() -> slice:
    """This rank's rows of a batch."""
    each = ROWS // dist.get_world_size()
    return slice(dist.get_rank() * each, (dist.get_rank() + 1) * each)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range, dtype: torch.dtype, rows: slice) -> list[float]:
    losses = []
    for step in steps:
        hidden, target = batch(step, dtype)
        loss = (model(hidden[rows]).to(dtype) - target[rows]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def mean_over_ranks(losses: list[Tensor]) -> Tensor:
    stacked = torch.stack(losses)
    dist.all_reduce(stacked)
    return stacked / dist.get_world_size()


def check_training(dtype: torch.dtype, recomputed: bool) -> None:
    one = Model(dtype)
    many = sharded(Model(dtype, recomputed))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (one, many)]
    expected = torch.stack(train(one, optimizers[0], range(4), dtype, slice(None)))
    got = mean_over_ranks(train(many, optimizers[1], range(4), dtype, my_rows()))
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    assert (expected - got).abs().max() < tolerance
    assert expected[-1] < expected[0]
    if dtype == torch.float64:  # Adam divides by the gradient's size, which enlarges float32's rounding
        for (name, left), right in zip(one.named_parameters(), many.parameters(), strict=True):
            assert (left - whole(right)).abs().max() < 1e-9, name


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_training_is_that_of_one_process(two_ranks: Ranks, dtype: torch.dtype, recomputed: bool) -> None:
    two_ranks.run(check_training, dtype, recomputed)


def check_mixed_precision() -> None:
    """Weights in float32, computed with in bfloat16: within what bfloat16 costs one process under autocast."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    many = sharded(Model(torch.float32, recomputed=True), mp_policy=policy)
    exact, rounded = Model(torch.float64), Model(torch.float32)
    hidden, target = batch(0, torch.float64)
    exact_loss = (exact(hidden) - target).square().mean()
    exact_loss.backward()
    with torch.autocast("cpu", torch.bfloat16):
        rounded_out = rounded(hidden.float())
    (rounded_out.float() - target.float()).square().mean().backward()
    loss = (many(hidden[my_rows()].float()).float() - target[my_rows()].float()).square().mean()
    loss.backward()
    for (name, truth), plain, got in zip(
        exact.named_parameters(), rounded.parameters(), many.parameters(), strict=True
    ):
        gradient = whole(got.grad)
        assert gradient.dtype == got.dtype == torch.float32, name
        error, allowed = (gradient - truth.grad).norm(), (plain.grad - truth.grad).norm()
        assert error <= 2 * allowed + 2**-8 * truth.grad.norm(), name


def test_mixed_precision_and_recomputation_stay_within_bfloat16(two_ranks: Ranks) -> None:
    two_ranks.run(check_mixed_precision)


# -- checkpoints -----------------------------------------------------------------------------------------------------


def state_of(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def check_save(folder: str) -> list[float]:
    model = sharded(Model(torch.float64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(3), torch.float64, my_rows())
    checkpoint.save(state_of(model, optimizer), checkpoint_id=folder)
    return mean_over_ranks(train(model, optimizer, range(3, 6), torch.float64, my_rows())).tolist()


def resume(model: Any, folder: str) -> torch.optim.Optimizer:
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = state_of(model, optimizer)
    checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return optimizer


def check_load(folder: str) -> list[float]:
    model = sharded(Model(torch.float64))
    optimizer = resume(model, folder)
    return mean_over_ranks(train(model, optimizer, range(3, 6), torch.float64, my_rows())).tolist()


def check_load_spread(folder: str) -> None:
    """Weights that ``fully_shard`` wrote, read by a model whose heads are spread over ranks."""
    model = Model(torch.float64)
    spread_model = spread(model)
    state = {"model": spread_model.state_dict()}
    checkpoint.load(state, checkpoint_id=folder)
    spread_model.load_state_dict(state["model"])
    alone = {"model": model.state_dict()}
    checkpoint.load(alone, checkpoint_id=folder)
    model.load_state_dict(alone["model"])
    hidden = batch(9, torch.float64)[0]
    assert (model(hidden) - spread_model(hidden)).abs().max() < 1e-10


def test_a_checkpoint_of_two_ranks_is_read_by_one_and_by_four(
    two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path
) -> None:
    folder = str(tmp_path / "checkpoint")
    expected = torch.tensor(two_ranks.run(check_save, folder)[0], dtype=torch.float64)
    model = Model(torch.float64)
    optimizer = resume(model, folder)
    alone = torch.stack(train(model, optimizer, range(3, 6), torch.float64, slice(None)))
    assert (alone - expected).abs().max() < 1e-10
    for losses in four_ranks.run(check_load, folder):
        assert (torch.tensor(losses, dtype=torch.float64) - expected).abs().max() < 1e-10
    two_ranks.run(check_load_spread, folder)
