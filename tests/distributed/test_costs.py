"""The paper calculation sends what the code sends, counted at 2 and 4 processes."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from benchmarks import distributed_costs as costs
from fastattn.distributed import context_parallel, tensor_parallel_plan
from tests._helpers.collectives import Collectives
from tests._helpers.ranks import Ranks

pytest.importorskip("transformers", reason="transformers is not installed")

from fastattn.integrations.transformers import compressed_cache
from tests._helpers.hf_models import make_model, ragged_prompt
from tests.distributed.test_tensor_parallel import small

POLICIES = ("knorm", "key_diff", "expected_attention")
SHAPE = costs.Shape(
    layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab=100, bytes_per_number=4, context=400,
    kept=20, interval=4,
)  # fmt: skip


def count(tensor_ranks: int, context_ranks: int, policy: str) -> list[int]:
    """Bytes of every collective of four steps, of which one compresses."""
    mesh = init_device_mesh("cpu", (tensor_ranks, context_ranks), mesh_dim_names=("heads", "tokens"))
    model = make_model("llama")
    if tensor_ranks > 1:
        model = parallelize_module(copy.deepcopy(model), mesh["heads"], tensor_parallel_plan(model))
    cache = compressed_cache(model, small(policy), budget=SHAPE.kept, interval=SHAPE.interval, batch_size=1)
    if context_ranks > 1:
        context_parallel(cache, mesh["tokens"])
    with torch.no_grad():
        model(ragged_prompt()[0][:1], past_key_values=cache)
        for token in range(4):
            model(torch.tensor([[token]]), past_key_values=cache)
        with Collectives() as counted:
            for token in range(4):
                model(torch.tensor([[token]]), past_key_values=cache)
    return sorted(counted.sizes)


def check(layouts: list[tuple[int, int]]) -> list[list[int]]:
    return [count(tensor, context, policy) for tensor, context in layouts for policy in POLICIES]


def expected(tensor_ranks: int, context_ranks: int, policy: str) -> list[int]:
    shape = costs.replace(SHAPE, policy=policy)
    sizes = []
    if tensor_ranks > 1:
        sizes += [one.size for one in costs.tensor_collectives(shape, tensor_ranks)] * shape.layers * 4
        sizes += [costs.output_collective(shape, tensor_ranks).size] * 4
    if context_ranks > 1:
        for one in costs.context_collectives(shape, context_ranks, tensor_ranks):
            sizes += [one.size] * round(one.often * 4) * shape.layers
    return sorted(sizes)


def compare(ranks: Ranks, layouts: list[tuple[int, int]]) -> None:
    wanted = [expected(tensor, context, policy) for tensor, context in layouts for policy in POLICIES]
    for measured in ranks.run(check, layouts):
        assert measured == wanted


def test_counts_at_two_processes(two_ranks: Ranks) -> None:
    compare(two_ranks, [(2, 1), (1, 2)])


def test_counts_at_four_processes(four_ranks: Ranks) -> None:
    compare(four_ranks, [(2, 2), (1, 4)])


def test_weights_and_cache_of_the_shape_are_the_models() -> None:
    model = make_model("llama")
    norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    assert SHAPE.weights == sum(p.numel() for p in model.parameters()) - norms
    cache = compressed_cache(model, "knorm", budget=20, interval=4)
    keys = sum(2 * cache.kv.keys(layer).nbytes for layer in range(2))
    assert costs.cost(SHAPE, costs.Machine(), 1, 1).cache == keys


def test_a_larger_machine_is_faster_in_the_parts_that_it_should_be() -> None:
    shape, machine = costs.Shape(), costs.Machine()
    eight, many = costs.cost(shape, machine, 8, 1), costs.cost(shape, machine, 8, 8)
    assert many.reading < eight.reading / 2
    assert many.weights == eight.weights
    assert many.context > eight.context == 0
    assert costs.Collective("all_reduce", 8, 800).traffic == 1400
    assert costs.Collective("all_gather", 8, 100).traffic == 700


def test_the_command_prints_a_row_per_layout() -> None:
    command = [sys.executable, "-m", "benchmarks.distributed_costs", "--gpus", "16", "--kept", "131072"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "70.6 G weights; 4096 bytes per token and layer of cache" in printed
    assert [line.split("|")[2].strip() for line in printed.splitlines() if line.startswith("| 16")] == [
        "1 x 16", "2 x 8", "4 x 4", "8 x 2",
    ]  # fmt: skip
