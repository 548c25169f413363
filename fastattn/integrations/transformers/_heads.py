"""Which part of a model's attention heads this process holds, where they are spread over ranks."""

from __future__ import annotations

from typing import Any

from torch import nn


def check_spread(decoder: nn.Module) -> None:
    """Weights are whole, or their modules know how to use a part: tensor parallelism hooks or replaces their forward.

    Raises:
        ValueError: they are sharded otherwise, by ``fully_shard``.
    """
    for name, module in decoder.named_modules():
        served = module._forward_pre_hooks or "forward" in module.__dict__
        for parameter in module.parameters(recurse=False):
            if not served and "DTensor" in (type(parameter).__name__, type(parameter.data).__name__):
                raise ValueError(
                    "the model's weights must be whole on every rank, or spread by heads "
                    f"(fastattn.distributed.tensor_parallel_plan, a tp_plan), but {name}.weight is sharded otherwise "
                    "(fully_shard): call compressed_cache before sharding, or on an unsharded model"
                )


def find_shard(module: Any, heads: int, kv_heads: int, low_rank: bool) -> Any:
    """The :class:`fastattn.distributed.HeadShard` of an attention module, None where it has all heads.

    ``fastattn.distributed`` leaves it on the module; transformers' ``tp_plan`` shows in the weights.

    Args:
        module: the model's first attention module.
        heads, kv_heads: of the queries and keys that it made.
        low_rank: the keys are latents.

    Raises:
        ValueError: the heads that it made are no even share of the configuration's.
    """
    shard = getattr(module, "head_shard", None)
    if shard is not None:
        return shard
    meshes = [parameter.device_mesh for parameter in module.parameters() if hasattr(parameter, "device_mesh")]
    config = getattr(module, "config", None)
    total = getattr(config, "num_attention_heads", heads)
    if not meshes or total == heads:
        return None
    from fastattn.distributed import HeadShard

    total_kv = 1 if low_rank else getattr(config, "num_key_value_heads", None) or total
    shard = HeadShard(meshes[0], total, total_kv)
    if (shard.local_heads, shard.local_kv_heads) != (heads, kv_heads):
        raise ValueError(
            f"the model's heads must be spread evenly over ranks, {shard.local_heads} query and {shard.local_kv_heads} "
            f"key/value heads to each, got {heads} and {kv_heads}"
        )
    return shard
