"""Train a small byte-level language model with low-rank attention, next to the same one with multi-head attention.

``python -m examples.train_low_rank`` takes a few minutes on two CPU cores. The text is Python's own documentation. Both
models are trained from the same seed on the same batches, compiled; then both continue a text over a full cache.
Shown are the loss on held-out text, the bytes that a cached token takes, the decoding speed, and a plot of both curves.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from fastattn import CompressedKVCache, LowRankAttention, Rotary
from fastattn.ops import attention

LAYERS, HIDDEN, HEADS, HEAD_DIM = 3, 192, 6, 32
RANK, ROPE_DIM = 48, 16
CONTEXT, BATCH = 192, 12


class MultiHeadAttention(nn.Module):
    """Ordinary causal attention, with the calls of LowRankAttention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(HIDDEN, 3 * HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.rotary = Rotary(10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
        for projection in (self.qkv_proj, self.o_proj):
            nn.init.normal_(projection.weight, std=0.02)

    def forward(self, x: Tensor, *, cache: CompressedKVCache | None = None, layer: int = 0) -> Tensor:
        batch, tokens, _ = x.shape
        query, key, value = self.qkv_proj(x).view(batch, tokens, 3, HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4)
        position = torch.arange(tokens).expand(batch, tokens)
        if cache is not None:
            position = position + cache.tokens_seen[:, None]
        query, key = self.rotary.rotate(query, position), self.rotary.rotate(key, position)
        out = attention(query, key, value, causal=True) if cache is None else cache.attend(layer, query, key, value)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def make_cache(self, policy: str, budget: int, num_layers: int) -> CompressedKVCache:
        return CompressedKVCache(policy, budget, num_layers=num_layers, num_kv_heads=HEADS, head_dim=HEAD_DIM)


def low_rank_attention() -> LowRankAttention:
    return LowRankAttention(
        HIDDEN,
        HEADS,
        kv_lora_rank=RANK,
        qk_nope_head_dim=HEAD_DIM,
        qk_rope_head_dim=ROPE_DIM,
        v_head_dim=HEAD_DIM,
    )


class Block(nn.Module):
    def __init__(self, attend: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.attention = attend
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))

    def forward(self, x: Tensor, cache: CompressedKVCache | None, layer: int) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cache=cache, layer=layer)
        return x + self.mlp(self.mlp_norm(x))


class ByteModel(nn.Module):
    """A decoder over bytes; ``attend`` makes each layer's attention."""

    def __init__(self, attend: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, HIDDEN)
        self.blocks = nn.ModuleList(Block(attend()) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, 256, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: Tensor, cache: CompressedKVCache | None = None) -> Tensor:
        x = self.embed(tokens)
        for layer, block in enumerate(self.blocks):
            x = block(x, cache, layer)
        return self.head(self.norm(x))


@dataclass
class Result:
    """What one model did."""

    name: str
    parameters: int
    cache_bytes_per_token: int
    train_losses: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)  # (step, nats per byte)
    train_seconds: float = 0.0
    tokens_per_second: float = 0.0
    sample: str = ""


def text() -> tuple[Tensor, Tensor]:
    """Training and held-out bytes of the help topics of the standard library."""
    from pydoc_data.topics import topics

    data = torch.tensor(list("\n\n".join(topics[name].strip() for name in sorted(topics)).encode()))
    cut = int(0.9 * len(data))
    return data[:cut], data[cut:]


