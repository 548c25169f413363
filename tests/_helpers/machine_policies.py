"""The policies that the state machine of caches draws, each with its float64 score over a list of entries."""

from __future__ import annotations

import torch

from fastattn import H2O, TOVA, ExpectedAttention, KeyDiff, Knorm, Protect, Random, SnapKV, StreamingLLM
from fastattn.modules import policy_names
from tests._helpers import exact_policies as exact
from tests._helpers.list_cache import Entry

HEADS, KV_HEADS, DIM, V_DIM, LAYERS = 4, 2, 8, 6, 2
INV_FREQ = 100.0 ** -(torch.arange(DIM // 2) / (DIM // 2))
SCALE = DIM**-0.5
FUTURE, SINK = 16, 2
# A policy of every kind, and some inside of Protect.
PROTECTED = ("key_diff", "tova", "random")
KINDS = (*policy_names(), *(f"protect {name}" for name in PROTECTED))


def policy_for(kind: str, window: int, budget: int):
    """The policy of a ``kind``, for budgets of at least ``budget``."""
    inner = policy_and_score(kind.removeprefix("protect "), window, budget)[0]
    return Protect(inner, n_sink=1, n_recent=1) if kind.startswith("protect ") else inner


def score_for(kind: str, layer: int, window: int, budget: int):
    """The float64 score of a ``kind`` in a layer of ``budget``."""
    name = kind.removeprefix("protect ")
    score = policy_and_score(name, window, budget)[1] or random_score(layer)
    if name == kind:
        return score

    def protected(entries, head, next_position, queries, heads):
        inner = score(entries, head, next_position, queries, heads)
        newest = max(e.position for e in entries) + 1
        return exact.protect(inner, torch.tensor([e.position for e in entries]), 1, 1, newest)

    return protected


def policy_and_score(name: str, window: int, budget: int):
    """The policy, and its float64 score over a list of entries."""
    window = min(window, budget) if name == "snap_kv" else window

    def keys(entries: list[Entry]) -> torch.Tensor:
        return torch.stack([e.key for e in entries])

    def positions(entries: list[Entry]) -> torch.Tensor:
        return torch.tensor([e.position for e in entries])

    def expected(entries, head, next_position, queries, _):
        group = slice(head * HEADS // KV_HEADS, (head + 1) * HEADS // KV_HEADS)
        return exact.expected_attention(
            keys(entries),
            torch.stack([e.value for e in entries]),
            positions(entries),
            torch.stack([q[group] for _, q in queries], dim=1),
            torch.tensor([p for p, _ in queries]),
            next_position,
            INV_FREQ,
            interleave=False,
            scale=SCALE,
            n_sink=SINK,
            epsilon=0.0,
            use_value_norm=True,
            use_covariance=True,
            n_future=FUTURE,
        )

    def rotated(queries):
        """``[H, N, D]`` and positions."""
        at = torch.tensor([p for p, _ in queries])
        raw = torch.stack([q for _, q in queries], dim=1)
        return torch.einsum("nde,hne->hnd", exact.rotations(at, raw.shape[2], INV_FREQ), raw), at

    def group(queries, head):
        vectors, at = rotated(queries)
        return vectors[head * HEADS // KV_HEADS : (head + 1) * HEADS // KV_HEADS], at

    def snap_kv(entries, head, _, queries, __):
        return exact.snap_kv(keys(entries), positions(entries), *group(queries, head), kernel=3, scale=SCALE)

    def tova(entries, head, _, queries, heads):
        newest = rotated(queries)[0][:, -1]
        return exact.tova(torch.stack([keys(one) for one in heads]), positions(entries), newest, scale=SCALE)

    def h2o(entries, head, next_position, *_):
        mean = torch.tensor([e.mass / e.queries for e in entries], dtype=torch.float64)
        return exact.protect(mean, positions(entries), 0, budget // 2, next_position)

    return {
        "snap_kv": (SnapKV(window, 3), snap_kv),
        "tova": (TOVA(), tova),
        "h2o": (H2O(), h2o),
        "random": (Random(7), None),  # differs between layers: see start
        "knorm": (Knorm(), lambda entries, *_: exact.knorm(keys(entries))),
        "key_diff": (KeyDiff(), lambda entries, *_: exact.key_diff(keys(entries))),
        "streaming_llm": (StreamingLLM(SINK), lambda entries, *_: exact.streaming_llm(positions(entries), SINK)),
        "expected_attention": (ExpectedAttention(FUTURE, SINK, query_window=window), expected),
    }[name]


def observe_for_h2o(entries, head, fed):
    at = torch.tensor([p for p, _ in fed])
    raw = torch.stack([q for _, q in fed], dim=1)
    rotated = torch.einsum("nde,hne->hnd", exact.rotations(at, raw.shape[2], INV_FREQ), raw)
    own = rotated[head * HEADS // KV_HEADS : (head + 1) * HEADS // KV_HEADS]
    tokens = torch.stack([e.key for e in entries]), torch.tensor([e.position for e in entries])
    for entry, mass, count in zip(entries, *(x.tolist() for x in exact.h2o(*tokens, own, at, SCALE)), strict=True):
        entry.mass, entry.queries = entry.mass + mass, entry.queries + count


def random_score(layer):
    return lambda entries, head, *_: exact.random(torch.tensor([e.position for e in entries]), head, layer, 7)
