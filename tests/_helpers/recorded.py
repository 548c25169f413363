"""What a transformers model hands to its attention, and which tokens of it a policy keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests._helpers import exact_policies

SNAP_KV_WINDOW = 64  # kvpress's default; ours is the paper's 32


@dataclass
class Recorded:
    """One layer of one prefill: ``query [H, T, D]`` rotated and before, ``key`` (rotated) and ``value [Hkv, T, D]``."""

    query: Tensor
    key: Tensor
    value: Tensor
    unrotated: Tensor


def record_prefill(model: Any, input_ids: Tensor) -> list[Recorded]:
    """What every attention layer of a Llama model sees of a prefill of ``input_ids [1, T]`` without a cache."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    rotated: list[tuple[Tensor, ...]] = []
    projected: list[Tensor] = []

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        rotated.append(tuple(tensor[0].clone() for tensor in (query, key, value)))
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    hooks = [
        layer.self_attn.q_proj.register_forward_hook(lambda module, inputs, out: projected.append(out[0].clone()))
        for layer in model.model.layers
    ]
    ALL_ATTENTION_FUNCTIONS.register("recorded_sdpa", attention)
    before = model.config._attn_implementation
    model.set_attn_implementation("recorded_sdpa")
    try:
        with torch.inference_mode():
            model(input_ids, use_cache=False)
    finally:
        model.set_attn_implementation(before)
        for hook in hooks:
            hook.remove()
    return [
        Recorded(query, key, value, plain.view(query.shape[1], query.shape[0], -1).transpose(0, 1))
        for (query, key, value), plain in zip(rotated, projected, strict=True)
    ]


def scores_of(policy: str, layer: Recorded, head: int, inv_freq: Tensor, dtype: torch.dtype) -> Tensor:
    """Scores ``[T]`` of one key/value head under a policy's default arguments (SnapKV: kvpress's), in ``dtype``."""
    key, value = layer.key[head], layer.value[head]
    positions = torch.arange(key.shape[0])
    if policy == "knorm":
        return exact_policies.knorm(key, dtype)
    if policy == "key_diff":
        return exact_policies.key_diff(key, dtype)
    if policy == "streaming_llm":
        return exact_policies.streaming_llm(positions)
    groups = layer.query.shape[0] // layer.key.shape[0]
    scale = key.shape[1] ** -0.5
    if policy == "tova":
        return exact_policies.tova(layer.key, positions, layer.query[:, -1], scale=scale, dtype=dtype)
    if policy == "snap_kv":
        window = layer.query[head * groups : (head + 1) * groups, -SNAP_KV_WINDOW:]
        return exact_policies.snap_kv(key, positions, window, positions[-SNAP_KV_WINDOW:], scale=scale, dtype=dtype)
    queries = layer.unrotated[head * groups : (head + 1) * groups]
    return exact_policies.expected_attention(
        key, value, positions, queries, positions, key.shape[0], inv_freq, dtype=dtype
    )


@dataclass
class Difference:
    """Kept sets of some heads against other kept sets of the same heads."""

    heads: int = 0
    equal: int = 0
    tokens: int = 0  # kept by one side only, both sides counted
    explained: int = 0  # of these, within float32 error of the threshold

    def add(self, policy: str, layer: Recorded, head: int, inv_freq: Tensor, one: list[int], other: list[int]) -> None:
        """Compare two ascending lists of kept tokens of one head.

        Float32 error is what the definition itself, evaluated in plain float32, is off at most, relative to the score
        (absolute for KeyDiff, whose scores are cosines). A token's score and the threshold may both be off by it.
        """
        self.heads += 1
        self.equal += one == other
        differing = set(one) ^ set(other)
        if len(one) != len(other):
            self.tokens += len(differing)
            return
        if not differing:
            return
        exact = scores_of(policy, layer, head, inv_freq, torch.float64)
        off = (scores_of(policy, layer, head, inv_freq, torch.float32).double() - exact).abs()
        threshold = float(exact.sort(descending=True).values[len(other) - 1])
        finite = exact.isfinite()
        if policy == "key_diff":
            error = float(off[finite].max())
        else:
            error = float((off[finite] / exact[finite].abs()).max()) * abs(threshold)
        self.tokens += len(differing)
        self.explained += sum(abs(float(exact[token]) - threshold) <= 2 * error for token in differing)
