"""Tensor parallelism: plans for ``torch.distributed.tensor.parallel.parallelize_module`` that deal heads to ranks."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from fastattn.distributed.agreement import agree, check_mesh
from fastattn.distributed.heads import HeadShard
from fastattn.modules.low_rank import LowRankAttention

_HEAD_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def tensor_parallel_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """A plan for ``parallelize_module(model, mesh, plan)`` that spreads attention heads over the ranks of a mesh.

    - :class:`~fastattn.LowRankAttention`: the up-projections ``q_b_proj`` (or ``q_proj``) and ``kv_b_proj``
      column-wise, ``o_proj`` row-wise. Down-projections, norms, latents and the rope key are on every rank; so is the
      latent cache that ``make_cache`` gives, whose policy chooses alike on all ranks.
    - Attention of transformers models with ``q_proj``, ``k_proj``, ``v_proj``: column-wise, by whole heads. Where ranks
      outnumber key/value heads, neighboring ranks hold the same one. ``compressed_cache(model)``, called on every rank
      after ``parallelize_module``, then holds the rank's own heads.
    - The rest of a transformers model: what its ``tp_plan`` says (of the MLPs and the output layer).

    A forward pass costs one all-reduce of ``[B, T, hidden_size]`` per attention layer and one per MLP. Eviction costs
    none, but for policies that average over heads of several ranks: one of ``[B, Hkv, C]`` per layer and
    compression. Heads that do not divide among the ranks raise when the plan is applied, on every rank.

    Args:
        model: a module that has a :class:`~fastattn.LowRankAttention` in it (or is one), or a transformers model.

    Returns:
        Module path -> style; ``""`` is the model itself.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: nothing in it can be spread, or its ``tp_plan`` has a style that no style of PyTorch matches.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    plan: dict[str, ParallelStyle] = {}
    attention: set[str] = set()
    for path, module in model.named_modules():
        if isinstance(module, LowRankAttention):
            plan[path] = LowRankHeads()
            attention.add(path)
        elif _has_head_projections(module):
            plan[path] = GroupedHeads()
            attention.add(path)
    if not attention:
        raise ValueError(
            f"model must have attention that can be spread over ranks (LowRankAttention, or q_proj, k_proj, v_proj and "
            f"config of a transformers model), found none in {type(model).__name__}"
        )
    plan.update(_rest_of_model(model, attention))
    return plan


def _has_head_projections(module: nn.Module) -> bool:
    projections = [getattr(module, name, None) for name in _HEAD_PROJECTIONS]
    return all(isinstance(one, nn.Linear) for one in projections) and hasattr(
        getattr(module, "config", None), "num_attention_heads"
    )


def _rest_of_model(model: nn.Module, attention: set[str]) -> dict[str, ParallelStyle]:
    """Styles for what a transformers model's own plan names outside of attention heads."""
    named: Any = getattr(model, "tp_plan", None) or {}
    tied = _shares_embedding(model)
    plan: dict[str, ParallelStyle] = {}
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        style = named.get(re.sub(r"\d+", "*", path))
        inside = next((owner for owner in attention if owner == "" or path.startswith(f"{owner}.")), None)
        if style is None or path in attention or (inside is not None and name in _HEAD_PROJECTIONS):
            continue
        if inside is not None and (style == "replicated_with_grad_allreduce" or _is_low_rank(model, inside)):
            continue  # the style of the attention module covers that
        if style in ("embedding_rowwise", "embedding_colwise") or (tied and module is _output_layer(model)):
            continue  # an embedding is small beside the rest, and one tied to the output layer must stay one tensor
        plan[path] = _style(path, style)
    return plan


def _is_low_rank(model: nn.Module, path: str) -> bool:
    return isinstance(model.get_submodule(path), LowRankAttention)


def _output_layer(model: Any) -> Any:
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


def _shares_embedding(model: Any) -> bool:
    if not hasattr(model, "get_input_embeddings"):
        return False
    output, given = _output_layer(model), model.get_input_embeddings()
    return output is not None and given is not None and output.weight is given.weight


def _style(path: str, name: str) -> ParallelStyle:
    """The style of PyTorch that a name in a transformers plan stands for."""
    if name == "colwise":
        return ColwiseParallel()
    if name == "rowwise":
        return RowwiseParallel()
    if name in ("colwise_gather_output", "colwise_rep"):
        return ColwiseParallel(output_layouts=Replicate())
    if name in ("rowwise_split_input", "rowwise_rep"):
        return RowwiseParallel(input_layouts=Replicate())
    raise ValueError(
        f'model must have a tp_plan of colwise and rowwise layers, got "{name}" for {path}: load it with '
        "from_pretrained(..., tp_plan=...) and call compressed_cache on it"
    )


