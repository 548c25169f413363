"""Compressed caches under every policy: prompts, chunks, steps, padding, crops, reordered and selected rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastattn
from benchmarks.lib.result_cases._common import POLICIES, Results, draw, held, short

ROTARY_DIM = 16


def rotary(start: int) -> Any:
    inv_freq = 1000.0 ** (-torch.arange(0, ROTARY_DIM, 2) / ROTARY_DIM)
    return fastattn.Rotary(inv_freq, interleave=start > 0, attention_factor=1.1, start=start)


class Driver:
    """Feeds one cache drawn tokens and notes all that it gives and holds."""

    def __init__(self, results: Results, policy: str, dtype: torch.dtype, latent: bool, **options: Any) -> None:
        self.results, self.dtype, self.latent = results, dtype, latent
        self.kv_heads, self.dim = (1, 40) if latent else (2, 32)
        self.cache = fastattn.CompressedKVCache(
            POLICIES[policy](), 24, num_layers=2, num_kv_heads=self.kv_heads, head_dim=self.dim,
            latent_rank=24 if latent else None, num_heads=4, batch_size=3, dtype=dtype,
            rotary=rotary(24 if latent else 0), **{"interval": 8, **options},
        )  # fmt: skip
        self.calls = 0

    def feed(self, tokens: int, mask: Tensor | None = None, position_ids: Tensor | None = None) -> None:
        """One call of every layer; batch size is the cache's."""
        self.calls += 1
        batch, seed = self.cache.batch_size, 100 * self.calls
        for layer in range(2):
            query = draw(batch, 4, tokens, self.dim, seed=seed + layer, dtype=self.dtype)
            key = draw(batch, self.kv_heads, tokens, self.dim, seed=seed + layer + 10, dtype=self.dtype)
            value = draw(batch, self.kv_heads, tokens, self.dim, seed=seed + layer + 20, dtype=self.dtype)
            out = self.cache.attend(
                layer, query, key, None if self.latent else value,
                attention_mask=mask, position_ids=position_ids, scale=0.2,
            )  # fmt: skip
            out = out if mask is None else out.masked_fill(~mask[:, None, :, None], 0)
            self.results.add(f"call{self.calls}.out{layer}", out)
        self.note(f"call{self.calls}")

    def note(self, name: str) -> None:
        cache = self.cache
        for layer in range(2):
            lengths = cache.lengths(layer)
            stored = held([cache.keys(layer), cache.values(layer)], lengths)
            self.results.add(f"{name}.layer{layer}", (*stored, cache.positions(layer), lengths))
        self.results.add(f"{name}.counters", (cache.tokens_seen, cache.columns, cache.nbytes, cache.capacity))


def caches(results: Results, folder: Path, saved: Path) -> None:
    scenarios: dict[str, Callable[[Driver], None]] = {
        "steps": _steps,
        "chunks": _chunks,
        "padding": _padding,
        "gaps": _gaps,
    }
    for policy in POLICIES:
        for latent in (False, True):
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                case = f"cache.{policy}.{'latent' if latent else 'kv'}.{short(dtype)}"
                for name, scenario in scenarios.items():
                    results.prefix = f"{case}.{name}."
                    scenario(Driver(results, policy, dtype, latent))
                results.prefix = f"{case}.turns."
                _turns(Driver(results, policy, dtype, latent, max_step=4))
                results.prefix = f"{case}.saved."
                _saved_state(results, policy, dtype, latent, folder / f"{case}.pt", saved / f"{case}.pt")


def _steps(driver: Driver) -> None:
    driver.feed(50)
    for _ in range(20):  # compresses twice
        driver.feed(1)


def _chunks(driver: Driver) -> None:
    for tokens in (20, 19, 40, 5, 1):
        driver.feed(tokens)


def _padding(driver: Driver) -> None:
    driver.feed(40, torch.arange(40) >= torch.tensor([0, 13, 38])[:, None])
    for tokens in (*(1,) * 12, 9):
        driver.feed(tokens)


def _gaps(driver: Driver) -> None:
    """Positions of the caller's own, then a row that brings no token."""
    driver.feed(30, position_ids=(3 * torch.arange(30) + 2).expand(3, 30))
    mask = torch.tensor([[True], [False], [True]])
    for step in range(12):
        driver.feed(1, mask, torch.full((3, 1), 100 + 2 * step))


def _turns(driver: Driver) -> None:
    driver.feed(30)
    for tokens in (4, 2):
        driver.feed(tokens)
    driver.cache.crop(2)
    driver.note("crop")
    driver.cache.reorder(torch.tensor([2, 0, 0]))
    driver.note("reorder")
    for tokens in (4, 4, 2):
        driver.feed(tokens)
    copied = copy.deepcopy(driver.cache)
    driver.cache = driver.cache.select(torch.tensor([1, 2, 1, 0]))
    driver.note("select")
    for tokens in (3, 1, 4):
        driver.feed(tokens)
    driver.cache = copied
    driver.feed(2)
    driver.cache.reset()
    driver.note("reset")
    driver.feed(33)


def _saved_state(results: Results, policy: str, dtype: torch.dtype, latent: bool, folder: Path, saved: Path) -> None:
    """A state that the base wrote goes on as it would have there."""
    driver = Driver(results, policy, dtype, latent)
    _steps(driver)
    state = driver.cache.state_dict()
    results.add("state.names", "\n".join(state))
    torch.save(state, folder)
    other = Driver(results, policy, dtype, latent)
    other.cache.load_state_dict(torch.load(saved))
    other.calls = 1000
    other.note("loaded")
    for _ in range(10):
        other.feed(1)
