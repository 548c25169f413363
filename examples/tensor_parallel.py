"""Heads over ranks: a small model of low-rank attention decodes over one compressed latent cache per rank.

    torchrun --nproc-per-node 2 -m examples.tensor_parallel

On GPUs over nccl, else on CPUs over gloo. Every rank holds its share of the heads and the same latents; what they
decode is compared with the model on one process.
"""

from __future__ import annotations

import argparse
import copy
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import fastattn
from fastattn.distributed import tensor_parallel_plan


class Model(nn.Module):
    """Layers of low-rank attention, each with an MLP."""

    def __init__(self, hidden: int, heads: int, layers: int) -> None:
        super().__init__()
        sizes = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
        self.attention = nn.ModuleList(fastattn.LowRankAttention(hidden, heads, **sizes) for _ in range(layers))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.SiLU(), nn.Linear(4 * hidden, hidden))
            for _ in range(layers)
        )

    def forward(self, hidden: Tensor, cache: fastattn.CompressedKVCache) -> Tensor:
        for layer, (attention, mlp) in enumerate(zip(self.attention, self.mlp, strict=True)):
            hidden = hidden + attention(hidden, cache=cache, layer=layer)
            hidden = hidden + mlp(hidden)
        return hidden

    def make_cache(self, policy: str, budget: int) -> fastattn.CompressedKVCache:
        return self.attention[0].make_cache(policy, budget, num_layers=len(self.attention), interval=16)


def decode(model: Model, policy: str, budget: int, prompt: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """The outputs of the steps, and the positions that the first layer keeps."""
    cache, outputs = model.make_cache(policy, budget), []
    with torch.inference_mode():
        hidden = model(prompt, cache)[:, -1:]
        for _ in range(steps):
            hidden = nn.functional.normalize(model(hidden, cache), dim=-1)
            outputs.append(hidden)
    return torch.cat(outputs, 1), cache.positions(0).clone()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="tova")
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=200)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),))

    torch.manual_seed(0)  # the same model and prompt on every rank
    one = Model(hidden=256, heads=8, layers=2).to(device)
    prompt = torch.randn(1, arguments.prompt, 256, device=device)
    many = copy.deepcopy(one)
    plan = tensor_parallel_plan(many)  # of attention; the MLPs stay whole here
    parallelize_module(many, mesh, plan)

    given = (arguments.policy, arguments.budget, prompt, arguments.steps)
    expected, kept = decode(one, *given)
    got, kept_here = decode(many, *given)
    error = (expected - got).abs().max().item()
    numbers = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in many.attention.parameters())
    print(
        f"rank {dist.get_rank()} of {mesh.size()}: {many.attention[0].num_heads} of 8 heads, {numbers:,} numbers "
        f"in the weights of attention; {arguments.steps} steps, largest difference to one process {error:.1e}, "
        f"kept tokens {'equal' if torch.equal(kept, kept_here) else 'differ'}",
        flush=True,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
