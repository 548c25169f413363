"""Tensor parallelism: outputs, gradients and kept tokens of a group of processes are one process's."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from fastattn import ExpectedAttention, LowRankAttention, Policy, Protect, SnapKV
from fastattn.distributed import HeadShard, tensor_parallel_plan
from fastattn.modules import policy_names
from fastattn.modules.policies import resolve_policy
from tests._helpers.collectives import Collectives
from tests._helpers.ranks import Ranks

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
SIZES = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}


def mesh_of_all() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def low_rank(dtype: torch.dtype = torch.float64, **options: Any) -> LowRankAttention:
    torch.manual_seed(3)
    module = LowRankAttention(48, 4, **SIZES, **options, dtype=dtype)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def spread(module: Any) -> Any:
    return parallelize_module(copy.deepcopy(module), mesh_of_all(), tensor_parallel_plan(module))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def small(name: str) -> Policy:
    """The policy of that name, with windows that fit small budgets."""
    if name == "expected_attention":
        return ExpectedAttention(query_window=6)
    return SnapKV(window=4, kernel=3) if name == "snap_kv" else resolve_policy(name)


# -- low-rank attention ----------------------------------------------------------------------------------------------


def check_gradients(dtype: torch.dtype, absorb: bool, options: dict[str, Any]) -> None:
    one = low_rank(dtype, **options)
    many = spread(one)
    hidden = torch.randn(2, 9, 48, dtype=dtype, requires_grad=True)
    same = hidden.detach().clone().requires_grad_()
    mask = torch.arange(9) >= torch.tensor([[0], [4]])
    expected, got = (module(x, absorb=absorb, attention_mask=mask) for module, x in ((one, hidden), (many, same)))
    expected, got = expected[mask], got[mask]
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    (got * weight).sum().backward()
    pairs = {"output": (expected, got), "hidden": (hidden.grad, same.grad)}
    for (name, left), right in zip(one.named_parameters(), many.parameters(), strict=True):
        assert left.shape == right.shape, name
        pairs[name] = (left.grad, whole(right.grad))
    for name, (left, right) in pairs.items():
        scale = max(1.0, left.abs().max().item())
        assert (left - right).abs().max().item() < TOLERANCE[dtype] * scale, name


@pytest.mark.parametrize("absorb", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_low_rank_attention_has_the_outputs_and_gradients_of_one_process(
    two_ranks: Ranks, dtype: torch.dtype, absorb: bool
) -> None:
    two_ranks.run(check_gradients, dtype, absorb, {"q_lora_rank": 24, "bias": True, "q_bias": True})
    two_ranks.run(check_gradients, dtype, absorb, {"latent_norm": False})


def check_latent_cache(name: str, steps: list[int]) -> None:
    one = low_rank(q_lora_rank=24)
    many = spread(one)
    caches = [m.make_cache(small(name), 12, interval=3, batch_size=2, num_layers=1) for m in (one, many)]
    columns = torch.arange(20) >= torch.tensor([[0], [5]])
    with torch.no_grad():
        for tokens in steps:
            hidden = torch.randn(2, tokens, 48, dtype=torch.float64)
            mask = columns if tokens == 20 else None
            expected, got = (m(hidden, cache=c, attention_mask=mask) for m, c in zip((one, many), caches, strict=True))
            if mask is not None:
                expected, got = expected[mask], got[mask]
            assert (expected - got).abs().max() < 1e-10
            assert torch.equal(caches[0].positions(0), caches[1].positions(0))
    assert caches[1].lengths(0).max() <= 15
    assert caches[0].tokens_seen.tolist() == [sum(steps), sum(steps) - 5]


@pytest.mark.parametrize("name", policy_names())
def test_a_latent_cache_keeps_the_tokens_of_one_process(two_ranks: Ranks, name: str) -> None:
    two_ranks.run(check_latent_cache, name, [20, 1, 1, 1, 1, 1, 7, 1])


def check_collectives() -> list[list[int]]:
    module = spread(low_rank())
    cache = module.make_cache("key_diff", 12, interval=3)
    averaging = module.make_cache("tova", 12, interval=3)
    found = []
    with torch.no_grad():
        for held in (cache, averaging):
            module(torch.randn(1, 14, 48, dtype=torch.float64), cache=held)
            with Collectives() as counted:
                for _ in range(7):
                    module(torch.randn(1, 1, 48, dtype=torch.float64), cache=held)
            assert set(counted.names) == {"all_reduce"}, counted.names
            found.append(counted.sizes)
    return found


def test_a_step_costs_one_collective_and_a_compression_one_more_where_heads_are_averaged(two_ranks: Ranks) -> None:
    hidden, scores = 48 * 8, 15 * 8  # bytes: a float64 per dim, and per slot of the cache
    step, compressing = [hidden], [scores, hidden]
    averaged = [step, step, step, compressing, step, step, compressing]  # 12 tokens to begin with, 15 are compressed
    for plain, averaging in two_ranks.run(check_collectives):
        assert plain == [hidden] * 7
        assert averaging == [size for sizes in averaged for size in sizes]


def check_weights_are_taken_as_they_are() -> None:
    """Absorbing does not ask the spread projection for its image of the unit vectors."""
    module = spread(low_rank())
    calls: list[tuple[int, ...]] = []
    with torch.no_grad():
        cache = module.make_cache("knorm", 8, interval=4)
        module(torch.randn(1, 2, 48, dtype=torch.float64), cache=cache)
        hook = module.kv_b_proj.register_forward_pre_hook(lambda _, args: calls.append(args[0].shape))
        before = module(torch.ones(1, 1, 48, dtype=torch.float64), cache=cache)
        assert calls == [(16, 16)]  # somebody else's hook is honored
        hook.remove()
        cache.crop(1)
        after = module(torch.ones(1, 1, 48, dtype=torch.float64), cache=cache)
    assert calls == [(16, 16)]
    assert (before - after).abs().max() < 1e-12


def test_absorbing_takes_the_ranks_rows_of_the_weight(two_ranks: Ranks) -> None:
    two_ranks.run(check_weights_are_taken_as_they_are)


# -- refusals --------------------------------------------------------------------------------------------------------


def refusal(call: Any) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def check_refusals() -> list[str]:
    rank, ranks, mesh = dist.get_rank(), dist.get_world_size(), mesh_of_all()
    odd = LowRankAttention(48, 3, **SIZES)
    differing = LowRankAttention(48, 4 if rank else 8, **SIZES)
    two_dims = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("a", "b"))
    once = spread(low_rank())
    own = type("Own", (Policy,), {"score": lambda self, state: state.positions.float()})()
    whole = odd.kv_b_proj.weight
    messages = [
        refusal(lambda: parallelize_module(odd, mesh, tensor_parallel_plan(odd))),
        refusal(lambda: parallelize_module(differing, mesh, tensor_parallel_plan(differing))),
        refusal(lambda: parallelize_module(odd, two_dims, tensor_parallel_plan(odd))),
        refusal(lambda: parallelize_module(once, mesh, tensor_parallel_plan(once))),
        refusal(lambda: once.make_cache(Protect(own), 8)),
        refusal(lambda: HeadShard(mesh, 4, 3)),
        refusal(lambda: tensor_parallel_plan(nn.Linear(2, 2))),
    ]
    assert odd.kv_b_proj.weight is whole  # nothing was spread
    assert odd.num_heads == 3
    own.depends_on = "tokens"
    once.make_cache(Protect(own), 8)
    return messages


def test_what_does_not_fit_is_refused_on_every_rank(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(check_refusals)
    assert first == second
    for message, expected in zip(
        first,
        [
            "num_heads must be a multiple of the mesh's 2 ranks, got 3",
            "heads and weights must be the same on every rank of the mesh, got rank 0: \\(8",
            "device_mesh must have one dim, got 2",
            "must not be spread over ranks yet",
            "policy must say what its scores depend on",
            "num_kv_heads must be a multiple or a divisor of the mesh's 2 ranks, got 3",
            "model must have attention that can be spread",
        ],
        strict=True,
    ):
        assert re.search(expected, message), message
