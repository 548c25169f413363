"""Tokens over ranks: every rank holds a part of one compressed cache and attends to that part.

    torchrun --nproc-per-node 2 -m examples.context_parallel

On GPUs over nccl, else on CPUs over gloo. What is decoded and kept is compared with the cache of one process.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fastattn
from fastattn.distributed import context_parallel

LAYERS, HEADS, KV_HEADS, DIM = 2, 8, 2, 64


def new_tokens(count: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Stand for a layer's projections and rotation: query, key, value."""
    return tuple(torch.randn(1, heads, count, DIM, device=device) for heads in (HEADS, KV_HEADS, KV_HEADS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="key_diff")
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=80)
    arguments = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),))

    torch.manual_seed(0)  # the same tokens on every rank
    sizes = {"num_layers": LAYERS, "num_kv_heads": KV_HEADS, "num_heads": HEADS, "head_dim": DIM, "interval": 32}
    rotary = fastattn.Rotary(10000.0 ** (-torch.arange(0, DIM, 2) / DIM))
    one, empty = (
        fastattn.CompressedKVCache(arguments.policy, arguments.budget, **sizes, rotary=rotary, device=device)
        for _ in range(2)
    )
    many = context_parallel(empty, mesh)
    del empty

    error = 0.0
    with torch.inference_mode():
        for count in [arguments.prompt] + [1] * arguments.steps:
            for layer in range(LAYERS):
                new = new_tokens(count, device)
                difference = one.attend(layer, *new) - many.attend(layer, *new)
                error = max(error, difference.abs().max().item())
    same = all(torch.equal(one.positions(layer), many.positions(layer)) for layer in range(LAYERS))
    lengths = many.rank_lengths(0)[:, 0].sum(1).tolist()
    megabytes = [sum(t.numel() * t.element_size() for t in cache.buffers()) / 1e6 for cache in (one, many)]
    print(
        f"rank {dist.get_rank()} of {mesh.size()}: {megabytes[1]:.2f} MB of the {megabytes[0]:.2f} MB that one process "
        f"holds, tokens of each rank in layer 0 {lengths}, {many.moved} moved to another rank; largest difference "
        f"{error:.1e}, kept tokens {'equal' if same else 'differ'}",
        flush=True,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
