"""Operators over DTensors: results are those of whole tensors, without a collective, or a refusal says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import fastattn.distributed.strategies
from fastattn import ops
from tests._helpers.ranks import Ranks

B, H, HKV, T, C, D = 4, 8, 4, 6, 8, 4
WHOLE = Replicate()


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def inputs() -> dict[str, Tensor]:
    """One tensor per name, the same on every rank."""
    torch.manual_seed(5)
    lengths = torch.randint(T, C + 1, (B, HKV), dtype=torch.int32)
    slots = torch.arange(C, dtype=torch.int32)
    return {
        "query": normal(B, H, T, D),
        "key": normal(B, HKV, C, D),
        "value": normal(B, HKV, C, 3),
        "shared": normal(B, 1, C, D),
        "start": torch.randint(0, 3, (B,), dtype=torch.int32),
        "end": torch.randint(5, C + 1, (B,), dtype=torch.int32),
        "lengths": lengths,
        "row_lengths": lengths[:, 0].clone(),
        "shared_lengths": lengths[:, :1].clone(),
        "positions": torch.where(slots < lengths[..., None], slots, -1).to(torch.int32),
        "latent": normal(B, C, D + 2),
        "rope": normal(B, H, T, 2),
        "sinks": normal(H),
        "slopes": normal(H).abs(),
        "mean": normal(B, H, D),
        "cov": torch.eye(D, dtype=torch.float64).expand(B, H, D, D).clone(),
        "valid": torch.arange(T).expand(B, T) >= torch.tensor([0, 1, 2, 3])[:, None],
        "at": torch.arange(C - T, C, dtype=torch.int32).expand(B, T).clone(),
        "out": normal(B, H, T, 3),
        "lse": normal(B, H, T),
    }


# Operator -> a call over the named tensors; then for every way to shard it, the dim of each that is sharded. What is
# not named there is whole.
Calls = dict[str, tuple[Callable[..., Any], list[dict[str, int]]]]
BATCH = dict.fromkeys(
    [
        *(
            "query",
            "key",
            "value",
            "start",
            "end",
            "lengths",
            "row_lengths",
            "positions",
            "latent",
            "rope",
            "mean",
            "cov",
        )
    ],
    0,
) | dict.fromkeys(["valid", "at", "out", "lse", "shared", "shared_lengths"], 0)
HEADS = dict.fromkeys(["query", "key", "value", "lengths", "positions", "rope", "mean", "cov", "out", "lse"], 1)
HEADS |= {"sinks": 0, "slopes": 0}
QUERIES = dict.fromkeys(["query", "rope", "out", "lse"], 2)
CALLS: Calls = {
    "attention": (
        lambda t: ops.attention(
            t["query"],
            t["key"],
            t["value"],
            causal=True,
            key_start=t["start"],
            lengths=t["end"],
            sinks=t["sinks"],
            alibi_slopes=t["slopes"],
            return_lse=True,
        ),
        [BATCH, HEADS],
    ),
    "attention, all keys": (
        lambda t: ops.attention(t["query"], t["key"], t["value"], lengths=t["end"], return_lse=True),
        [QUERIES],
    ),
    "attention, one key head": (
        lambda t: ops.attention(t["query"], t["shared"], t["shared"], causal=True),
        [BATCH, HEADS],
    ),
    "decode_attention": (
        lambda t: ops.decode_attention(
            t["query"],
            t["key"],
            t["value"],
            t["lengths"],
            sinks=t["sinks"],
            alibi_slopes=t["slopes"],
            positions=t["positions"],
            return_lse=True,
        ),
        [BATCH, HEADS],
    ),
    "decode_attention, all keys": (
        lambda t: ops.decode_attention(t["query"], t["key"], t["value"], t["lengths"], causal=False),
        [QUERIES],
    ),
    "latent_decode": (
        lambda t: ops.latent_decode(t["query"], t["rope"], t["latent"], t["row_lengths"], scale=0.4, sinks=t["sinks"]),
        [BATCH, HEADS],
    ),
    "latent_decode, all keys": (
        lambda t: ops.latent_decode(t["query"], t["rope"], t["latent"], t["row_lengths"], scale=0.4, causal=False),
        [QUERIES],
    ),
    "merge_attention": (
        lambda t: ops.merge_attention([t["out"], 2 * t["out"]], [t["lse"], t["lse"] + 1]),
        [BATCH, HEADS, QUERIES],
    ),
    "qk_scores": (lambda t: ops.qk_scores(t["query"], t["key"], scale=0.5), [BATCH, HEADS, QUERIES, {"key": 2}]),
    "score_knorm": (lambda t: ops.score_knorm(t["key"], t["lengths"]), [BATCH, HEADS]),
    "score_key_diff": (lambda t: ops.score_key_diff(t["key"], t["lengths"]), [BATCH, HEADS]),
    "score_expected_attention": (
        lambda t: ops.score_expected_attention(
            t["key"], t["value"], t["lengths"], t["positions"], t["mean"], t["cov"], scale=0.5, n_sink=1
        ),
        [BATCH, HEADS],
    ),
    "query_moments": (lambda t: ops.query_moments(t["query"], t["valid"]), [BATCH, HEADS]),
    "attention_mass": (
        lambda t: ops.attention_mass(t["key"], t["lengths"], t["positions"], t["query"], t["at"], scale=0.5),
        [BATCH, HEADS],
    ),
}


def flat(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def spread(tensors: dict[str, Tensor], mesh: DeviceMesh, ways: list[dict[str, int]]) -> dict[str, DTensor]:
    """Every tensor over the dims of ``mesh``, each by its way."""
    return {
        name: distribute_tensor(tensor, mesh, [Shard(way[name]) if name in way else WHOLE for way in ways])
        for name, tensor in tensors.items()
    }


def check_calls(mesh: DeviceMesh, ways_of: Callable[[list[dict[str, int]]], list[list[dict[str, int]]]]) -> int:
    tensors, checked = inputs(), 0
    for name, (call, ways) in CALLS.items():
        expected = flat(call(tensors))
        for way in ways_of(ways):
            sharded = spread(tensors, mesh, way)
            with CommDebugMode() as counted:
                got = flat(call(sharded))
            assert counted.get_total_counts() == 0, (name, way)
            for left, right in zip(expected, got, strict=True):
                assert any(isinstance(p, Shard) for p in right.placements), (name, way)  # not whole on every rank
                difference = torch.where(left == right.full_tensor(), 0.0, left - right.full_tensor())
                assert difference.abs().max() < 1e-10, (name, way)
            checked += 1
    return checked


def check_one_dim() -> int:
    return check_calls(init_device_mesh("cpu", (dist.get_world_size(),)), lambda ways: [[way] for way in ways])


def check_two_dims() -> int:
    """Batch over one dim of the mesh and heads over the other, as data and tensor parallelism have it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "heads"))
    return check_calls(mesh, lambda ways: [[BATCH, HEADS]] if len(ways) > 1 else [])


