"""A small language model in plain PyTorch that decodes over a compressed cache.

No transformers library: the model calls :meth:`fastattn.CompressedKVCache.attend` in place of its attention. It is
trained on bytes of Python's documentation, then reads unseen text byte by byte over a full cache and each policy's.

    python -m examples.plain_pytorch
"""

from __future__ import annotations

import argparse
import math
from pydoc_data.topics import topics

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional
from tqdm import trange

import fastattn
from fastattn.modules import policy_names

POLICIES = policy_names()
VOCABULARY, WIDTH, HEADS, KV_HEADS, LAYERS = 256, 128, 4, 2, 2
HEAD_DIM = WIDTH // HEADS


class Attention(nn.Module):
    def __init__(self, layer: int, rotary: fastattn.Rotary) -> None:
        super().__init__()
        self.layer, self.rotary = layer, rotary
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(
        self, x: Tensor, positions: Tensor, cache: fastattn.CompressedKVCache | None, mask: Tensor | None
    ) -> Tensor:
        heads = rearrange(self.qkv(x), "b t (h d) -> b h t d", d=HEAD_DIM)
        query, key, value = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        query, key = self.rotary.rotate(query, positions), self.rotary.rotate(key, positions)
        if cache is None:
            out = fastattn.ops.attention(query, key, value, causal=True)
        else:
            out = cache.attend(self.layer, query, key, value, attention_mask=mask)
        return self.out(rearrange(out, "b h t d -> b t (h d)"))


class Block(nn.Module):
    def __init__(self, layer: int, rotary: fastattn.Rotary) -> None:
        super().__init__()
        self.attention = Attention(layer, rotary)
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(
        self, x: Tensor, positions: Tensor, cache: fastattn.CompressedKVCache | None, mask: Tensor | None
    ) -> Tensor:
        x = x + self.attention(self.norm1(x), positions, cache, mask)
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """A decoder over bytes: grouped query heads, rotary positions, tied embedding."""

    def __init__(self) -> None:
        super().__init__()
        frequencies = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        self.rotary = fastattn.Rotary(frequencies)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(layer, self.rotary) for layer in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(
        self, tokens: Tensor, cache: fastattn.CompressedKVCache | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """``tokens [B, T]`` -> logits ``[B, T, 256]``. With a cache the tokens continue what it has seen.

        ``mask [B, T]`` is False at padding, and in the rows that bring nothing to a call over a cache.
        """
        positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
        if cache is not None:
            positions = positions + cache.tokens_seen[:, None]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, positions, cache, mask)
        return self.norm(x) @ self.embedding.weight.T

    def make_cache(
        self, policy: str, budget: int, batch_size: int = 1, interval: int = 16
    ) -> fastattn.CompressedKVCache:
        return fastattn.CompressedKVCache(
            policy,
            budget,
            num_layers=LAYERS,
            num_kv_heads=KV_HEADS,
            num_heads=HEADS,
            head_dim=HEAD_DIM,
            batch_size=batch_size,
            interval=interval,
            rotary=self.rotary,
            dtype=self.embedding.weight.dtype,
        )


def documentation() -> Tensor:
    """Python's documentation as bytes ``[N]``."""
    text = "\n\n".join(topics[name].strip() for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def train(model: Model, data: Tensor, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    progress = trange(steps, desc="training", disable=None)
    for step in progress:
        starts = torch.randint(len(data) - 257, (8,), generator=generator)
        batch = torch.stack([data[start : start + 257] for start in starts])
        loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            progress.set_postfix(loss=f"{loss.item():.2f}")


@torch.inference_mode()
def read(model: Model, tokens: Tensor, prompt: int, cache: fastattn.CompressedKVCache) -> float:
    """Bits per byte of ``tokens [N]`` after the first ``prompt``, which are fed at once; the others one by one."""
    cache.reset()
    logits = [model(tokens[None, :prompt], cache)[:, -1]]
    logits += [model(token.view(1, 1), cache)[:, -1] for token in tokens[prompt:-1]]
    return functional.cross_entropy(torch.cat(logits), tokens[prompt:]).item() / math.log(2)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="training steps (default 200)")
    parser.add_argument("--tokens", type=int, default=768, help="bytes read afterwards (default 768)")
    parser.add_argument("--budget", type=int, default=64, help="tokens kept by the policies (default 64)")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    data = documentation()
    unseen = data[-options.tokens :]
    model = Model()
    train(model, data[: -options.tokens], options.steps)
    print(f"{'cache':20}{'KiB':>8}{'bits per byte':>16}")
    runs = [("full", "streaming_llm", options.tokens)] + [(name, name, options.budget) for name in POLICIES]
    for name, policy, budget in runs:
        cache = model.make_cache(policy, budget)
        print(f"{name:20}{cache.nbytes / 1024:8.0f}{read(model, unseen, options.tokens // 3, cache):16.3f}")


if __name__ == "__main__":
    main()
