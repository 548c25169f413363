"""What an operator costs per eager call, counted exactly: Python calls and operators dispatched.

Times depend on the machine; these do not. A figure below is a budget: lower it when the code gets leaner.
"""

from __future__ import annotations

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastattn import CompressedKVCache, Rotary, ops

# name: (Python calls, operators dispatched) per call. Python calls are those of Python functions, by sys.setprofile;
# dispatched are the operators that the call hands to PyTorch's dispatcher from the outside: one registered boundary.
BUDGET = {
    "decode_attention": (12, 1),
    "latent_decode": (12, 1),
    "score_knorm": (15, 1),
    "cache_append_": (11, 1),
    "cache_compact_": (24, 1),
}


class Counting(TorchDispatchMode):
    """Counts operators as a caller sees them; what an operator does inside is not seen again."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def calls() -> dict:
    query, key = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 32, 16)
    lengths = torch.full((1, 2), 16, dtype=torch.int32)
    positions = torch.arange(32, dtype=torch.int32).expand(1, 2, -1).contiguous()
    new = torch.randn(1, 2, 1, 16)
    at = torch.tensor([[16]], dtype=torch.int32)
    scores = torch.randn(1, 2, 32)
    return {
        "decode_attention": lambda: ops.decode_attention(query, key, key, lengths),
        "latent_decode": lambda: ops.latent_decode(
            query[..., :12], query[..., 12:], key[:, 0], lengths[:, 0], scale=1.0
        ),
        "score_knorm": lambda: ops.score_knorm(key, lengths, min_length=20),
        "cache_append_": lambda: ops.cache_append_(key, key.clone(), positions, lengths.clone(), new, new, at),
        "cache_compact_": lambda: ops.cache_compact_(key, key, positions, lengths, scores, 16, min_length=20),
    }


def python_calls(function) -> int:
    count = 0

    def profile(frame, event, _):
        nonlocal count
        count += event == "call"

    function()  # imports and caches
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count - 1  # the function itself


@pytest.mark.parametrize("name", BUDGET)
def test_an_operator_stays_within_its_budget(name):
    function = calls()[name]
    counted = python_calls(function)
    with Counting() as mode:
        function()
    boundary = [op for op in mode.names if op.startswith("fastattn.")]
    print(f"{name}: {counted} Python calls, {len(boundary)} registered boundary")
    most, boundaries = BUDGET[name]
    assert counted <= most, f"{name} makes {counted} Python calls, {most} are allowed"
    assert len(boundary) == boundaries, mode.names


# name: (Python calls, operators) of a step through LAYERS layers.
LAYERS = 10
STEP_BUDGET = {
    "knorm": (480, 66),
    "expected_attention": (550, 135),
    "masked": (510, 115),
    "latent": (600, 116),
}


def step(name: str):
    """A decode step of a model of ``LAYERS`` layers that evicts nothing."""
    masked = {}
    if name == "masked":
        masked = {"attention_mask": torch.ones(1, 1, dtype=torch.bool), "position_ids": torch.tensor([[4]])}
    latent = {"latent_rank": 12, "num_kv_heads": 1} if name == "latent" else {"num_kv_heads": 2}
    policy = "expected_attention" if name == "expected_attention" else "knorm"
    rotary = Rotary(torch.ones(8))
    cache = CompressedKVCache(policy, 64, num_layers=LAYERS, head_dim=16, rotary=rotary, **latent)
    query, new = torch.randn(1, 4, 1, 16), torch.randn(1, latent["num_kv_heads"], 1, 16)
    value = None if name == "latent" else new

    def run() -> None:
        for layer in range(LAYERS):
            cache.attend(layer, query, new, value, scale=0.25, **masked)
        masked.update({"position_ids": masked["position_ids"] + 1} if masked else {})

    return run


@pytest.mark.parametrize("name", STEP_BUDGET)
def test_a_decode_step_stays_within_its_budget(name):
    """A step that evicts nothing dispatches no score and no compaction."""
    run = step(name)
    with torch.no_grad():
        counted = python_calls(run)
        with Counting() as mode:
            run()
    own = [op for op in mode.names if op.startswith("fastattn.")]
    print(f"{name}: {counted / LAYERS} Python calls, {len(mode.names) / LAYERS} operators per layer")
    decode = "latent_decode" if name == "latent" else "decode_attention"
    assert own == ["fastattn.cache_append_.default", f"fastattn.{decode}.default"] * LAYERS
    calls, operators = STEP_BUDGET[name]
    assert counted <= calls
    assert len(mode.names) <= operators
