"""Caches of one layer, random sequences to feed them, and what they must keep: shared by the tests of policies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fastattn import CompressedKVCache, Policy, Rotary, SnapKV
from fastattn.modules import policy_names
from fastattn.modules.policies import resolve_policy
from tests._helpers import draw, exact_policies

HEADS, KV_HEADS, DIM = 4, 2, 16
INV_FREQ = 1000.0 ** -(torch.arange(DIM // 2) / (DIM // 2))
POLICIES = policy_names()


def small(name: str) -> Policy:
    """The policy of that name, with a window that fits small budgets."""
    return SnapKV(window=4, kernel=3) if name == "snap_kv" else resolve_policy(name)


class Sequence:
    """Random tokens of one row, from position 0: query, key and value before rotation, ``[1, heads, T, DIM]``."""

    def __init__(self, tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self.query = 2 * draw.normal(1, HEADS, tokens, DIM, dtype=dtype, seed=seed) + 0.5
        self.key = draw.normal(1, KV_HEADS, tokens, DIM, dtype=dtype, seed=seed + 1)
        self.value = draw.normal(1, KV_HEADS, tokens, DIM, dtype=dtype, seed=seed + 2)
        self.positions = torch.arange(tokens)[None]

    def rotated(self, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        return rotary.rotate(self.query, self.positions), rotary.rotate(self.key, self.positions), self.value


def make(policy: Policy | str, budget: int, **options: Any) -> CompressedKVCache:
    defaults = {"num_layers": 1, "num_kv_heads": KV_HEADS, "head_dim": DIM, "rotary": Rotary(INV_FREQ), "interval": 8}
    return CompressedKVCache(policy, budget, **{**defaults, **options})


def feed(cache: CompressedKVCache, sequence: Sequence, sizes: list[int], **options: Any) -> list[Tensor]:
    """The outputs of calls of those sizes."""
    rotated, outputs, first = sequence.rotated(cache.rotary or Rotary(INV_FREQ)), [], 0
    for size in sizes:
        call = [tensor[:, :, first : first + size] for tensor in rotated]
        for layer in range(cache.num_layers):
            outputs.append(cache.attend(layer, *call, **options))
        first += size
    return outputs


def kept(cache: CompressedKVCache, row: int = 0) -> list[list[int]]:
    """Positions kept per head."""
    lengths = cache.lengths(0)[row].tolist()
    return [cache.positions(0)[row, head, :count].tolist() for head, count in enumerate(lengths)]


def expected_scores(
    sequence: Sequence, slots: list[int], queries: range, head: int, rotary: Rotary, **options: Any
) -> Tensor:
    """Expected Attention of one head's ``slots``, from the queries at positions ``queries``; float64."""
    groups = slice(head * HEADS // KV_HEADS, (head + 1) * HEADS // KV_HEADS)
    matrices = exact_policies.rotations(
        torch.tensor(slots), DIM, rotary.inv_freq, rotary.interleave, rotary.start, rotary.attention_factor
    )
    return exact_policies.expected_attention(
        torch.einsum("tde,te->td", matrices, sequence.key[0, head, slots].double()),
        sequence.value[0, head, slots],
        torch.tensor(slots),
        sequence.query[0, groups, queries.start : queries.stop],
        torch.arange(queries.start, queries.stop),
        max(slots) + 1,
        rotary.inv_freq,
        interleave=rotary.interleave,
        start=rotary.start,
        attention_factor=rotary.attention_factor,
        **options,
    )


def chosen(slots: list[int], scores: Tensor, budget: int) -> list[int]:
    return [slots[index] for index in exact_policies.keep(scores, budget)]


def kept_after_every_step(cache: CompressedKVCache, sequence: Sequence, tokens: int) -> Iterator[list[list[int]]]:
    rotated = sequence.rotated(Rotary(INV_FREQ))
    for now in range(tokens):
        cache.attend(0, *(t[:, :, now : now + 1] for t in rotated))
        yield kept(cache)