def batches(data: Tensor, seed: int) -> Callable[[], Tensor]:
    """A source of random windows ``[BATCH, CONTEXT + 1]``, the same ones for the same seed."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        first = torch.randint(len(data) - CONTEXT, (BATCH,), generator=generator)
        return data[first[:, None] + torch.arange(CONTEXT + 1)]

    return draw


def loss_of(model: Callable[..., Tensor], window: Tensor) -> Tensor:
    """Nats per byte."""
    return functional.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())


def train(model: ByteModel, result: Result, steps: int, every: int, compiled: bool) -> None:
    train_data, held_out = text()
    draw, held_draw = batches(train_data, seed=1), batches(held_out, seed=2)
    held_windows = [held_draw() for _ in range(4)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    warmup = max(1, steps // 20)
    run = torch.compile(model, fullgraph=True) if compiled else model
    start = time.perf_counter()
    for step in range(1, steps + 1):
        rate = min(step / warmup, 0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * rate
        loss = loss_of(run, draw())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        result.train_losses.append(loss.item())
        if step % every == 0 or step == steps:
            with torch.no_grad():
                held = sum(loss_of(model, window).item() for window in held_windows) / len(held_windows)
            result.held_out.append((step, held))
            seconds = time.perf_counter() - start
            print(
                f"  {result.name}: step {step}/{steps}, training loss {loss.item():.3f}, held out {held:.3f} "
                f"({seconds:.0f} s)",
                flush=True,
            )
    result.train_seconds = time.perf_counter() - start


def decode(model: ByteModel, result: Result, tokens: int, compiled: bool) -> None:
    """Continue held-out text, taking the likeliest byte; the first steps, which compile, are not timed."""
    prompt = text()[1][None, :CONTEXT]
    warm = min(8, tokens // 2)
    cache = model.blocks[0].attention.make_cache("streaming_llm", CONTEXT + tokens, num_layers=LAYERS)
    step = torch.compile(model, fullgraph=True) if compiled else model
    out = []
    with torch.no_grad():
        current = model(prompt, cache)[:, -1:].argmax(-1)
        for index in range(tokens):
            if index == warm:
                start = time.perf_counter()
            out.append(current.item())
            current = step(current, cache)[:, -1:].argmax(-1)
    result.tokens_per_second = (tokens - warm) / (time.perf_counter() - start)
    result.sample = bytes(out).decode(errors="replace")


def run(steps: int, every: int, decoded: int, compiled: bool) -> list[Result]:
    """Both models, trained and decoded."""
    kinds: dict[str, tuple[Callable[[], nn.Module], int]] = {
        "multi-head": (MultiHeadAttention, 2 * HEADS * HEAD_DIM),
        "low-rank": (low_rank_attention, RANK + ROPE_DIM),
    }
    results = []
    for name, (attend, values_per_token) in kinds.items():
        torch.manual_seed(0)
        model = ByteModel(attend)
        parameters = sum(p.numel() for p in model.parameters())
        results.append(Result(name, parameters, 4 * values_per_token * LAYERS))
        train(model, results[-1], steps, every, compiled)
        decode(model.eval(), results[-1], decoded, compiled)
    return results


def plot(results: list[Result], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for color, result in zip(("tab:blue", "tab:orange"), results, strict=True):
        axes.plot(range(1, len(result.train_losses) + 1), result.train_losses, color=color, alpha=0.25, linewidth=0.8)
        axes.plot(*zip(*result.held_out, strict=True), color=color, marker="o", markersize=3, label=result.name)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title("Held-out loss (bold) and training loss (pale)")
    ratio = results[0].cache_bytes_per_token / results[1].cache_bytes_per_token
    axes.legend(title=f"the low-rank cache is {ratio:.0f}x smaller")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def print_table(results: list[Result]) -> None:
    print(f"\n{'attention':12} {'parameters':>10} {'held-out loss':>13} {'cache B/token':>13} {'decoded tokens/s':>16}")
    for r in results:
        print(
            f"{r.name:12} {r.parameters:10,} {r.held_out[-1][1]:13.3f} {r.cache_bytes_per_token:13,} "
            f"{r.tokens_per_second:16.0f}"
        )
    for r in results:
        print(f"\n{r.name} continues: {r.sample[:120]!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="training steps (default 300)")
    parser.add_argument("--decode", type=int, default=256, help="bytes to decode (default 256)")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--plot", type=Path, default=Path("out/train_low_rank.png"), help="where the figure goes")
    arguments = parser.parse_args()
    results = run(arguments.steps, max(1, arguments.steps // 10), arguments.decode, compiled=not arguments.eager)
    print_table(results)
    plot(results, arguments.plot)
    print(f"\nplot: {arguments.plot}")


if __name__ == "__main__":
    main()
