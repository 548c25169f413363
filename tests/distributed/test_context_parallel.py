"""A cache whose tokens are spread over ranks: outputs and kept tokens are one process's, and ranks stay even."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fastattn import CompressedKVCache, KeyDiff, Knorm, Protect
from fastattn.distributed import ContextParallelCache, context_parallel
from fastattn.modules.policies import CacheState, Policy
from tests._helpers.collectives import Collectives
from tests._helpers.policy_caches import DIM, HEADS, KV_HEADS, make
from tests._helpers.ranks import Ranks
from tests.distributed.test_tensor_parallel import low_rank, mesh_of_all, refusal, small

SERVED = ["expected_attention", "knorm", "streaming_llm", "key_diff", "snap_kv", "tova", "random"]


def both(policy: Any, budget: int, skew: int | None = None, **options: Any) -> tuple[Any, ContextParallelCache]:
    """One process's cache, and the same spread over all ranks."""
    options = {"dtype": torch.float64, "batch_size": 2, "num_layers": 2, **options}
    one = make(policy, budget, **options)
    return one, context_parallel(make(policy, budget, **options), mesh_of_all(), skew=skew)


def tokens(count: int, rows: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, DIM))
    return tuple(torch.randn(rows, heads, count, dim, dtype=torch.float64) for heads, dim in shapes)