def test_shards_of_batch_heads_and_queries_need_no_collective(two_ranks: Ranks) -> None:
    assert two_ranks.run(check_one_dim) == [28, 28]


def test_batch_and_heads_over_a_mesh_of_two_dims(four_ranks: Ranks) -> None:
    assert set(four_ranks.run(check_two_dims)) == {11}


def check_gradients() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    names = ("query", "key", "value", "sinks")
    for way, causal, collectives in ((BATCH, True, 0), (HEADS, True, 0), (QUERIES, False, 0)):
        whole = {name: inputs()[name].requires_grad_() for name in names}
        sharded = {
            name: t.detach().requires_grad_() for name, t in spread(inputs(), mesh, [way]).items() if name in names
        }
        weight = normal(B, H, T, 3)
        expected = ops.attention(whole["query"], whole["key"], whole["value"], causal=causal, sinks=whole["sinks"])
        (expected * weight).sum().backward()
        placed = distribute_tensor(weight, mesh, [Shard(way["out"])])
        with CommDebugMode() as counted:
            got = ops.attention(
                sharded["query"], sharded["key"], sharded["value"], causal=causal, sinks=sharded["sinks"]
            )
            torch.autograd.backward(got, placed)
        assert counted.get_total_counts() == collectives, (way, counted.get_comm_counts())
        for name in names:
            assert (whole[name].grad - sharded[name].grad.full_tensor()).abs().max() < 1e-10, (name, way)


def test_gradients_of_sharded_attention_are_those_of_whole(two_ranks: Ranks) -> None:
    two_ranks.run(check_gradients)


