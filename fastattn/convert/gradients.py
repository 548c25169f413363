"""Gradients of the loss of sampled labels with respect to what conversion changes, from one pass of the original.

Every layer is replaced, for the while, by its attention written out: scores are ``q_rot . (k_rot + e) + q . z`` with a
term ``z = 0`` of keys without position, so that one backward pass says what errors of values, of keys that keep their
position and of keys that lose it cost, whatever ranks and rotary dims are chosen later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from fastattn.convert.calibration import progress_bar
from fastattn.convert.families import AttentionSite, read_weights
from fastattn.convert.weights import AttentionWeights


@dataclass
class LayerGradients:
    """Of one layer, one entry per sequence, each divided by ``sqrt(S)`` of its ``S`` tokens.

    Attributes:
        key_value: ``[Hkv (d + dv), hidden+1]``, of the projections ``[K; V]``, keys scored without position.
        rotated, unrotated: complex ``[F, Hkv, Hkv]``: ``<G, P>`` (real part, ``P`` a mixing of heads at one frequency)
            is what adding ``P k`` to the rotated keys, and to keys without position, changes the loss by.
        query: ``[H d, hidden+1]``, of the query projection; empty if it was not asked for.
    """

    key_value: list[Tensor] = field(default_factory=list)
    rotated: list[Tensor] = field(default_factory=list)
    unrotated: list[Tensor] = field(default_factory=list)
    query: list[Tensor] = field(default_factory=list)


class WrittenOutAttention(nn.Module):
    """Causal attention of one sequence by its definition, whose parts stay at hand for a backward pass."""

    def __init__(self, weights: AttentionWeights, like: nn.Module, *, with_query: bool) -> None:
        super().__init__()
        target: Any = next(like.parameters())
        self.weights, self.with_query = weights, with_query
        self.query, self.key, self.value, self.output = (
            m.to(target.dtype).to(target.device) for m in (weights.query, weights.key, weights.value, weights.output)
        )
        self.parts: list[Tensor] = []
        self.inputs: Tensor | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """``(output [1, S, hidden], None)``: positions from 0, other arguments are not looked at."""
        w, x = self.weights, hidden_states[0]
        query = rearrange(x @ self.query[:, :-1].T + self.query[:, -1], "s (h d) -> h s d", h=w.num_heads)
        key = rearrange(x @ self.key[:, :-1].T + self.key[:, -1], "s (h d) -> h s d", h=w.num_kv_heads)
        value = rearrange(x @ self.value[:, :-1].T + self.value[:, -1], "s (h d) -> h s d", h=w.num_kv_heads)
        rotated, missing = self._rotate(key), torch.zeros_like(key)
        parts = [rotated, missing, value, *([query] if self.with_query else [])]
        for part in parts:
            if not part.requires_grad:
                part.requires_grad_()
        group = w.num_heads // w.num_kv_heads
        keys = torch.cat([rotated, missing], dim=-1).repeat_interleave(group, dim=0)
        queries = torch.cat([self._rotate(query), query], dim=-1)
        mixed = nn.functional.scaled_dot_product_attention(
            queries, keys, value.repeat_interleave(group, dim=0), is_causal=True, scale=w.scale
        )
        self.inputs, self.parts = x.detach(), parts
        mixed = rearrange(mixed, "h s d -> s (h d)")
        return (mixed @ self.output[:, :-1].T + self.output[:, -1])[None], None

    def _rotate(self, heads: Tensor) -> Tensor:
        frequencies = self.weights.inv_freq.to(heads.device)
        count, positions = frequencies.numel(), torch.arange(heads.shape[1], device=heads.device)
        angle = torch.outer(positions.float(), frequencies)
        factor = self.weights.attention_factor
        cos, sin = (angle.cos() * factor).to(heads.dtype), (angle.sin() * factor).to(heads.dtype)
        first, second, rest = heads.split([count, count, heads.shape[2] - 2 * count], dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)

    def collect(self, into: LayerGradients, gradients: Sequence[Tensor]) -> None:
        """Add what ``gradients`` of ``parts`` say of one sequence."""
        assert self.inputs is not None  # a forward came before
        rotated, missing, value, *query = (gradient.detach().float() for gradient in gradients)
        size = math.sqrt(self.inputs.shape[0])
        inputs = torch.cat([self.inputs.float(), self.inputs.new_ones(self.inputs.shape[0], 1).float()], dim=1) / size
        stored = torch.float32 if gradients[0].dtype == torch.float64 else torch.bfloat16
        both = torch.cat([rearrange(missing, "h s d -> (h d) s"), rearrange(value, "h s d -> (h d) s")])
        into.key_value.append((both @ inputs).to(stored))
        for part in query:
            into.query.append((rearrange(part, "h s d -> (h d) s") @ inputs).to(stored))
        at = self.inputs.float()
        key = at @ self.key[:, :-1].T.float() + self.key[:, -1].float()
        key = rearrange(key, "s (h d) -> h s d", h=self.weights.num_kv_heads)
        for name, gradient, keys in (("rotated", rotated, self._rotate(key)), ("unrotated", missing, key)):
            z, g = self._complex(keys), self._complex(gradient)
            getattr(into, name).append(torch.einsum("gtf,htf->fgh", g, z.conj()) / size)

    def _complex(self, heads: Tensor) -> Tensor:
        count = self.weights.inv_freq.numel()
        return torch.complex(heads[..., :count].contiguous(), heads[..., count : 2 * count].contiguous())


def gather_gradients(
    model: nn.Module,
    sites: Sequence[AttentionSite],
    batches: list[Tensor],
    *,
    seed: int = 0,
    with_query: bool = False,
    progress: bool = False,
) -> list[LayerGradients]:
    """Gradients of every layer in ``sites``; the model is as before afterwards, and its parameters get none.

    The loss is the summed negative log-likelihood (nats) of one label per position, sampled from the model with a
    generator of its own, so that the second moment of the gradients estimates the Fisher information.

    Args:
        model: a causal language model.
        sites: the layers.
        batches: token ids ``[B, S]``; fed one sequence at a time.
        seed: of the generator.
        with_query: keep the query projection's gradients too.
    """
    originals = [site.attention for site in sites]
    written = [
        WrittenOutAttention(read_weights(model, site), site.attention, with_query=with_query).eval() for site in sites
    ]
    gathered = [LayerGradients() for _ in sites]
    generator = torch.Generator(batches[0].device).manual_seed(seed)
    try:
        for site, attention in zip(sites, written, strict=True):
            site.parent.self_attn = attention
        for ids in progress_bar([row[None] for batch in batches for row in batch], "Curvature", progress, "sequence"):
            with torch.enable_grad():
                logits = model(input_ids=ids, use_cache=False).logits[0].float()
                labels = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)[:, 0]
                loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
                parts = [part for attention in written for part in attention.parts]
                gradients = list(torch.autograd.grad(loss, parts))
            del logits, loss, parts
            for attention, layer in zip(written, gathered, strict=True):
                count = len(attention.parts)
                attention.collect(layer, gradients[:count])
                del gradients[:count]
                attention.parts = []
    finally:
        for site, original in zip(sites, originals, strict=True):
            site.parent.self_attn = original
    return gathered