class LowRankHeads(ParallelStyle):
    """Spreads the heads of a :class:`~fastattn.LowRankAttention` over the ranks of a mesh."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, LowRankAttention):
            raise TypeError(f"module must be a LowRankAttention, got {type(module).__name__}")
        _check_unspread(module)
        shard = _agreed_shard(module, device_mesh, module.num_heads, 1)
        query = "q_proj" if module.q_lora_rank is None else "q_b_proj"
        plan = {query: ColwiseParallel(), "kv_b_proj": ColwiseParallel(), "o_proj": RowwiseParallel()}
        parallelize_module(module, device_mesh, plan, src_data_rank=self.src_data_rank)
        # Absorbing takes the rank's rows of this weight as they are, past the hooks that spread it.
        module.kv_b_proj.__dict__["hooks_of_shard"] = frozenset(_hooks(module.kv_b_proj))
        module.num_heads, module.head_shard = shard.local_heads, shard
        return module


class GroupedHeads(ParallelStyle):
    """Spreads query and key/value heads of a transformers attention module over the ranks of a mesh."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _check_unspread(module)
        config: Any = module.config
        heads = config.num_attention_heads
        shard = _agreed_shard(module, device_mesh, heads, getattr(config, "num_key_value_heads", None) or heads)
        shared = _shared_by_heads(module, heads)
        key_value = ColwiseParallel() if shard.replicas == 1 else ReplicatedColwise(shard)
        plan: dict[str, ParallelStyle] = {"q_proj": ColwiseParallel(), "k_proj": key_value, "v_proj": key_value}
        plan.update({name: SharedByHeads() for name in shared})
        parallelize_module(module, device_mesh, plan, src_data_rank=self.src_data_rank)
        module.__dict__.update(num_key_value_groups=shard.local_heads // shard.local_kv_heads, head_shard=shard)
        return module


def _shared_by_heads(module: Any, heads: int) -> list[str]:
    """The norms that an attention module applies to every head alike.

    Raises:
        ValueError: one that needs all heads at once.
    """
    head_dim = module.q_proj.out_features // heads
    own = [name for name, _ in module.named_parameters(recurse=False)]
    if own:
        raise ValueError(
            f"{type(module).__name__} must have no weights of its own to spread heads over ranks, got {own}"
        )
    shared = []
    for name, child in module.named_children():
        if isinstance(child, nn.Linear) or next(child.parameters(), None) is None:
            continue
        sizes = [list(parameter.shape) for parameter in child.parameters()]
        if sizes != [[head_dim]]:
            raise ValueError(
                f"{name} must be the same for every head, with one weight [{head_dim}], to spread heads, got "
                f"weights {sizes} of a {type(child).__name__}"
            )
        shared.append(name)
    return shared


class ReplicatedColwise(ParallelStyle):
    """Column-wise by key/value heads that are fewer than the ranks: neighboring ranks hold the same rows."""

    def __init__(self, shard: HeadShard) -> None:
        super().__init__()
        self.shard = shard

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mesh, placements = self.shard.replica_mesh, [Shard(0), Replicate()]
        for name, parameter in list(module.named_parameters(recurse=False)):
            spread = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(spread, requires_grad=parameter.requires_grad))

        def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (DTensor.from_local(args[0], mesh, [Replicate(), Replicate()], run_check=False), *args[1:])

        def leave(_: nn.Module, args: tuple[Any, ...], out: DTensor) -> Tensor:
            return out.to_local(grad_placements=[Shard(out.dim() - 1), Partial()])

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
        return module


class SharedByHeads(ParallelStyle):
    """A module whose parameters every rank has and uses for its own heads: their gradients are summed over ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()

        def sum_gradient(parameter: Tensor) -> None:
            if parameter.grad is not None:
                torch.distributed.all_reduce(parameter.grad, group=group)

        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(sum_gradient)
        return module


def _hooks(module: nn.Module) -> list[int]:
    return [*module._forward_pre_hooks, *module._forward_hooks]


def _check_unspread(module: nn.Module) -> None:
    if getattr(module, "head_shard", None) is not None:
        raise ValueError(f"module must not be spread over ranks yet, got a {type(module).__name__} that is")


def _agreed_shard(module: nn.Module, mesh: DeviceMesh, heads: int, kv_heads: int) -> HeadShard:
    """The rank's share, once all ranks are known to have the same module to share."""
    check_mesh(mesh, "device_mesh")
    shapes = [(name, tuple(parameter.shape), parameter.dtype) for name, parameter in module.named_parameters()]
    agree(mesh, f"{type(module).__name__}'s heads and weights", (heads, kv_heads, shapes))
    return HeadShard(mesh, heads, kv_heads)