def check_updates() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for dim in (0, 1):
        torch.manual_seed(6)
        whole = [normal(2, 2, 5, 4), normal(2, 2, 5, 3), torch.arange(5, dtype=torch.int32).expand(2, 2, 5).clone()]
        whole.append(torch.full((2, 2), 3, dtype=torch.int32))
        key, value, scores = normal(2, 2, 2, 4), normal(2, 2, 2, 3), normal(2, 2, 5)
        position = torch.tensor([[3, 4], [3, -1]], dtype=torch.int32)
        cache = [distribute_tensor(tensor, mesh, [Shard(dim)]) for tensor in whole]
        new = [distribute_tensor(tensor, mesh, [WHOLE]) for tensor in (key, value, position)]
        sharded_scores = distribute_tensor(scores, mesh, [Shard(dim)])
        with CommDebugMode() as counted:
            ops.cache_append_(*cache, *new)
            ops.cache_compact_(*cache, sharded_scores, 3)
        assert counted.get_total_counts() == 0
        ops.cache_append_(*whole, key, value, position)
        ops.cache_compact_(*whole, scores, 3)
        for left, right in zip(whole, cache, strict=True):
            assert torch.equal(left, right.full_tensor())


def test_a_sharded_cache_is_written_in_place(two_ranks: Ranks) -> None:
    two_ranks.run(check_updates)


def check_refusals() -> list[str]:
    mesh, tensors = init_device_mesh("cpu", (dist.get_world_size(),)), inputs()
    whole, heads = spread(tensors, mesh, [{}]), spread(tensors, mesh, [HEADS])
    queries, keys = spread(tensors, mesh, [QUERIES]), spread(tensors, mesh, [{"key": 2, "value": 2}])
    partial = DTensor.from_local(tensors["key"], mesh, [Partial()])
    three = distribute_tensor(normal(B, 3, C, D), mesh, [Shard(1)])
    cache = [distribute_tensor(tensors[n], mesh, [WHOLE]) for n in ("key", "value", "positions", "lengths")]
    sharded = [heads[n] for n in ("key", "value", "positions", "lengths")]
    short = [distribute_tensor(tensors[n][:, :, :T], mesh, [WHOLE]) for n in ("key", "value")]
    ops.attention(queries["query"], whole["key"], whole["value"])  # what is allowed now is asked for causally below
    calls = [
        lambda: ops.attention(queries["query"], whole["key"], whole["value"], causal=True),
        lambda: ops.attention(queries["query"], whole["key"], whole["value"], window=3, causal=True),
        lambda: ops.attention(whole["query"], keys["key"], keys["value"]),
        lambda: ops.score_knorm(keys["key"], whole["lengths"]),
        lambda: ops.score_key_diff(partial, whole["lengths"]),
        lambda: ops.attention(three, three, three),
        lambda: ops.cache_compact_(cache[0], cache[1], sharded[2], cache[3], whole["positions"].double(), 2),
        lambda: ops.cache_append_(keys["key"], keys["value"], *cache[2:], *short, whole["at"]),
    ]
    messages = []
    for call in calls:
        try:
            call()
        except (RuntimeError, ValueError) as error:  # DTensor makes a RuntimeError of what a strategy raises
            messages.append(str(error))
        else:
            messages.append("nothing was refused")
    return messages


def test_what_would_be_gathered_or_wrong_is_refused_on_every_rank(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(check_refusals)
    assert first == second
    expected = [
        "cannot be sharded over the queries (dim 2): causal depends on where a query stands",
        "cannot be sharded over the queries (dim 2): causal",
        "takes DTensors that are whole or sharded over the batch (dim 0), the heads, the queries (dim 2); got query",
        "score_knorm takes DTensors that are whole or sharded over the batch (dim 0), the heads; got key S(2)",
        "got key P",
        "the 3 heads of key must divide among the ranks of mesh (2,)",
        "the cache and all its parts alike; got key_cache",
        "fastattn.ops.cache_append_ takes DTensors",
    ]
    for message, part in zip(first, expected, strict=True):
        assert part in message, message


def test_every_operator_has_a_strategy() -> None:
    operators = {name for name in vars(torch.ops.fastattn)["_libraries"] if name != "realized"}
    assert operators == set(fastattn.distributed.strategies.RULES)