def compare(one: CompressedKVCache, many: ContextParallelCache, limit: int) -> None:
    ranks = many.token_mesh.size()
    for layer in range(one.num_layers):
        assert torch.equal(one.positions(layer), many.positions(layer))
        assert torch.equal(one.lengths(layer), many.lengths(layer))
        lengths = many.rank_lengths(layer)
        even = -(-lengths.sum(0).max().item() // ranks)
        assert lengths.max() <= max(limit, even)
        shard: Any = many.layers[layer]
        mine = shard.positions[:, 0][torch.arange(shard.capacity) < shard.lengths]
        assert (mine >= 0).all()
    assert torch.equal(one.tokens_seen, many.tokens_seen)
    assert one.columns == many.columns


def feed(one: Any, many: Any, sizes: list[int], first_mask: Tensor | None = None) -> None:
    limit = -(-one.budget // dist.get_world_size()) + -(-one.budget // dist.get_world_size()) // 4
    for call, size in enumerate(sizes):
        mask = first_mask if call == 0 else None
        for layer in range(one.num_layers):
            new = tokens(size)
            expected = one.attend(layer, *new, attention_mask=mask)
            got = many.attend(layer, *new, attention_mask=mask)
            if mask is not None:
                expected, got = (out.transpose(1, 2)[mask] for out in (expected, got))
            assert (expected - got).abs().max() < 1e-10, call
        compare(one, many, limit)


def check_policy(name: str) -> int:
    one, many = both(small(name), 13, interval=5, max_step=2)
    mask = torch.arange(30) >= torch.tensor([[0], [11]])
    feed(one, many, [30, 1, 2, 1, 1, 1, 2, 1, 9, 1, 1, 1, 1, 1, 1, 1], mask)
    many.reset()
    one.reset()
    feed(one, many, [1, 1, 4, 40])
    return many.moved


@pytest.mark.parametrize("name", SERVED)
def test_two_ranks_keep_what_one_process_keeps(two_ranks: Ranks, name: str) -> None:
    two_ranks.run(check_policy, name)


def test_four_ranks_keep_what_one_process_keeps(four_ranks: Ranks) -> None:
    for name in ("expected_attention", "snap_kv", "key_diff"):
        four_ranks.run(check_policy, name)


class EveryFourth(Policy):
    """Prefers tokens that all lie on one rank of two or four: nothing is more uneven."""

    depends_on = "tokens"

    def score(self, state: CacheState) -> Tensor:
        return torch.where(state.positions % 4 == 0, 1.0, 0.0).to(torch.float64)


def check_rebalancing() -> tuple[int, int]:
    one, many = both(EveryFourth(), 12, interval=12, skew=1)
    feed(one, many, [48, *[1] * 26])
    lenient = both(EveryFourth(), 12, interval=12, skew=12)
    feed_lenient = lenient[1]
    for layer in range(2):
        feed_lenient.attend(layer, *tokens(48))
    return many.moved, feed_lenient.moved


def test_keys_move_only_beyond_the_stated_skew(two_ranks: Ranks) -> None:
    (strict, lenient), other = two_ranks.run(check_rebalancing)
    assert strict > 0
    assert lenient == 0
    assert other == (strict, lenient)


def check_ties() -> None:
    """Equal scores: the newer token stays; NaN ranks lowest."""

    class Ties(Policy):
        depends_on = "tokens"

        def score(self, state: CacheState) -> Tensor:
            score = (state.positions % 3).to(torch.float64)
            return torch.where(state.positions % 5 == 0, math.nan, score)

    for policy in (Ties(), Protect(Ties(), n_sink=2, n_recent=3), Knorm(n_recent=2), KeyDiff(n_sink=3)):
        one, many = both(policy, 9, interval=3)
        with pytest.warns(UserWarning, match="NaN") if isinstance(policy, (Ties, Protect)) else torch.no_grad():
            feed(one, many, [20, 1, 1, 1, 1, 1, 1, 1])


def test_ties_and_nan_are_settled_as_in_one_process(two_ranks: Ranks) -> None:
    two_ranks.run(check_ties)


def check_latents() -> None:
    module = low_rank(q_lora_rank=24)
    for name in ("expected_attention", "tova", "key_diff"):
        caches = [module.make_cache(small(name), 12, interval=3, batch_size=2) for _ in range(2)]
        caches[1] = context_parallel(caches[1], mesh_of_all())
        with torch.no_grad():
            for size in (20, 1, 1, 1, 1, 1, 1, 7, 1):
                hidden = torch.randn(2, size, 48, dtype=torch.float64)
                expected, got = (module(hidden, cache=cache) for cache in caches)
                assert (expected - got).abs().max() < 1e-10
                assert torch.equal(caches[0].positions(0), caches[1].positions(0))


def test_latent_caches_are_served(two_ranks: Ranks) -> None:
    two_ranks.run(check_latents)


def check_rows() -> None:
    one, many = both("key_diff", 8, interval=4)
    feed(one, many, [12, 1, 1])
    for cache in (one, many):
        cache.reorder(torch.tensor([1, 1]))
    feed(one, many, [1, 1, 1, 1, 1])


def test_rows_are_reordered_as_beams_are(two_ranks: Ranks) -> None:
    two_ranks.run(check_rows)


def check_float32() -> None:
    one, many = both("expected_attention", 16, dtype=torch.float32)
    assert many.nbytes < 0.65 * one.nbytes
    new = [t.float() for t in tokens(40)]
    for layer in range(2):
        expected, got = one.attend(layer, *new), many.attend(layer, *new)
    for _ in range(3):
        new = [t.float() for t in tokens(1)]
        for layer in range(2):
            expected, got = one.attend(layer, *new), many.attend(layer, *new)
            assert (expected - got).abs().max() < 1e-5


def test_float32_and_memory(two_ranks: Ranks) -> None:
    two_ranks.run(check_float32)


def check_collectives() -> dict[str, list[tuple[str, int]]]:
    found = {}
    for name in ("knorm", "key_diff", "expected_attention"):
        _, many = both(small(name), 12, interval=4, num_layers=1, dtype=torch.float32)
        many.attend(0, *(t.float() for t in tokens(16)))
        with Collectives() as counted:
            for _ in range(5):  # four steps fill the cache, the fifth compresses it first
                many.attend(0, *(t.float() for t in tokens(1)))
        found[name] = counted.sizes
        assert not many.moved
    return found


def test_a_step_costs_one_collective_per_layer(two_ranks: Ranks) -> None:
    rows = 2
    step = rows * HEADS * (DIM + 2) * 4  # output, log-sum-exp and a mark of the query, float32
    selection = 2 * rows * KV_HEADS * 8 * 4  # score and position of each of the rank's 8 slots
    of_policy = {"knorm": [], "key_diff": [rows * KV_HEADS * DIM * 4], "expected_attention": [rows * HEADS * 4]}
    for found in two_ranks.run(check_collectives):
        for name, sizes in found.items():
            assert sizes == [step] * 4 + of_policy[name] + [selection, step], name


# -- refusals --------------------------------------------------------------------------------------------------------


def check_refusals() -> list[str]:
    rank, mesh = dist.get_rank(), mesh_of_all()
    sizes = {"num_layers": 1, "num_kv_heads": KV_HEADS, "head_dim": DIM, "mesh": mesh}
    used = make("knorm", 8)
    used.attend(0, *(t[:1].float() for t in tokens(2)))
    many = ContextParallelCache("knorm", 8, **sizes)

    def differing() -> None:
        many.attend(0, *(t[:1].float() for t in tokens(3 + rank)))

    def other_prompts() -> None:
        torch.manual_seed(rank)
        many.attend(0, *(t[:1].float() for t in tokens(3)))

    messages = [
        refusal(lambda: ContextParallelCache("h2o", 8, **sizes)),
        refusal(lambda: ContextParallelCache("knorm", 8 + rank, **sizes)),
        refusal(lambda: context_parallel(used, mesh)),
        refusal(lambda: ContextParallelCache("knorm", 8, storage="int8", **sizes)),
        refusal(differing),
        refusal(other_prompts),
    ]
    assert int(many.columns) == 0
    torch.manual_seed(4)
    many.attend(0, *(t[:1].float() for t in tokens(3)))  # nothing was written before
    assert many.lengths(0).tolist() == [[3, 3]]
    torch.manual_seed(rank)
    messages.append(refusal(lambda: many.attend(0, *(9 * t[:1].float() for t in tokens(1)))))
    with pytest.raises(RuntimeError, match=r"invalid since layer 0 failed with ValueError: call reset\(\)"):
        many.attend(0, *(t[:1].float() for t in tokens(1)))
    many.reset()
    messages.append(refusal(lambda: many.attend(1, *(t[:1].float() for t in tokens(1)))))
    messages.append(refusal(lambda: many.crop(1)))
    return messages


def test_what_does_not_fit_is_refused_on_every_rank(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(check_refusals)
    expected = [
        "policy must be one of ExpectedAttention, KeyDiff, Knorm",
        "the cache's arguments must be the same on every rank of the mesh, got rank 0",
        "cache must be empty to be spread over ranks, got one that was fed 2 columns",
        "storage must be None where tokens are spread over ranks, got 'int8'",
        "every rank must bring the same tokens to a cache whose tokens are spread over ranks, got prompts",
        "every rank must bring the same tokens",
        "query must be the same on every rank",
        "layer must be 0",
        "tokens must be 0",
    ]
    for left, right, part in zip(first, second, expected, strict=True):
        assert part in left, left
        assert part in right, right
