"""Digests of results by name, drawn inputs, and the policies that every section goes through."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fastattn


class Results:
    """Digests of tensors and texts by name."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}
        self.prefix = ""

    def add(self, name: str, value: Any) -> None:
        """Note a tensor, a text, or each of a sequence or dict of them."""
        if isinstance(value, Tensor):
            data = value.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            self._note(name, f"{value.dtype} {list(value.shape)}".encode() + data)
        elif isinstance(value, dict):
            self.add(f"{name}.names", "\n".join(value))
            for key, part in value.items():
                self.add(f"{name}.{key}", part)
        elif isinstance(value, (tuple, list)):
            for index, part in enumerate(value):
                self.add(f"{name}.{index}", part)
        else:
            self._note(name, repr(value).encode())

    def _note(self, name: str, data: bytes) -> None:
        full = f"{self.prefix}{name}"
        if full in self.digests:
            raise ValueError(f"name must be new, got {full!r}")
        self.digests[full] = hashlib.sha256(data).hexdigest()


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers that depend on the seed alone, not on what was drawn before."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def beyond(lengths: Tensor, slots: int) -> Tensor:
    """True at the slots beyond ``lengths``, in a new last dim."""
    return torch.arange(slots) >= lengths[..., None]


def held(buffers: list[Tensor], lengths: Tensor) -> list[Tensor]:
    return [buffer.masked_fill(beyond(lengths, buffer.shape[2])[..., None], 0) for buffer in buffers]


class LargeValues(fastattn.Policy):
    """A user's policy: large values and the newest tokens, with a window of queries that it looks at."""

    query_window = 8

    def score(self, state: Any) -> Tensor:
        size = state.values.norm(dim=-1) + state.queries.norm(dim=-1).mean((1, 2))[:, None, None]
        size = size.double() if state.keys.dtype == torch.float64 else size.float()
        return size.masked_fill(state.positions >= state.next_position[:, None, None] - 5, float("inf"))


POLICIES: dict[str, Callable[[], Any]] = {
    "expected_attention": lambda: "expected_attention",
    "expected_attention-samples": lambda: fastattn.ExpectedAttention(query_window=12, n_future_positions=40),
    "expected_attention-mean": lambda: fastattn.ExpectedAttention(use_covariance=False, use_value_norm=False),
    "knorm": lambda: "knorm",
    "knorm-protected": lambda: fastattn.Knorm(n_sink=3, n_recent=6),
    "key_diff": lambda: "key_diff",
    "key_diff-protected": lambda: fastattn.KeyDiff(n_sink=2, n_recent=8),
    "streaming_llm": lambda: "streaming_llm",
    "streaming_llm-rerotate": lambda: fastattn.StreamingLLM(n_sink=4, rerotate=True),
    "own": LargeValues,
}
