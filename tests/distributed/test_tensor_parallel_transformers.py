"""Tensor-parallel transformers models over compressed caches: kept positions and tokens are one process's."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from fastattn.distributed import tensor_parallel_plan
from fastattn.modules import policy_names
from tests._helpers.collectives import Collectives
from tests._helpers.ranks import Ranks
from tests.distributed.test_tensor_parallel import mesh_of_all, small, spread, whole

pytest.importorskip("transformers", reason="transformers is not installed")

from fastattn.integrations.transformers import compressed_cache
from tests._helpers.hf_models import make_model, ragged_prompt

pytestmark = pytest.mark.transformers


def local_heads() -> slice:
    """The key/value heads of two that this rank holds."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    first = rank * 2 // ranks
    return slice(first, first + max(1, 2 // ranks))


def check_generation(family: str, names: list[str], beams: int) -> None:
    one = make_model(family).double()
    many = spread(one)
    ids, mask = ragged_prompt()
    for name in names:
        made = []
        for model in (one, many):
            cache = compressed_cache(model, small(name), budget=20, interval=4)
            tokens = model.generate(
                input_ids=ids,
                attention_mask=mask,
                past_key_values=cache,
                max_new_tokens=11,
                do_sample=False,
                num_beams=beams,
                use_cache=True,
            )
            made.append((tokens, cache))
        (expected, held), (got, held_here) = made
        assert torch.equal(expected, got), name
        for layer in range(2):
            assert held.kv.lengths(layer).max() <= 24
            assert torch.equal(held.kv.positions(layer)[:, local_heads()], held_here.kv.positions(layer)), name
            difference = held.kv.keys(layer)[:, local_heads()] - held_here.kv.keys(layer)
            valid = held_here.kv.positions(layer) >= 0
            assert difference[valid].abs().max() < 1e-10


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_generation_over_two_ranks_is_one_process(two_ranks: Ranks, family: str) -> None:
    names = policy_names() if family == "llama" else ["tova"]
    two_ranks.run(check_generation, family, names, 1)


def test_beams_over_two_ranks_are_one_process(two_ranks: Ranks) -> None:
    two_ranks.run(check_generation, "llama", ["snap_kv"], 2)


def test_ranks_that_outnumber_key_value_heads_share_them(four_ranks: Ranks) -> None:
    four_ranks.run(check_generation, "llama", ["expected_attention", "h2o", "tova", "random"], 1)


def check_training(family: str) -> None:
    one = make_model(family, attn_implementation="eager").double().train()
    many = spread(one)
    ids = ragged_prompt()[0][:1, 20:]
    for model in (one, many):
        model(ids, labels=ids).loss.backward()
    for (name, left), right in zip(one.named_parameters(), many.parameters(), strict=True):
        assert (left.grad - whole(right.grad)).abs().max() < 1e-10, name


def test_gradients_with_shared_key_value_heads_are_one_process(four_ranks: Ranks) -> None:
    four_ranks.run(check_training, "llama")


def test_gradients_of_norms_that_heads_share_are_one_process(two_ranks: Ranks) -> None:
    two_ranks.run(check_training, "qwen3")


def check_collectives() -> list[int]:
    model = spread(make_model("llama").double())
    cache = compressed_cache(model, "key_diff", budget=20, interval=4)
    with torch.no_grad():
        model(ragged_prompt()[0][:1], past_key_values=cache)
        with Collectives() as counted:
            for token in range(9):
                model(torch.tensor([[token]]), past_key_values=cache)
    return counted.sizes


def test_a_step_costs_one_collective_per_attention_and_mlp(two_ranks: Ranks) -> None:
    hidden, logits = 64 * 8, 100 * 8 // 2  # of two layers' attention and MLP; this rank's half, if the plan says so
    for sizes in two_ranks.run(check_collectives):
        assert sizes in ([hidden] * 36, ([hidden] * 4 + [logits]) * 9)


def check_plan_of_transformers() -> None:
    """A model that transformers itself has spread, as ``from_pretrained(tp_plan="auto")`` does (with accelerate)."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    one = make_model("llama").double()
    many = copy.deepcopy(one)
    names = [*dict(many.named_modules()), *dict(many.named_parameters())]
    plan = {}
    for name in names:  # parameters by the style of their module
        style = many.tp_plan.get(re.sub(r"\d+", "*", name.removesuffix(".weight")))
        if style is not None:
            plan[name] = style
    apply_tensor_parallelism(many, mesh_of_all(), plan)
    ids, mask = ragged_prompt()
    results = []
    for model in (one, many):
        for policy in ("key_diff", "tova"):
            cache = compressed_cache(model, policy, budget=20, interval=4)
            options: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False}
            tokens = model.generate(input_ids=ids, attention_mask=mask, past_key_values=cache, **options)
            results.append((tokens, cache.kv.positions(1)))
    for (tokens, positions), (tokens_here, positions_here) in zip(results[:2], results[2:], strict=True):
        assert torch.equal(tokens, tokens_here)
        assert positions_here.shape[1] == 1
        assert torch.equal(positions[:, local_heads()], positions_here)


def test_a_model_spread_by_transformers_is_served(two_ranks: Ranks) -> None:
    pytest.importorskip(
        "transformers.distributed.tensor_parallel", reason="this transformers spreads models without DTensors"
    )
    two_ranks.run(check_plan_of_transformers)


def check_refusals() -> list[str]:
    from torch.distributed.fsdp import fully_shard

    from tests.distributed.test_tensor_parallel import refusal

    mesh = mesh_of_all()
    sharded = fully_shard(make_model("llama"), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    fused, uneven = (
        make_model("phi3"),
        make_model("llama", hidden_size=96, num_attention_heads=6, num_key_value_heads=3),
    )
    return [
        refusal(lambda: compressed_cache(sharded, "knorm", budget=8)),
        refusal(lambda: tensor_parallel_plan(fused)),
        refusal(lambda: parallelize_module(copy.deepcopy(uneven), mesh, tensor_parallel_plan(uneven))),
    ]


def test_models_that_cannot_be_spread_by_heads_are_refused(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(check_refusals)
    assert first == second
    assert "sharded otherwise (fully_shard): call compressed_cache before sharding" in first[0]
    assert "found none in Phi3ForCausalLM" in first[1]
    assert "num_kv_heads must be a multiple or a divisor of the mesh's 2 ranks, got 3" in first[2]


# -- tokens over ranks -----------------------------------------------------------------------------------------------


def check_context_parallel(beams: int) -> None:
    from fastattn.distributed import context_parallel

    model = make_model("llama").double()
    ids, mask = ragged_prompt()
    for name in ("key_diff", "expected_attention"):
        made = []
        for spread_tokens in (False, True):
            cache = compressed_cache(model, small(name), budget=20, interval=4, batch_size=3 * beams)
            if spread_tokens:
                context_parallel(cache, mesh_of_all())
            tokens = model.generate(
                input_ids=ids, attention_mask=mask, past_key_values=cache, max_new_tokens=11, do_sample=False,
                num_beams=beams,
            )  # fmt: skip
            made.append((tokens, [cache.kv.positions(layer) for layer in range(2)]))
        (expected, kept), (got, kept_here) = made
        assert torch.equal(expected, got)
        for left, right in zip(kept, kept_here, strict=True):
            assert torch.equal(left, right)


@pytest.mark.parametrize("beams", [1, 2])
def test_generation_with_tokens_over_two_ranks_is_one_process(two_ranks: Ranks, beams: int) -> None:
    two_ranks.run(check_context_parallel, beams)


def check_both() -> None:
    """Heads over two ranks, and each rank's tokens over two more."""
    from fastattn.distributed import context_parallel

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("heads", "tokens"))
    one = make_model("llama").double()
    many = parallelize_module(copy.deepcopy(one), mesh["heads"], tensor_parallel_plan(one))
    ids, mask = ragged_prompt()
    made = []
    for model in (one, many):
        cache = compressed_cache(model, small("expected_attention"), budget=20, interval=4, batch_size=3)
        if model is many:
            context_parallel(cache, mesh["tokens"])
        tokens = model.generate(
            input_ids=ids, attention_mask=mask, past_key_values=cache, max_new_tokens=11, do_sample=False
        )
        made.append((tokens, cache.kv.positions(1)))
    head = mesh["heads"].get_local_rank()
    assert torch.equal(made[0][0], made[1][0])
    assert torch.equal(made[0][1][:, head : head + 1], made[1][1])


def test_heads_and_tokens_over_four_ranks(four_ranks: Ranks) -> None:
    four_ranks.run(check_both)
